"""Plans for TPUs that need not be here: what a model's programs need, move and send, as compiled for them."""
