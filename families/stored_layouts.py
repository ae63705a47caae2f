"""Where published checkpoints have weights that are joined, split or transposed: see Family.layouts."""

from collections.abc import Mapping

from sharding.arrays import Stored

Layouts = Mapping[str, tuple[Stored, ...]]


def joined(name: str, letters: str, *fields: str, pairs: tuple[str, ...] = ()) -> Layouts:
    """Fields that are the parts of one tensor, in this order. name, letters, pairs: see Stored."""
    return {field: (Stored(name, letters, part, pairs=pairs),) for part, field in enumerate(fields)}


def either(*layouts: Layouts) -> Layouts:
    """Each field at its place in the first of these layouts whose tensor a checkpoint has."""
    fields = dict.fromkeys(field for layout in layouts for field in layout)
    return {field: sum((layout.get(field, ()) for layout in layouts), ()) for field in fields}


ROUTER_NAME = (r"\.mlp\.gate\.(?=weight$|e_score_correction_bias$)", ".mlp.router.")
GATE_AND_UP = "feed_forward.gate", "feed_forward.up"
SINGLE_EXPERTS = {
    "feed_forward.gate": (Stored("mlp.experts.{e}.gate_proj.weight", "MD"),),
    "feed_forward.up": (Stored("mlp.experts.{e}.up_proj.weight", "MD"),),
    "feed_forward.down": (Stored("mlp.experts.{e}.down_proj.weight", "DM"),),
}
# transformers 5 holds the matrices of all experts in one tensor, and some tools save them so. Llama 4's
# checkpoints have tensors of these names, too, with the dimensions in another order.
SINGLE_OR_JOINED_EXPERTS = either(
    SINGLE_EXPERTS,
    joined("mlp.experts.gate_up_proj", "E[M+M]D", *GATE_AND_UP),
    {"feed_forward.down": (Stored("mlp.experts.down_proj", "EDM"),)},
)
