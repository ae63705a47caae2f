"""Config from the config.json of a Hugging Face model."""

import dataclasses

from checkpoints.errors import UserError
from model import Chunked, Config, Experts, Full, Gated, Heads, LayerKind, Norm, QueryScale, Rope, Router


class _Fields:
    """A config.json being read: every field is taken, known to have no effect on inference, or refused."""

    FIXED = dict(hidden_act="silu", attention_bias=False, mlp_bias=False)
    NO_EFFECT = frozenset(
        """architectures attention_dropout boi_token_index bos_token_id cache_implementation dtype
        eoi_token_index eos_token_id
        for_llm_compressor image_token_index initializer_range model_type output_router_logits pad_token_id
        pretraining_tp router_aux_loss_coef router_jitter_noise torch_dtype transformers_version unsloth_fixed
        unsloth_version use_cache""".split()
    )
    REQUIRED = object()

    def __init__(self, config: dict):
        self.left = {k: v for k, v in config.items() if k not in self.NO_EFFECT and not k.startswith("_")}

    def take(self, name: str, kind: type | tuple[type, ...], default=REQUIRED):
        """The value of a field, which must be of this type; null is absent, and numbers are positive."""
        value = self.left.pop(name, None)
        if value is None:
            if default is self.REQUIRED:
                raise UserError(f"config.json: field {name!r} is missing")
            return default
        number = kind in (int, NUMBER)
        if not isinstance(value, kind) or (number and (isinstance(value, bool) or not 0 < value < 2**31)):
            raise UserError(f"config.json: {name} = {value!r} makes no sense")
        return value

    def finish(self) -> None:
        for name, value in self.left.items():
            # A field that is null, false or empty asks for nothing.
            if value and value != self.FIXED.get(name):
                raise UserError(f"config.json: {name} = {value!r} is not supported")


NUMBER = (int, float)


def read_config(config: dict) -> Config:
    """Config from a Hugging Face config.json. Raises UserError naming the field that is wrong."""
    names = config.get("architectures") or []
    for name in names if isinstance(names, list) else [names]:
        if not str(name).endswith(("ForCausalLM", "ForConditionalGeneration")):
            raise UserError(f"config.json: architecture {name!r} has no language model's head")
    if config.get("model_type") == "llama4":
        if not isinstance(config.get("text_config"), dict):
            raise UserError("config.json: field 'text_config' is missing")
        around = {k: v for k, v in config.items() if k not in ("text_config", "vision_config")}
        config = around | config["text_config"]
    family = config.get("model_type")
    if family not in ("llama", "llama4_text"):
        raise UserError(f"config.json: model_type {family!r} is not supported (llama, llama4, llama4_text)")
    fields = _Fields(config)
    take = fields.take
    width, heads = take("hidden_size", int), take("num_attention_heads", int)
    kv_heads = take("num_key_value_heads", int, heads)
    if heads % kv_heads:
        raise UserError(f"config.json: {heads} attention heads are no multiple of {kv_heads} key/value heads")
    read = _llama4_layers if family == "llama4_text" else _llama3_layers
    heads = Heads(kv_heads, heads // kv_heads, take("head_dim", int, width // heads))
    if heads.H < 2 or heads.H % 2:
        raise UserError(f"config.json: RoPE needs an even head_dim, not {heads.H}")
    norm = Norm(take("rms_norm_eps", NUMBER))
    cfg = Config(
        D=width, V=take("vocab_size", int), norm=norm, layers=read(fields, heads, norm),
        max_positions=take("max_position_embeddings", int),
        tied_embeddings=take("tie_word_embeddings", bool, False),
    )  # fmt: skip
    fields.finish()
    return cfg


def _depth(fields: _Fields) -> int:
    depth = fields.take("num_hidden_layers", int)
    if depth > 1000:  # a list of that many layers is about to be made
        raise UserError(f"config.json: num_hidden_layers = {depth} makes no sense")
    return depth


def _llama3_layers(fields: _Fields, heads: Heads, norm: Norm) -> tuple[LayerKind, ...]:
    kind = LayerKind(heads, Gated(fields.take("intermediate_size", int)), rope=_read_rope(fields))
    return (kind,) * _depth(fields)


def _llama4_layers(fields: _Fields, heads: Heads, norm: Norm) -> tuple[LayerKind, ...]:
    take = fields.take
    depth, every = _depth(fields), take("no_rope_layer_interval", int, 4)
    # A 1 in no_rope_layers means that the layer does have RoPE.
    rotary = take("no_rope_layers", list, []) or [(i + 1) % every != 0 for i in range(depth)]
    masks = ["chunked_attention" if has_rope else "full_attention" for has_rope in rotary]
    masks = take("layer_types", list, masks)
    moe_every = take("interleave_moe_layer_step", int, 1)
    moe = take("moe_layers", list, list(range(moe_every - 1, depth, moe_every)))
    known = {"chunked_attention", "full_attention"}.issuperset(masks)
    if not len(rotary) == len(masks) == depth or not known:
        raise UserError(f"config.json: no_rope_layers or layer_types do not describe {depth} layers")
    chunk = take("attention_chunk_size", int, None)
    scale = QueryScale(take("attn_scale", NUMBER, 0.1), take("floor_scale", NUMBER, 8192))
    scale = scale if take("attn_temperature_tuning", (bool, int), True) else None
    qk_norm = dataclasses.replace(norm, weight=False) if take("use_qk_norm", bool, True) else None
    M, dense = take("intermediate_size", int), Gated(take("intermediate_size_mlp", int))
    E, A = take("num_local_experts", int), take("num_experts_per_tok", int)
    if A > E:
        raise UserError(f"config.json: num_experts_per_tok = {A} of {E} experts")
    experts = Experts(E, A, M, Router("sigmoid", scales="input"), shared=Gated(M))
    rope = _read_rope(fields, interleaved=True)
    return tuple(
        LayerKind(
            dataclasses.replace(heads, **(dict(qk_norm=qk_norm) if rotary[i] else dict(query_scale=scale))),
            experts if i in moe else dense,
            Chunked(chunk) if chunk and masks[i] == "chunked_attention" else Full(),
            rope if rotary[i] else None,
        )
        for i in range(depth)
    )


def _read_rope(fields: _Fields, interleaved: bool = False) -> Rope:
    """RoPE from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    theta = fields.take("rope_theta", NUMBER, 500000.0 if interleaved else 10000.0)
    scaling = fields.take("rope_scaling", dict, {})
    rope = _Fields(fields.take("rope_parameters", dict, scaling))
    theta = rope.take("rope_theta", NUMBER, theta)
    kind = rope.take("type", str, "default")  # the name before it was rope_type
    kind = rope.take("rope_type", str, kind)
    if kind not in ("default", "llama3"):
        raise UserError(f"config.json: rope_type {kind!r} is not supported (default, llama3)")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    numbers = tuple(float(rope.take(name, NUMBER)) for name in names) if kind == "llama3" else None
    rope.finish()
    return Rope(float(theta), numbers, interleaved)
