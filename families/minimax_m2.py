"""MiniMax M2: DeepSeek V3's router without groups, for experts under Mixtral's names.

Source: transformers, models/minimax_m2.
"""

from families import read
from families.family import Family
from families.fields import ConfigFields
from families.joint_norm import JointNormAttention
from families.mixtral import MIXTRAL
from feedback.errors import UserError
from model import Config, LayerKind, Rope, Router


def config(fields: ConfigFields) -> Config:
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


MINIMAX_M2 = Family(
    "minimax_m2",
    config,
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
