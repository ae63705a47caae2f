"""Gemma 4: heads of two widths, normalized values, scores without a scale, and a factor after each layer.

Source: transformers, models/gemma4 and models/gemma4_unified.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from families import read
from families.family import LANGUAGE_MODEL_NAMES, Family
from families.fields import NUMBER, ConfigFields
from families.gemma import GeGLU
from families.gemma3 import NAMES, SUPPORTED
from feedback.errors import UserError
from model import (
    Attention,
    AttentionWeights,
    Chunk,
    Config,
    LayerKind,
    Norm,
    Residual,
    Rope,
    Rotation,
)
from sharding.arrays import ArrayInfo, declared_norm, infos_of, pytree
from sharding.collective_matmul import products


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueNormAttention(Attention):
    """Attention with a norm of each query, key and value, of which the values' has no weight.

    keys_are_values: a value is what the key is before its norm and RoPE, and has no matrix of its own.
    """

    qk_norm: Norm
    keys_are_values: bool

    def declare(self, prefix: str, D: int, weights: type | None = None) -> Any:
        infos = super().declare(prefix, D, weights)
        return dataclasses.replace(infos, v=None) if self.keys_are_values else infos

    def projections(self, x: Array, w: AttentionWeights) -> tuple[Array, Array, Array]:
        """x, and the result: see `Attention.projections`."""
        if not self.keys_are_values:
            return super().projections(x, w)
        q, k = products(x, ("bTD,kgHD->bTkgH", w.q), ("bTD,khD->bTkh", w.k))
        return q, k, k

    def project(
        self, x: Array, w: AttentionWeights, chunk: Chunk, rotation: Rotation | None
    ) -> tuple[Array, Array]:
        """x: [b,T,D] -> queries [b,T,k,G,H], and each key beside its value [b,T,k,2H]."""
        q, keys_values = super().project(x, w, chunk, rotation)
        k, v = jnp.split(keys_values, 2, -1)
        return q, jnp.concatenate([k, dataclasses.replace(self.qk_norm, weight=False)(v, None)], -1)


@pytree
class ScaledResidualWeights:
    norm: Any = declared_norm("D", "post_mlp_layernorm.weight")
    factor: Array = declared_norm("N", "layer_scalar")


@dataclasses.dataclass(frozen=True)
class ScaledResidual(Residual):
    """A residual after which the whole stream is multiplied by a learned factor, of N = 1 element."""

    def __call__(self, x: Array, y: Array, w: ScaledResidualWeights, chunk: Chunk) -> Array:
        """x, y: [b,T,D] -> [b,T,D]."""
        return super().__call__(x, y, w.norm, chunk) * w.factor

    def declare(self, info: ArrayInfo) -> ScaledResidualWeights:
        assert info.stored is not None
        prefix = info.stored.name.removesuffix("post_mlp_layernorm.weight")
        return infos_of(ScaledResidualWeights, prefix, dict(D=info.shape[0], N=1))


def config(fields: ConfigFields) -> Config:
    depth, norm, masks = read.depth(fields), read.norm(fields, offset=0.0), read.masks(fields)
    types = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(depth)]
    types = read.layer_types(fields, "layer_types", types, *masks)
    types = [*types[:-1], "full_attention"]  # whatever the file says of the last layer
    heads = attention_of(fields, types, norm)
    ropes, positions = ConfigFields(fields.take("rope_parameters", dict, ROPES)), "max_position_embeddings"
    mlp, after = read.mlp(fields, activation=GeGLU()), ScaledResidual(norm)
    kinds = {}
    for x in dict.fromkeys(types):
        rope = rope_of(ropes.take(x, dict), heads[x].H, fields.take(positions, int))
        kinds[x] = LayerKind(
            heads[x], mlp, norm, masks[x], rope, Residual(norm), feed_forward_residual=after
        )  # fmt: skip
    for x in masks:  # a type that no layer has
        ropes.get(x)
    ropes.finish({})
    scale, cap = fields.take("hidden_size", int) ** 0.5, fields.take("final_logit_softcapping", NUMBER, None)
    layers = tuple(kinds[x] for x in types)
    return read.config(fields, layers, norm, tied=True, embedding_scale=scale, logit_softcap=cap)


def attention_of(fields: ConfigFields, types: list[str], norm: Norm) -> dict[str, Attention]:
    """The attention of each type of layers.

    Their sizes are in fields of their own, or as transformers saves them, in `per_layer_config`: {number of a
    layer: {field: value}}. Raises UserError if layers of a type differ there.
    """
    shared = fields.take("attention_k_eq_v", bool, False)
    full = dict(head_dim=fields.take("global_head_dim", int, 512))
    if (K := fields.take("num_global_key_value_heads", int, None)) and shared:
        full |= dict(num_key_value_heads=K)
    saved: dict = fields.take("per_layer_config", dict, None)
    changes = {"sliding_attention": {}, "full_attention": full}
    if saved is not None:
        by_layer = {int(i) if str(i).isdigit() else i: change for i, change in saved.items()}  # "05" is 5
        changes = {x: by_layer.get(types.index(x), {}) if x in types else {} for x in changes}
        expected = {i: changes[x] for i, x in enumerate(types) if changes[x]}
        differ = {i: change for i, change in by_layer.items() if change} != expected
        if differ or not all(isinstance(change, dict) for change in changes.values()):
            raise UserError("config.json: per_layer_config must say the same of all layers of a type")
    every = {}
    for x, change in changes.items():
        sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        own = ConfigFields({name: fields.get(name) for name in sizes} | change)
        kind = dict(qk_norm=norm, scale=1.0, keys_are_values=shared and x == "full_attention")
        every[x] = read.attention(own, ValueNormAttention, **kind)
        own.finish({})
    return every


def rope_of(parameters: dict, H: int, positions: int) -> Rope:
    """Raises UserError for RoPE of a part of a head that is not `proportional`: transformers rotates all."""
    if "partial_rotary_factor" in parameters and parameters.get("rope_type") != "proportional":
        factor = parameters["partial_rotary_factor"]
        raise UserError(f"config.json: partial_rotary_factor = {factor} needs rope_type 'proportional'")
    return read.rope_of(parameters, H, positions)


ROPES = dict(
    sliding_attention=dict(rope_type="default", rope_theta=1e4),
    full_attention=dict(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=0.25),
)
DEFAULTS = dict(
    vocab_size=262144, hidden_size=2304, intermediate_size=9216, num_hidden_layers=30, num_attention_heads=8,
    num_key_value_heads=4, head_dim=256, sliding_window=512, max_position_embeddings=131072,
    rms_norm_eps=1e-6,
)  # fmt: skip
TOWERS = r"^(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio|vision_embedder)\."
GEMMA4 = Family(
    "gemma4_text",
    config,
    ("gemma4",),
    defaults=DEFAULTS | dict(hidden_size_per_layer_input=256),
    supported=SUPPORTED | dict(use_bidirectional_attention=("vision",)),
    no_effect="""audio_config audio_token_id boa_token_id eoa_token_id eoa_token_index video_token_id
        vocab_size_per_layer_input""",
    tensor_names=(*LANGUAGE_MODEL_NAMES, *NAMES),
    unused_tensors=TOWERS + r"|\.rotary_emb\.",
)
GEMMA4_UNIFIED = dataclasses.replace(
    GEMMA4,
    model_type="gemma4_unified_text",
    multimodal_types=("gemma4_unified",),
    defaults=DEFAULTS | dict(sliding_window=1024, max_position_embeddings=262144),
)
