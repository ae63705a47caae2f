"""GLM-4.7-Flash: DeepSeek V3's architecture with other defaults.

Source: transformers, models/glm4_moe_lite.
"""

import dataclasses

from families.deepseek_v3 import DEEPSEEK_V3

GLM4_MOE_LITE = dataclasses.replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    defaults=dict(
        n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1, routed_scaling_factor=1.8
    ),
)
