"""OLMo 3 and MiniMax M2: one norm of all query heads together, and one of all key heads, before RoPE.

OLMo 3 has no norm before a block, but one after it. MiniMax M2 has DeepSeek V3's router without groups.
Sources: transformers, models/olmo3 and models/minimax_m2.
"""

import dataclasses
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from families import read
from families.family import Family
from families.fields import NUMBER, ConfigFields
from families.gemma3 import NAMES as NORM_NAMES
from families.mixtral import MIXTRAL
from feedback.errors import UserError
from model import Attention, AttentionWeights, Config, LayerKind, Norm, Rope, Router
from sharding.arrays import declared, pytree
from sharding.mesh import MODEL


@pytree
class JointNormWeights(AttentionWeights):
    joint_q_norm: Array = declared("kgH", "", "q_norm.weight", "(KGH)", initial=1.0)
    joint_k_norm: Array = declared("kh", "", "k_norm.weight", "(KH)", initial=1.0)


@dataclasses.dataclass(frozen=True)
class JointNormAttention(Attention):
    """Attention with a norm of the queries of all heads together, and one of the keys of all heads.

    Devices divide what these norms average, by heads and within a head, and add up their sums of squares.
    """

    joint_norm: Norm = Norm(1e-6)

    def declare(self, prefix: str, D: int, weights: type | None = JointNormWeights) -> Any:
        return super().declare(prefix, D, weights)

    def projections(self, x: Array, w: AttentionWeights) -> tuple[Array, Array, Array]:
        """x, and the result: see `Attention.projections`."""
        assert isinstance(w, JointNormWeights)
        q, k, v = super().projections(x, w)
        columns = self.K * self.H
        q = self.joint_norm(q, w.joint_q_norm, partial(mean_over_devices, self.G * columns))
        return q, self.joint_norm(k, w.joint_k_norm, partial(mean_over_devices, columns)), v


def mean_over_devices(columns: int, x: Array) -> Array:
    """The mean of each token's `columns` numbers, of which each device has a part, beside zeros as padding.

    x: [b,T,...] -> [b,T,1,...] with as many axes as x.
    """
    return lax.psum(jnp.sum(x, range(2, x.ndim), keepdims=True), MODEL) / columns


def olmo3_config(fields: ConfigFields) -> Config:
    depth, mlp, norm = read.depth(fields), read.mlp(fields), read.norm(fields, offset=0.0)
    bias = fields.take("attention_bias", bool, False)
    heads = read.attention(fields, JointNormAttention, joint_norm=norm, bias=bias, output_bias=bias)
    masks = read.masks(fields, 4096)
    types = (["sliding_attention"] * 3 + ["full_attention"]) * depth
    types = read.layer_types(fields, "layer_types", types[:depth], *masks)
    thetas = dict.fromkeys(masks, 5e5)
    thetas["full_attention"] = fields.take("rope_theta", NUMBER, 5e5)  # not of the others, as in transformers
    ropes = read.ropes(fields, heads.H, thetas)
    kinds = {x: LayerKind(heads, mlp, None, mask, ropes[x], post_norm=norm) for x, mask in masks.items()}
    return read.config(fields, tuple(kinds[x] for x in types), norm)


def minimax_m2_config(fields: ConfigFields) -> Config:
    depth, norm = read.depth(fields), read.norm(fields)
    if fields.take("attn_type_list", list, [1] * depth) != [1] * depth:
        raise UserError(f"config.json: attn_type_list must give each of {depth} layers a 1, full attention")
    heads = read.attention(fields, JointNormAttention, joint_norm=norm)
    experts = read.moe(fields, Router("sigmoid", normalized=True, scales="output", bias=True))
    layer = LayerKind(heads, experts, norm, rope=partial_rope(fields, heads.H))
    return read.config(fields, (layer,) * depth, norm)


def partial_rope(fields: ConfigFields, H: int) -> Rope:
    """RoPE of the first `rotary_dim` columns of a head. Raises UserError if other fields say otherwise."""
    rotated = fields.take("rotary_dim", int, None)
    rope = read.rope(fields, H, 5e6, rotated=rotated / H if rotated else 1)
    if rotated not in (None, rope.width):
        raise UserError(f"config.json: rotary_dim = {rotated}, but RoPE's other fields rotate {rope.width}")
    return rope


OLMO3 = Family("olmo3", olmo3_config, tensor_names=NORM_NAMES)
MINIMAX_M2 = Family(
    "minimax_m2",
    minimax_m2_config,
    field_names={"num_experts": "num_local_experts"},
    supported=dict(
        hidden_act=("silu",),
        qk_norm_type=("per_layer",),  # of all heads of a layer together
        scoring_func=("sigmoid",),
        use_qk_norm=(True,),
        use_routing_bias=(True,),
    ),
    no_effect="mlp_intermediate_size mtp_transformer_layers num_mtp_modules use_mtp",
    tensor_names=(
        *MIXTRAL.tensor_names,
        (r"\.mlp\.e_score_correction_bias$", ".mlp.router.e_score_correction_bias"),
    ),
    layouts=MIXTRAL.layouts,
    extra_layers=3,
)
