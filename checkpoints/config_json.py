"""Config from the config.json of a Hugging Face model."""

import dataclasses

from checkpoints.errors import UserError
from checkpoints.families import family_of
from checkpoints.fields import NUMBER, Fields
from model import Config, Heads


def read_config(config: dict) -> Config:
    """Config from a Hugging Face config.json. Raises UserError naming the field that is wrong.

    How its weights are quantised, if they are, dequantized.py reads.
    """
    names = config.get("architectures") or []
    for name in names if isinstance(names, list) else [names]:
        if not str(name).endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")):
            raise UserError(f"config.json: architecture {name!r} has no language model's head")
    family, config = family_of(config)
    fields = Fields({family.fields.get(name, name): value for name, value in config.items()})
    fields.left.pop("quantization_config", None)
    take = fields.take
    width, heads = take("hidden_size", int), take("num_attention_heads", int)
    kv_heads = take("num_key_value_heads", int, heads)
    if heads % kv_heads:
        raise UserError(f"config.json: {heads} attention heads are no multiple of {kv_heads} key/value heads")
    depth = take("num_hidden_layers", int)
    if depth > 1000:  # a list of that many layers is about to be made
        raise UserError(f"config.json: num_hidden_layers = {depth} makes no sense")
    heads = Heads(kv_heads, heads // kv_heads, take("head_dim", int, width // heads))
    if heads.H < 2 or heads.H % 2:
        raise UserError(f"config.json: RoPE needs an even head_dim, not {heads.H}")
    norm = family.norm(take("rms_norm_eps", NUMBER))
    cfg = Config(
        D=width, V=take("vocab_size", int), norm=norm, layers=family.read(fields, depth, heads, norm),
        max_positions=take("max_position_embeddings", int),
        tied_embeddings=take("tie_word_embeddings", bool, family.tied),
    )  # fmt: skip
    cfg = dataclasses.replace(cfg, **family.changes(cfg))
    fields.finish(family.fixed)
    return cfg
