"""Continuous batching, speculation, tokens and text, what fits into memory, many processes."""
