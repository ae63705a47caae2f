"""A model on these devices: its mesh, number formats and memory, and its compiled programs."""
