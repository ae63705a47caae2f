"""A model's folder: its config.json, the names and layouts of its tensors, its files, loading onto a mesh."""
