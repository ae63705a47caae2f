"""The fields of a config.json, while they are read."""

from typing import Any

from feedback.errors import UserError

NUMBER = (int, float)
# Fields that cannot change an answer, by the reason. Those of one family are in Family.no_effect.
NO_EFFECT = {
    "training": """attention_dropout initializer_range output_router_logits pretraining_tp
        router_aux_loss_coef router_jitter_noise""",
    "the program that wrote the file": """architectures auto_map for_llm_compressor model_type name_or_path
        transformers_version unsloth_fixed unsloth_version""",
    "the Python classes of transformers": """cache_implementation chunk_size_feed_forward output_attentions
        output_hidden_states return_dict tokenizer_class use_cache""",
    "the type in which transformers computes; here the tensors' own, or --dtype": "dtype torch_dtype",
    "classifiers": "id2label label2id problem_type",
    "images": """boi_token_id boi_token_index eoi_token_id eoi_token_index image_token_id image_token_index
        mm_tokens_per_image mrope_interleaved mrope_section vision_config""",
    "the tokenizer and the end of an answer, see the files below": "bos_token_id eos_token_id pad_token_id",
    "how weights are quantized, see below": "quantization_config",
}
REQUIRED = object()


class ConfigFields:
    """The fields of a config.json. Each one must be read, have no effect on inference, or be refused."""

    def __init__(self, config: dict, no_effect: str = ""):
        """no_effect: the names of more fields that cannot change an answer."""
        known = " ".join([*NO_EFFECT.values(), no_effect]).split()
        self.values = {k: v for k, v in config.items() if k not in known and not k.startswith("_")}
        self.unread = dict.fromkeys(self.values)

    def get(self, name: str):
        """The value of a field, whatever it is; None if the field is not there."""
        self.unread.pop(name, None)
        return self.values.get(name)

    def take(
        self, name: str, kind: type | tuple[type, ...], default: Any = REQUIRED, *, zero: bool = False
    ) -> Any:
        """The value of a field, which must be of this type. null means absent.

        Numbers are positive. zero: whether a number may also be 0.
        """
        value = self.get(name)
        if value is None:
            if default is REQUIRED:
                raise UserError(f"config.json: field {name!r} is missing")
            return default
        valid = isinstance(value, kind)
        if kind in (int, NUMBER):
            valid = valid and not isinstance(value, bool) and (0 < value < 2**31 or zero and value == 0)
        if not valid:
            raise UserError(f"config.json: {name} = {value!r} makes no sense")
        return value

    def finish(self, supported: dict[str, tuple]) -> None:
        """Raises UserError if a field was not read, unless its value is null, false, empty or `supported`."""
        for name in self.unread:
            value = self.values[name]
            if value and value not in supported.get(name, ()):
                raise UserError(f"config.json: {name} = {value!r} is not supported")
