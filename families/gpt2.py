"""GPT-2: LayerNorm, learned positions, biases everywhere, matrices stored [in, out].

Source: transformers, models/gpt2.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from families import read
from families.family import Family
from families.fields import NUMBER, ConfigFields
from families.stored_layouts import joined
from feedback.errors import UserError
from model import Chunk, Config, LayerKind, add_bias
from sharding.arrays import ArrayInfo, Stored, declared, declared_bias, infos_of, pytree, sizes_of
from sharding.collective_matmul import column_mean, einsum, psum
from sharding.mesh import MODEL


@pytree
class LayerNormWeights:
    weight: Any
    bias: Any


@dataclasses.dataclass(frozen=True)
class LayerNorm:
    """Mean 0 and variance 1, then a factor and a bias for each column. Source: arXiv 1607.06450."""

    eps: float

    def declare(self, info: ArrayInfo) -> Any:
        assert info.stored is not None  # as all weights are
        stored = dataclasses.replace(info.stored, name=info.stored.name.removesuffix("weight") + "bias")
        return LayerNormWeights(weight=info, bias=dataclasses.replace(info, stored=stored, initial=0.0))

    def __call__(self, x: Array, w: LayerNormWeights, mean=column_mean) -> Array:
        """x: [...,D] -> [...,D] in x's dtype. mean: as for `model.Norm`."""
        y = x.astype(jnp.float32)
        y = y - mean(y)
        y = y * lax.rsqrt(mean(y * y) + self.eps)
        return (y * w.weight.astype(jnp.float32) + w.bias.astype(jnp.float32)).astype(x.dtype)


@pytree
class GeluMLPWeights:
    up: Array = declared("fD", "D", "up_proj.weight", "FD")
    down: Array = declared("Df", "f", "down_proj.weight", "DF")
    up_bias: Array = declared_bias("f", "up_proj.bias", "F")
    down_bias: Array = declared_bias("D", "down_proj.bias", "D")


@dataclasses.dataclass(frozen=True)
class GeluMLP:
    """Two matrices with biases, and GELU between them. Source: arXiv 1706.03762."""

    F: int

    def declare(self, prefix: str, D: int) -> GeluMLPWeights:
        return infos_of(GeluMLPWeights, prefix, dict(D=D) | sizes_of(self))

    def __call__(self, x: Array, w: GeluMLPWeights, chunk: Chunk) -> Array:
        """x: [b,T,D] -> [b,T,D]."""
        h = add_bias(einsum("bTD,fD->bTf", x, w.up), w.up_bias)
        h = jax.nn.gelu(h, approximate=True)
        y = psum(einsum("bTf,Df->bTD", h, w.down), MODEL)  # f
        return add_bias(y, w.down_bias)


@dataclasses.dataclass(frozen=True)
class LearnedPositions:
    """An embedding of each of the P positions, added to the token's."""

    P: int

    def declare(self, D: int) -> ArrayInfo:
        stored = Stored("model.embed_positions.weight", "PD")
        return ArrayInfo("PD", stored=stored, shape=(self.P, D))

    def __call__(self, x: Array, w: Array, positions: Array) -> Array:
        """x: [b,T,D] -> [b,T,D]."""
        return x + w.at[positions].get(mode="clip")


def config(fields: ConfigFields) -> Config:
    if not fields.take("scale_attn_weights", bool, True):
        raise UserError("config.json: scale_attn_weights = false is not supported")
    heads = read.attention(fields, bias=True, output_bias=True)
    width = fields.take("intermediate_size", int, 4 * fields.take("hidden_size", int))
    norm = LayerNorm(fields.take("layer_norm_epsilon", NUMBER))
    layers = (LayerKind(heads, GeluMLP(width), norm),) * read.depth(fields)
    positions = LearnedPositions(fields.take("max_position_embeddings", int))
    return read.config(fields, layers, norm, tied=True, position_embedding=positions)


QKV = "attention.q", "attention.k", "attention.v"
QKV_BIAS = "attention.q_bias", "attention.k_bias", "attention.v_bias"
GPT2 = Family(
    "gpt2",
    config,
    field_names={
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_positions": "max_position_embeddings",
    },
    supported={"activation_function": ("gelu_new",)},
    no_effect="""attn_pdrop embd_pdrop n_ctx resid_pdrop summary_activation summary_first_dropout
        summary_proj_to_labels summary_type summary_use_proj task_specific_params""",
    tensor_names=(
        (r"^(transformer\.)?h\.(\d+)\.", r"model.layers.\2."),
        (r"^(transformer\.)?wte\.", "model.embed_tokens."),
        (r"^(transformer\.)?wpe\.", "model.embed_positions."),
        (r"^(transformer\.)?ln_f\.", "model.norm."),
        (r"\.ln_1\.", ".input_layernorm."),
        (r"\.ln_2\.", ".post_attention_layernorm."),
        (r"\.attn\.c_attn\.", ".self_attn.c_attn."),
        (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
        (r"\.mlp\.c_fc\.", ".mlp.up_proj."),
        (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
    ),
    layouts={
        **joined("self_attn.c_attn.weight", "D[KGH+KH+KH]", *QKV),
        **joined("self_attn.c_attn.bias", "[KGH+KH+KH]", *QKV_BIAS),
        "attention.o": (Stored("self_attn.o_proj.weight", "(KGH)D"),),
        "feed_forward.up": (Stored("mlp.up_proj.weight", "DF"),),
        "feed_forward.down": (Stored("mlp.down_proj.weight", "FD"),),
    },
    unused_tensors=r"\.attn\.(masked_)?bias$",
)
