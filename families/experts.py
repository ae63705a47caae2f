"""Where published checkpoints have the experts of a layer: see Family.layouts."""

from sharding.arrays import Stored

ROUTER_NAME = (r"\.mlp\.gate\.(?=weight$|e_score_correction_bias$)", ".mlp.router.")

SINGLE_EXPERTS = {
    "feed_forward.gate": (Stored("mlp.experts.{e}.gate_proj.weight", "MD"),),
    "feed_forward.up": (Stored("mlp.experts.{e}.up_proj.weight", "MD"),),
    "feed_forward.down": (Stored("mlp.experts.{e}.down_proj.weight", "DM"),),
}

# transformers 5 holds the matrices of all experts in one tensor, and some tools save them so. Llama 4's
# checkpoints have tensors of these names, too, with the dimensions in another order.
JOINED_EXPERTS = {
    "feed_forward.gate": (Stored("mlp.experts.gate_up_proj", "E[M+M]D", 0),),
    "feed_forward.up": (Stored("mlp.experts.gate_up_proj", "E[M+M]D", 1),),
    "feed_forward.down": (Stored("mlp.experts.down_proj", "EDM"),),
}
SINGLE_OR_JOINED_EXPERTS = {field: places + JOINED_EXPERTS[field] for field, places in SINGLE_EXPERTS.items()}
