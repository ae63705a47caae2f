"""A config.json while it is read."""

from checkpoints.errors import UserError

NUMBER = (int, float)
NO_EFFECT = frozenset(
    """architectures attention_dropout attn_pdrop boi_token_index bos_token_id cache_implementation dtype
    embd_pdrop eoi_token_index eos_token_id n_ctx resid_pdrop summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj task_specific_params
    for_llm_compressor image_token_index initializer_range model_type output_router_logits pad_token_id
    pretraining_tp router_aux_loss_coef router_jitter_noise torch_dtype transformers_version unsloth_fixed
    unsloth_version use_cache""".split()
)
REQUIRED = object()


class Fields:
    """The fields of a config.json: each is taken, known to have no effect on inference, or refused."""

    def __init__(self, config: dict):
        self.left = {k: v for k, v in config.items() if k not in NO_EFFECT and not k.startswith("_")}

    def take(self, name: str, kind: type | tuple[type, ...], default=REQUIRED):
        """The value of a field, which must be of this type; null is absent, and numbers are positive."""
        value = self.left.pop(name, None)
        if value is None:
            if default is REQUIRED:
                raise UserError(f"config.json: field {name!r} is missing")
            return default
        number = kind in (int, NUMBER)
        if not isinstance(value, kind) or (number and (isinstance(value, bool) or not 0 < value < 2**31)):
            raise UserError(f"config.json: {name} = {value!r} makes no sense")
        return value

    def finish(self, fixed: dict) -> None:
        """Raises UserError if a field is left, unless it asks for nothing or for what `fixed` allows."""
        for name, value in self.left.items():
            # A field that is null, false or empty asks for nothing.
            if value and value not in fixed.get(name, ()):
                raise UserError(f"config.json: {name} = {value!r} is not supported")
