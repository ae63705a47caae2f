"""Attention, matrix products and experts, each in the form that is fast on this platform."""
