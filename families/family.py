"""What a family's file says."""

import dataclasses
import re
from collections.abc import Callable

from families.fields import ConfigFields
from model import Config


@dataclasses.dataclass(frozen=True)
class Family:
    """Models whose config.json has the same fields and whose tensors have the same names.

    model_type:       the model_type of config.json.
    config:           from config.json's fields to the Config. Raises UserError about a wrong field.
    multimodal_type:  the model_type of multimodal models whose text_config is of this family.
    field_names:      {this family's name of a field: Llama's}, where the two differ.
    supported:        the supported values of fields that `config` does not take; always null, false, empty.
    no_effect:        fields that do not change what the language model computes.
    tensor_names:     (regular expression, replacement), applied in turn: from published names to Llama's.
    unused_tensors:   a regular expression of published tensors that the language model does not use.
    extra_layer:      whether checkpoints have one more layer, which predicts the token after the next and is
                      not used either.
    """

    model_type: str
    config: Callable[[ConfigFields], Config]
    multimodal_type: str | None = None
    field_names: dict[str, str] = dataclasses.field(default_factory=dict)
    supported: dict[str, tuple] = dataclasses.field(default_factory=lambda: {"hidden_act": ("silu",)})
    no_effect: tuple[str, ...] = ()
    tensor_names: tuple[tuple[str, str], ...] = ()
    unused_tensors: str = r"\.rotary_emb\.inv_freq$"
    extra_layer: bool = False

    def llama_name(self, name: str) -> str:
        """The name that Llama's checkpoints have for a published tensor."""
        for pattern, replacement in self.tensor_names:
            name = re.sub(pattern, replacement, name)
        return name

    def ignores(self, name: str, depth: int) -> bool:
        """Whether a model of `depth` layers does not use the published tensor of this name."""
        extra = self.extra_layer and name.startswith(f"model.layers.{depth}.")
        return extra or bool(re.search(self.unused_tensors, name))


# transformers 5 holds the matrices of all experts in one tensor, and some tools save it so.
EXPERT_NAMES = (
    (r"\.mlp\.gate\.weight$", ".mlp.router.weight"),
    (r"\.experts\.(gate_up|down)_proj$", r".experts.\1_proj.weight"),
)
