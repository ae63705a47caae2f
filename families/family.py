"""What a family's file says."""

import dataclasses
import re
from collections.abc import Callable, Mapping

from families.fields import ConfigFields
from families.tool_formats import MessageToolFormat, ToolFormat
from model import Config
from sharding.arrays import ArrayInfo, Stored

# A language model within a multimodal one: the prefixes of its tensors, and which tensors are not its own.
LANGUAGE_MODEL_NAMES = (
    (r"^(model\.)?language_model\.(model\.)?(?!lm_head)", "model."),
    (r"^language_model\.(?=lm_head)", ""),
)
VISION_TENSORS = r"^(model\.)?(vision_(model|tower)|(multi_modal|mm)_projector)\.|\.rotary_emb\.inv_freq$"


@dataclasses.dataclass(frozen=True)
class Channels:
    """Answers that consist of several messages, each in a named channel, of which one is for the user.

    A message is the token `start`, a role, `channel` (a token or a text), the channel's name, the token
    `message`, the text, and one of the tokens `ends`. The `start` and the role of the first message end the
    prompt. final: the name of the user's channel; the other channels are reasoning.
    """

    start: str
    channel: str
    message: str
    ends: tuple[str, ...]
    final: str


@dataclasses.dataclass(frozen=True)
class Family:
    """Models whose config.json has the same fields and whose tensors have the same names.

    model_type:       the model_type of config.json.
    config:           from config.json's fields to the Config. Raises UserError about a wrong field.
    multimodal_types: the model_types of multimodal models whose text_config may be of this family.
    field_names:      {this family's name of a field: Llama's}, where the two differ.
    defaults:         fields that config.json may leave out, with the values that they have then.
    supported:        the supported values of fields that `config` does not take; always null, false, empty.
    no_effect:        the names of fields that do not change what the language model computes.
    tensor_names:     (regular expression, replacement), applied in turn: from published names to Llama's.
    layouts:          where tensors are joined, split or transposed: {a field of Layer or Weights, with dots:
                      the places where checkpoints may have it, under names after `tensor_names`}. Those of a
                      layer begin after "model.layers.0.".
    unused_tensors:   a regular expression of published tensors that the language model does not use.
    extra_layers:     how many layers more checkpoints may have, which predict further tokens and are not used
                      either.
    channels:         how answers to a chat separate reasoning from the text for the user; None: they do not.
    tools:            how its models write calls of tools, unless the chat template shows another format, see
                      conversation.tools.choose_tool_format; None: they have not learned any.
    """

    model_type: str
    config: Callable[[ConfigFields], Config]
    multimodal_types: tuple[str, ...] = ()
    field_names: dict[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, int | float] = dataclasses.field(default_factory=dict)
    supported: dict[str, tuple] = dataclasses.field(default_factory=lambda: {"hidden_act": ("silu",)})
    no_effect: str = ""
    tensor_names: tuple[tuple[str, str], ...] = ()
    layouts: Mapping[str, tuple[Stored, ...]] = dataclasses.field(default_factory=dict)
    unused_tensors: str = r"\.rotary_emb\.inv_freq$"
    extra_layers: int = 0
    channels: Channels | None = None
    tools: ToolFormat | MessageToolFormat | None = None

    def llama_name(self, name: str) -> str:
        """The name that Llama's checkpoints have for a published tensor."""
        for pattern, replacement in self.tensor_names:
            name = re.sub(pattern, replacement, name)
        return name

    def places(self, name: str, info: ArrayInfo) -> list[Stored]:
        """Where checkpoints may have a weight, like `layers.0.attention.q`; the first that is there counts.

        The fields of a layer's MLP and of its experts have the same names: their letters tell them apart.
        """
        layer, field = re.findall(r"^(?:layers\.(\d+)\.)?(.*)$", name)[0]
        prefix = f"model.layers.{layer}." if layer else ""
        assert info.stored is not None  # as all weights are
        letters, sizes = set(info.letters.upper()), info.stored.sizes
        return [
            *(
                dataclasses.replace(x, name=prefix + x.name, sizes=sizes)
                for x in self.layouts.get(field, ())
                if letters <= {*x.letters, *(pair[0] for pair in x.pairs), "E" if "{e}" in x.name else ""}
            ),
            info.stored,
        ]

    def ignores(self, name: str, config: Config) -> bool:
        """Whether a model does not use the published tensor of this name."""
        depth = len(config.layers)
        unused = [f"model.layers.{depth + i}." for i in range(self.extra_layers)]
        shared = [f"model.layers.{i}.self_attn." for i, x in enumerate(config.layers) if x.shares_kv]
        unused += [layer + part for layer in shared for part in ("k_", "v_")]
        return name.startswith(tuple(unused)) or bool(re.search(self.unused_tensors, name))
