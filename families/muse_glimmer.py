"""Muse Glimmer: gated attention, norms around each block, and a full layer without RoPE after every three.

Source: transformers, models/muse_glimmer.
"""

import dataclasses
from collections.abc import Sequence

from families import read
from families.family import LANGUAGE_MODEL_NAMES, Channels, Family
from families.fields import NUMBER, ConfigFields
from families.gated_attention import GatedAttention
from families.gemma3 import NAMES as NORM_NAMES
from families.tool_formats import MUSE_TOOLS
from feedback.errors import UserError
from model import Config, FeedForward, LayerKind, Norm, Residual


def config(fields: ConfigFields) -> Config:
    residual = Residual(Norm(fields.take("post_norm_eps", NUMBER), offset=1.0))
    networks = [read.mlp(fields)] * read.depth(fields)
    return config_of(fields, GatedAttention, networks, residual)


def config_of(
    fields: ConfigFields,
    attention: type[GatedAttention],
    networks: Sequence[FeedForward],
    residual: Residual,
    feed_forward_residual: Residual | None = None,
) -> Config:
    """The Config of layers with these feed-forward networks.

    Unless the fields say otherwise, every fourth layer, counted from the last, is full and has no RoPE.
    """
    depth, bias = len(networks), fields.take("attention_bias", bool, False)
    norm = read.norm(fields, offset=1.0)
    plain = Norm(norm.eps, weight=False)
    heads = read.attention(fields, attention, qk_norm=plain, bias=bias, output_bias=bias)
    heads = dataclasses.replace(heads, scale=fields.take("qk_scale_factor", NUMBER) * heads.H**-0.5)
    masks, rope = read.masks(fields), read.rope(fields, heads.H)
    full = [(depth - 1 - i) % 4 == 0 for i in range(depth)]
    types = ["full_attention" if x else "sliding_attention" for x in full]
    types = read.layer_types(fields, "layer_types", types, *masks)
    rotary = has_rope(fields, rope.theta, [not x for x in full])
    layers = tuple(
        LayerKind(
            heads,
            network,
            norm,
            masks[x],
            rope if rotated else None,
            residual,
            feed_forward_residual=feed_forward_residual,
        )
        for network, x, rotated in zip(networks, types, rotary, strict=True)
    )
    scale, cap = (fields.take(name, NUMBER) for name in ("output_multiplier", "final_logit_softcapping"))
    last = Norm(norm.eps, offset=0.0)
    return read.config(fields, layers, last, embedding_norm=plain, logit_scale=scale, logit_softcap=cap)


def has_rope(fields: ConfigFields, theta: float, default: list[bool]) -> list[bool]:
    """Of each layer, whether it has RoPE: `layer_rope_theta` is 0 where it has not, else the model's theta.

    default: where the field is absent. Raises UserError if the field says anything else.
    """
    thetas = fields.take("layer_rope_theta", list, [theta * x for x in default])
    if len(thetas) != len(default) or any(type(x) not in NUMBER or x not in (0, theta) for x in thetas):
        raise UserError(
            f"config.json: layer_rope_theta = {thetas} must give each of {len(default)} layers 0 (no RoPE) "
            f"or rope_theta = {theta:g}"
        )
    return [x != 0 for x in thetas]


DEFAULTS = dict(
    vocab_size=202048, hidden_size=6656, intermediate_size=19968, num_hidden_layers=52,
    num_attention_heads=32, num_key_value_heads=2, head_dim=128, sliding_window=2048,
    max_position_embeddings=131072, rms_norm_eps=1e-5, post_norm_eps=1e-8, qk_scale_factor=3.87,
    output_multiplier=0.19611613513818404, final_logit_softcapping=20.0,
)  # fmt: skip
# Each message says to whom it is: "user", "self" (reasoning), or a tool.
RECIPIENTS = Channels("<|start|>", " to=", "<|message|>", ("<|eom|>", "<|eot|>"), "user")
MUSE_GLIMMER = Family(
    "muse_glimmer_text",
    config,
    multimodal_types=("muse_glimmer",),
    defaults=DEFAULTS,
    supported={"hidden_activation": ("silu",)},
    no_effect="video_token_id out_hidden_size projector_hidden_size projector_hidden_act",
    tensor_names=(*LANGUAGE_MODEL_NAMES, *NORM_NAMES),
    unused_tensors=r"^model\.vision_(tower|adapter|projection)\.|\.rotary_emb\.inv_freq$",
    channels=RECIPIENTS,
    tools=MUSE_TOOLS,
)
