"""The fields of a config.json, while they are read."""

from feedback.errors import UserError

NUMBER = (int, float)
NO_EFFECT = frozenset(
    """architectures attention_dropout boi_token_index bos_token_id cache_implementation dtype
    eoi_token_index eos_token_id for_llm_compressor image_token_index initializer_range
    mm_tokens_per_image model_type output_router_logits pad_token_id pretraining_tp
    quantization_config router_aux_loss_coef router_jitter_noise torch_dtype transformers_version
    unsloth_fixed unsloth_version use_cache""".split()
)
REQUIRED = object()


class ConfigFields:
    """The fields of a config.json. Each one must be read, have no effect on inference, or be refused."""

    def __init__(self, config: dict, no_effect: tuple[str, ...] = ()):
        known = NO_EFFECT.union(no_effect)
        self.values = {k: v for k, v in config.items() if k not in known and not k.startswith("_")}
        self.unread = dict.fromkeys(self.values)

    def get(self, name: str):
        """The value of a field, whatever it is; None if the field is not there."""
        self.unread.pop(name, None)
        return self.values.get(name)

    def take(self, name: str, kind: type | tuple[type, ...], default=REQUIRED):
        """The value of a field, which must be of this type. null means absent, and numbers are positive."""
        value = self.get(name)
        if value is None:
            if default is REQUIRED:
                raise UserError(f"config.json: field {name!r} is missing")
            return default
        number = kind in (int, NUMBER)
        if not isinstance(value, kind) or (number and (isinstance(value, bool) or not 0 < value < 2**31)):
            raise UserError(f"config.json: {name} = {value!r} makes no sense")
        return value

    def finish(self, supported: dict[str, tuple]) -> None:
        """Raises UserError if a field was not read, unless its value is null, false, empty or `supported`."""
        for name in self.unread:
            value = self.values[name]
            if value and value not in supported.get(name, ()):
                raise UserError(f"config.json: {name} = {value!r} is not supported")
