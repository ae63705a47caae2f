"""DeepSeek V3 and R1, Kimi K2, GLM-4.7-Flash: latent attention, and experts in groups after the first layers.

Kimi K2.5 is multimodal, around K2. Sources: transformers, models/deepseek_v3, glm4_moe_lite and kimi_k25.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from families import read
from families.family import LANGUAGE_MODEL_NAMES, VISION_TENSORS, Family
from families.fields import NUMBER, ConfigFields
from families.latent_attention import LatentAttention
from families.rope_scaling import YarnScaling
from families.stored_layouts import ROUTER_NAME, SINGLE_OR_JOINED_EXPERTS, either, joined
from feedback.errors import UserError
from model import MLP, Config, LayerKind, MoE, Norm, Rope, Router
from sharding.arrays import Stored


@dataclasses.dataclass(frozen=True)
class GroupLimitedRouter(Router):
    """Chooses among the experts of a token's best groups only. Source: arXiv 2412.19437, section 2.1.2.

    groups: the experts are divided into this many equal groups of neighbors. A group counts by the sum of its
    two best scores, bias included. kept: the number of groups that each token keeps.
    """

    groups: int = 1
    kept: int = 1

    def rank(self, logits: Array, bias: Array) -> Array:
        """-inf for the experts of other groups."""
        scores = super().rank(logits, bias)
        grouped = scores.reshape(*scores.shape[:-1], self.groups, -1)
        # Of equal scores either will do. On TPUs a stable sort, or top_k, would also write indices to HBM.
        best_two = jnp.sort(grouped, -1, stable=False)[..., -2:]
        best = lax.top_k(jnp.sum(best_two, -1), self.kept)[1]
        is_kept = jnp.any(best[..., None] == jnp.arange(self.groups), -2)
        return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(scores.shape)


def config(fields: ConfigFields) -> Config:
    depth, norm = read.depth(fields), read.norm(fields)
    R = fields.take("qk_rope_head_dim", int)
    rope = read.rope(fields, R, interleaved=fields.take("rope_interleave", bool, True))
    latent = latent_of(fields, rope)
    layers = tuple(LayerKind(latent, x, norm, rope=rope) for x in feed_forwards(fields, depth))
    return read.config(fields, layers, norm)


def feed_forwards(fields: ConfigFields, depth: int) -> list[MLP | MoE]:
    """The feed-forward network of each layer: an MLP in the first layers, experts in the others."""
    shared = fields.take("n_shared_experts", int)
    experts = read.moe(fields, router_of(fields), "moe_intermediate_size", "n_routed_experts", shared)
    dense, first = read.mlp(fields), fields.take("first_k_dense_replace", int, zero=True)
    types = ["dense" if i < first else "sparse" for i in range(depth)]
    types = read.layer_types(fields, "mlp_layer_types", types, "dense", "sparse")
    # The number of layers that are not used, see `Family.extra_layers`.
    fields.get("num_nextn_predict_layers")
    return [experts if x == "sparse" else dense for x in types]


def latent_of(fields: ConfigFields, rope: Rope) -> LatentAttention:
    if fields.get("q_lora_rank") is None:
        raise UserError("config.json: q_lora_rank = null is not supported: queries must be compressed")
    G = fields.take("num_attention_heads", int)
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    Q, L, N, R, U = (fields.take(name, int) for name in names)
    for name, follows in dict(head_dim=R, num_key_value_heads=G, qk_head_dim=N + R).items():
        if fields.take(name, int, follows) != follows:
            raise UserError(f"config.json: {name} = {fields.get(name)} is not supported, only {follows}")
    mscale, scale = read.rope_parameters(fields, rope.theta).get("mscale_all_dim"), None
    if isinstance(rope.scaling, YarnScaling) and mscale:
        # transformers multiplies the cosine and sine, so R of the N + R columns, by the quotient of the
        # growths of mscale and mscale_all_dim: Rope.magnitude. It multiplies all scores by this square.
        scale = (N + R) ** -0.5 * read.yarn_growth(rope.scaling.factor, mscale) ** 2
    norm = Norm(1e-6)  # it does not follow rms_norm_eps
    return LatentAttention(G=G, Q=Q, L=L, N=N, R=R, U=U, norm=norm, scale=scale)


def router_of(fields: ConfigFields) -> Router:
    normalized = fields.take("norm_topk_prob", bool, True)
    factor = float(fields.take("routed_scaling_factor", NUMBER))
    common = dict(normalized=normalized, scales="output", bias=True, factor=factor)
    groups, kept = fields.take("n_group", int), fields.take("topk_group", int)
    if groups == kept == 1:
        return Router("sigmoid", **common)
    E, A = fields.take("n_routed_experts", int), fields.take("num_experts_per_tok", int)
    if E % groups or E // groups < 2:
        raise UserError(
            f"config.json: n_group = {groups} does not divide {E} experts into groups of 2 or more"
        )
    if kept > groups:
        raise UserError(f"config.json: topk_group = {kept} of {groups} groups")
    if A > E // groups * kept:
        raise UserError(f"config.json: num_experts_per_tok = {A} of {kept} groups of {E // groups} experts")
    return GroupLimitedRouter("sigmoid", **common, groups=groups, kept=kept)


# The defaults of transformers' `generate`, which are in the config.json of Kimi K2.5.
GENERATION = dict(
    length_penalty=(1,), max_length=(20,), num_beam_groups=(1,), num_beams=(1,), num_return_sequences=(1,),
    repetition_penalty=(1,), temperature=(1,), top_k=(50,), top_p=(1,), typical_p=(1,),
)  # fmt: skip
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    config,
    multimodal_types=("kimi_k25",),
    defaults=dict(
        n_group=8, topk_group=4, first_k_dense_replace=3, n_shared_experts=1, routed_scaling_factor=2.5
    ),
    supported=dict(
        hidden_act=("silu",),
        moe_layer_freq=(1,),
        topk_method=("noaux_tc",),
        scoring_func=("sigmoid",),
        **GENERATION,
    ),
    no_effect="""aux_loss_alpha ep_size seq_aux ignore_index media_placeholder_token_id projection_hidden_size
        projection_layer_norm_eps use_unified_vision_chunk video_placeholder video_token_id
        vision_end_token_id vision_start_token_id""",
    tensor_names=(
        *LANGUAGE_MODEL_NAMES,
        (r"^model\.blocks\.", "model.layers."),  # transformers saves Kimi K2.5 so
        (r"\.shared_experts\.", ".shared_expert."),
        ROUTER_NAME,
    ),
    layouts=either(
        SINGLE_OR_JOINED_EXPERTS,
        joined("self_attn.kv_b_proj.weight", "(KG[N+U])L", "attention.k_b", "attention.v_b"),
        # GGUF files have the key and value matrices apart, each head's key matrix transposed.
        {"attention.k_b": (Stored("self_attn.k_b_proj.weight", "(KG)LN"),)},
        {"attention.v_b": (Stored("self_attn.v_b_proj.weight", "(KG)UL"),)},
    ),
    unused_tensors=VISION_TENSORS,
    extra_layers=1,
)
KIMI_K2 = dataclasses.replace(DEEPSEEK_V3, model_type="kimi_k2")
GLM4_MOE_LITE = dataclasses.replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    multimodal_types=(),
    defaults=dict(
        n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1, routed_scaling_factor=1.8
    ),
)
