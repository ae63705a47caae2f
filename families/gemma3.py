"""Gemma 3: two RoPEs, norms around each block, and a full layer after every five with a sliding window."""

from families import read
from families.family import LANGUAGE_MODEL_NAMES, VISION_TENSORS, Family
from families.fields import NUMBER, ConfigFields
from families.gemma import GeGLU
from model import Config, LayerKind, Residual


def config(fields: ConfigFields) -> Config:
    mlp, norm = read.mlp(fields, activation=GeGLU()), read.norm(fields, offset=1.0)
    heads = read.attention(fields, qk_norm=norm, scale=fields.take("query_pre_attn_scalar", NUMBER) ** -0.5)
    masks = read.masks(fields)
    depth, every = read.depth(fields), fields.take("sliding_window_pattern", int)
    types = (["sliding_attention"] * (every - 1) + ["full_attention"]) * depth
    types = read.layer_types(fields, "layer_types", types[:depth], *masks)
    thetas = dict(sliding_attention=fields.take("rope_local_base_freq", NUMBER))
    thetas |= dict(full_attention=fields.take("rope_theta", NUMBER))
    ropes = read.ropes(fields, heads.H, thetas)
    kinds = {x: LayerKind(heads, mlp, norm, mask, ropes[x], Residual(norm)) for x, mask in masks.items()}
    scale, cap = fields.take("hidden_size", int) ** 0.5, fields.take("final_logit_softcapping", NUMBER, None)
    layers = tuple(kinds[x] for x in types)
    return read.config(fields, layers, norm, tied=True, embedding_scale=scale, logit_softcap=cap)


DEFAULTS: dict[str, float] = dict(vocab_size=262208, num_attention_heads=8, num_key_value_heads=4)
DEFAULTS |= dict(rms_norm_eps=1e-6, max_position_embeddings=131072, rope_theta=1e6, rope_local_base_freq=1e4)
DEFAULTS |= dict(head_dim=256, query_pre_attn_scalar=256, sliding_window=4096, sliding_window_pattern=6)
NAMES = (
    (r"\.post_attention_layernorm\.", ".post_self_attn_layernorm."),
    (r"\.pre_feedforward_layernorm\.", ".post_attention_layernorm."),
    (r"\.post_feedforward_layernorm\.", ".post_mlp_layernorm."),
)
SUPPORTED = {"hidden_activation": ("gelu_pytorch_tanh",)}
GEMMA3 = Family(
    "gemma3_text", config, ("gemma3",), defaults=DEFAULTS, supported=SUPPORTED,
    tensor_names=(*LANGUAGE_MODEL_NAMES, *NAMES), unused_tensors=VISION_TENSORS,
)  # fmt: skip
