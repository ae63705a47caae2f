"""GPT-2: LayerNorm, learned positions, biases everywhere, matrices stored [in, out].

Source: transformers, models/gpt2.
"""

from checkpoints.errors import UserError
from families import read
from families.family import Family
from families.fields import ConfigFields
from model import Config, LayerKind, Plain


def config(fields: ConfigFields) -> Config:
    if not fields.take("scale_attn_weights", bool, True):
        raise UserError("config.json: scale_attn_weights = false is not supported")
    heads = read.heads(fields, bias=True, output_bias=True)
    width = fields.take("intermediate_size", int, 4 * fields.take("hidden_size", int))
    layers = (LayerKind(heads, Plain(width, "gelu_tanh")),) * read.depth(fields)
    positions = fields.take("max_position_embeddings", int)
    return read.config(fields, layers, read.norm(fields, centered=True), tied=True, P=positions)


GPT2 = Family(
    "gpt2",
    config,
    field_names={
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "rms_norm_eps",
    },
    supported={"activation_function": ("gelu_new",)},
    no_effect=(
        "attn_pdrop",
        "embd_pdrop",
        "n_ctx",
        "resid_pdrop",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
    ),
    tensor_names=(
        (r"^(transformer\.)?h\.(\d+)\.", r"model.layers.\2."),
        (r"^(transformer\.)?wte\.", "model.embed_tokens."),
        (r"^(transformer\.)?wpe\.", "model.embed_positions."),
        (r"^(transformer\.)?ln_f\.", "model.norm."),
        (r"\.ln_1\.", ".input_layernorm."),
        (r"\.ln_2\.", ".post_attention_layernorm."),
        (r"\.attn\.c_attn\.", ".self_attn.qkv."),
        (r"\.attn\.c_proj\.", ".self_attn.out."),
    ),
    unused_tensors=r"\.attn\.(masked_)?bias$",
)
