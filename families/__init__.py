"""One file per model family: how its config.json becomes a Config, and what it calls its tensors."""
