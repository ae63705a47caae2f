"""GLM-4.5, 4.6 and 4.7, and GLM-4.5-Air: DeepSeek V3's experts with grouped-query attention.

Source: transformers, models/glm4_moe.
"""

from families import read
from families.deepseek_v3 import DEEPSEEK_V3, GLM4_MOE_LITE, feed_forwards
from families.family import Family
from families.fields import ConfigFields
from families.stored_layouts import SINGLE_OR_JOINED_EXPERTS
from model import Config, LayerKind


def config(fields: ConfigFields) -> Config:
    depth, norm = read.depth(fields), read.norm(fields)
    qk_norm = norm if fields.take("use_qk_norm", bool, False) else None
    heads = read.attention(fields, qk_norm=qk_norm, bias=fields.take("attention_bias", bool, False))
    rope = read.rope(fields, heads.H, rotated=0.5)
    layers = tuple(LayerKind(heads, x, norm, rope=rope) for x in feed_forwards(fields, depth))
    return read.config(fields, layers, norm)


GLM4_MOE = Family(
    "glm4_moe",
    config,
    defaults={**GLM4_MOE_LITE.defaults, "routed_scaling_factor": 1.0},
    tensor_names=DEEPSEEK_V3.tensor_names,
    layouts=SINGLE_OR_JOINED_EXPERTS,
    extra_layers=1,
)
