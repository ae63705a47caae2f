"""GLM-4.7-Flash: latent attention, and experts after the first layers.

Source: transformers, models/glm4_moe_lite.
"""

from families import read
from families.experts import ROUTER_NAME, SINGLE_OR_JOINED_EXPERTS
from families.family import Family
from families.fields import NUMBER, ConfigFields
from families.latent_attention import Latent
from model import Config, LayerKind, Norm, Router


def config(fields: ConfigFields) -> Config:
    depth = read.depth(fields)
    latent = latent_of(fields)
    rope = read.rope(fields, latent.R, interleaved=fields.take("rope_interleave", bool, True))
    router = Router(
        "sigmoid",
        normalized=fields.take("norm_topk_prob", bool, True),
        scales="output",
        bias=True,
        factor=float(fields.take("routed_scaling_factor", NUMBER, 1.8)),
    )
    shared = fields.take("n_shared_experts", int, 1)
    experts = read.experts(fields, router, "moe_intermediate_size", "n_routed_experts", shared)
    dense, first = read.gated(fields), fields.take("first_k_dense_replace", int, 1)
    types = ["dense" if i < first else "sparse" for i in range(depth)]
    types = read.layer_types(fields, "mlp_layer_types", types, "dense", "sparse")
    norm = read.norm(fields)
    layers = tuple(LayerKind(latent, experts if x == "sparse" else dense, norm, rope=rope) for x in types)
    return read.config(fields, layers, norm)


def latent_of(fields: ConfigFields) -> Latent:
    G = fields.take("num_attention_heads", int)
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    Q, L, N, R, U = (fields.take(name, int) for name in names)
    for name in ("head_dim", "num_key_value_heads", "num_nextn_predict_layers", "qk_head_dim"):
        fields.take(name, int, None)  # said by the other fields, or of the layer that is not used
    return Latent(G, Q, L, N, R, U, Norm(1e-6))  # this norm does not follow rms_norm_eps


GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    config,
    supported={
        "hidden_act": ("silu",),
        "n_group": (1,),
        "topk_group": (1,),
        "topk_method": ("noaux_tc",),
        "scoring_func": ("sigmoid",),
    },
    tensor_names=(
        (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.router.bias"),
        (r"\.shared_experts\.", ".shared_expert."),
        ROUTER_NAME,
    ),
    layouts=SINGLE_OR_JOINED_EXPERTS,
    extra_layer=True,
)
