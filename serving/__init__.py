"""The engine: continuous batching, prefix caching, speculation, and the programs of a batch."""
