"""Attention, matrix products and experts, each with the kernels of a CPU, a GPU and a TPU."""
