"""Config from the config.json of a Hugging Face model."""

from checkpoints.errors import UserError
from model import Config, LayerKind, Rope


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
    special = _llama4_fields(fields) if family == "llama4_text" else _llama3_fields(fields)
    cfg = Config(
        D=width, K=kv_heads, G=heads // kv_heads, H=take("head_dim", int, width // heads),
        V=take("vocab_size", int), norm_eps=take("rms_norm_eps", NUMBER),
        max_positions=take("max_position_embeddings", int),
        tied_embeddings=take("tie_word_embeddings", bool, False),
        rope=_read_rope(fields, interleaved=family == "llama4_text"), **special,
    )  # fmt: skip
    fields.finish()
    if cfg.H < 2 or cfg.H % 2:
        raise UserError(f"config.json: RoPE needs an even head_dim, not {cfg.H}")
    if cfg.A > cfg.E:
        raise UserError(f"config.json: num_experts_per_tok = {cfg.A} of {cfg.E} experts")
    return cfg


def _depth(fields: _Fields) -> int:
    depth = fields.take("num_hidden_layers", int)
    if depth > 1000:  # a list of that many layers is about to be made
        raise UserError(f"config.json: num_hidden_layers = {depth} makes no sense")
    return depth


def _llama3_fields(fields: _Fields) -> dict:
    depth = _depth(fields)
    return dict(F=fields.take("intermediate_size", int), layers=(LayerKind(),) * depth)


def _llama4_fields(fields: _Fields) -> dict:
    take = fields.take
    depth, every = _depth(fields), take("no_rope_layer_interval", int, 4)
    # A 1 in no_rope_layers means that the layer does have RoPE.
    rope = take("no_rope_layers", list, []) or [(i + 1) % every != 0 for i in range(depth)]
    chunked = ["chunked_attention" if has_rope else "full_attention" for has_rope in rope]
    chunked = take("layer_types", list, chunked)
    moe_every = take("interleave_moe_layer_step", int, 1)
    moe = take("moe_layers", list, list(range(moe_every - 1, depth, moe_every)))
    known = all(kind in ("chunked_attention", "full_attention") for kind in chunked)
    if not len(rope) == len(chunked) == depth or not known:
        raise UserError(f"config.json: no_rope_layers or layer_types do not describe {depth} layers")
    chunk = take("attention_chunk_size", int, None)
    temperature = take("attn_scale", NUMBER, 0.1), take("floor_scale", NUMBER, 8192)
    return dict(
        F=take("intermediate_size_mlp", int), M=take("intermediate_size", int),
        E=take("num_local_experts", int), A=take("num_experts_per_tok", int),
        layers=tuple(
            LayerKind(bool(rope[i]), chunk if chunked[i] == "chunked_attention" else None, i in moe)
            for i in range(depth)
        ),
        qk_norm=take("use_qk_norm", bool, True),
        temperature=temperature if take("attn_temperature_tuning", (bool, int), True) else None,
    )  # fmt: skip


def _read_rope(fields: _Fields, interleaved: bool) -> Rope:
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
