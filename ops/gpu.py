"""What the kernels for GPUs have in common; they are in gpu_attention.py and gpu_products.py.

They use Pallas' Triton backend. Letters as in model.py, uppercase for this device's share.
"""

import functools
import sys
from typing import Any

import jax.numpy as jnp
from jax import Array

from ops.tpu import precision

try:
    from jax.experimental.pallas.triton import CompilerParams, load, store  # noqa: F401  for these files

    missing = None
except (ImportError, AttributeError) as e:  # deprecated since jax 0.11
    missing = e

PROGRAMS = 512  # enough to keep a GPU busy: a few on each of its 100 to 150 processors


def supports(x: Array, each: int = 1) -> bool:
    """Whether the kernels can read x in entries of so many numbers of its last dimension.

    Pallas uses signed 32-bit offsets for arrays of up to 4 GiB: int8 arrays of 2 to 4 GiB are out of reach.
    """
    if missing:
        say_slow()
    count = x.size // each
    return not (missing or x.shape[-1] % each) and (count < 1 << 31 or count * x.dtype.itemsize > 1 << 32)


@functools.cache  # once
def say_slow() -> None:
    """Say once that this GPU runs without the kernels, by the products and attention of any device."""
    slow = (
        "attention writes its scores to memory, experts multiply each row by all of them, integers by floats"
    )
    print(f"slow on this GPU: {slow}, as Pallas' Triton backend is missing ({missing})", file=sys.stderr)


def dot(a: Array, b: Array) -> Array:
    """The product of two tiles of one type."""
    return jnp.dot(a, b, precision=precision(a.dtype), preferred_element_type=sum_dtype(a))


def sum_dtype(x: Array) -> Any:
    """The type of sums of products with x."""
    return jnp.int32 if x.dtype == jnp.int8 else jnp.float32
