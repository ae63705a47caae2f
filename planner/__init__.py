"""Plans for TPUs and GPUs that need not be here: what a model's compiled programs need, move and send."""
