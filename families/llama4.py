"""Llama 4: layers with RoPE and block-local attention, full layers without RoPE, and experts.

Sources: transformers, models/llama4; meta-llama/llama-models, models/llama4.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array

from families import read
from families.family import LANGUAGE_MODEL_NAMES, VISION_TENSORS, Family
from families.fields import NUMBER, ConfigFields
from families.stored_layouts import SINGLE_EXPERTS
from families.tool_formats import PYTHONIC
from model import BlockLocal, Config, Full, LayerKind, Router


@dataclasses.dataclass(frozen=True)
class QueryScale:
    """A factor of queries: 1 + scale * log1p(floor((position + offset) / floor)).

    Source: arXiv 2501.19399.
    """

    scale: float
    floor: float
    offset: int = 1

    def __call__(self, q: Array, positions: Array) -> Array:
        """q: [b,T,k,G,H], positions: [b,T] -> [b,T,k,G,H]."""
        factor = 1 + self.scale * jnp.log1p(jnp.floor((positions + self.offset) / self.floor))
        return (q * factor[:, :, None, None, None]).astype(q.dtype)


def config(fields: ConfigFields) -> Config:
    depth, heads, norm = read.depth(fields), read.attention(fields), read.norm(fields)
    rotary = read.rotary_layers(fields)
    types = ["chunked_attention" if has_rope else "full_attention" for has_rope in rotary]
    types = read.layer_types(fields, "layer_types", types, "chunked_attention", "full_attention")
    chunk = fields.take("attention_chunk_size", int, None)

    # transformers normalizes after RoPE; without a weight it makes no difference beyond rounding.
    qk_norm = dataclasses.replace(norm, weight=False) if fields.take("use_qk_norm", bool, True) else None
    with_rope = dataclasses.replace(heads, qk_norm=qk_norm)
    rope = read.rope(fields, heads.H, 500000.0, interleaved=True)
    scale = QueryScale(fields.take("attn_scale", NUMBER, 0.1), fields.take("floor_scale", NUMBER, 8192))
    scaled = fields.take("attn_temperature_tuning", (bool, int), True)
    without_rope = dataclasses.replace(heads, query_scale=scale if scaled else None)

    moe_every = fields.take("interleave_moe_layer_step", int, 1)
    sparse = fields.take("moe_layers", list, list(range(moe_every - 1, depth, moe_every)))
    experts = read.moe(fields, Router("sigmoid", scales="input"), shared=1)
    dense = read.mlp(fields, "intermediate_size_mlp")
    layers = tuple(
        LayerKind(
            with_rope if rotary[i] else without_rope,
            experts if i in sparse else dense,
            norm,
            BlockLocal(chunk) if chunk and types[i] == "chunked_attention" else Full(),
            rope if rotary[i] else None,
        )
        for i in range(depth)
    )
    return read.config(fields, layers, norm)


LLAMA4 = Family(
    "llama4_text",
    config,
    multimodal_types=("llama4",),
    tensor_names=(*LANGUAGE_MODEL_NAMES, (r"\.feed_forward\.", ".mlp.")),
    layouts=SINGLE_EXPERTS,  # some checkpoints store each expert as a tensor of its own
    unused_tensors=VISION_TENSORS,
    tools=PYTHONIC,
)
