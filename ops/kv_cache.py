"""The layout of a layer's key/value cache, which the attention kernels of all platforms read.

Letters as in model.py: B rows, K key/value heads, S slots, H width of a key, C columns of a slot.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from quantize import quantize

LANES = 128  # of a TPU's vector register: cache slots, and wide slots' columns, come in multiples of it


@dataclasses.dataclass(frozen=True)
class SlotLayout:
    """Which columns of a slot hold what: the key is [0, key), the value is [value[0], value[1]).

    The two may overlap: in latent attention the value is a part of the key. scale: the factor of q·k.
    """

    key: int
    value: tuple[int, int]
    scale: float

    @property
    def width(self) -> int:
        """C: above 128 columns rounded up to a multiple of 128, so that XLA keeps this layout."""
        used = max(self.key, self.value[1])
        return used if used < LANES else -(-used // LANES) * LANES

    @property
    def value_width(self) -> int:
        return self.value[1] - self.value[0]


def key_beside_value(H: int, scale: float | None = None) -> SlotLayout:
    """The slots of a key and a value of width H each. scale: H**-0.5 by default."""
    return SlotLayout(H, (H, 2 * H), H**-0.5 if scale is None else scale)


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=["layout"])
@dataclasses.dataclass(frozen=True)
class KV:
    """Keys and values of one layer. A key lies beside its value, so that one DMA fetches a block of both.

    values: [B,K,S,C] float or int8. scale: [B,K,2,S] bfloat16, the factors of each int8 key and value; None
    if the values are floats.
    """

    values: Array
    scale: Array | None
    layout: SlotLayout

    @property
    def dtype(self) -> jnp.dtype:
        return self.values.dtype


def kv_owners(kinds) -> list[int]:
    """The number of the layer to whose keys and values each layer attends: its own, or an earlier one's.

    kinds: of all layers, see model.LayerKind.shares_kv. Raises ValueError if a layer shares keys that no
    earlier layer has.
    """
    owners, latest = [], {}
    for i, kind in enumerate(kinds):
        if not kind.shares_kv:
            latest[kind.mask] = i
        elif kind.mask not in latest:
            raise ValueError(f"no layer before layer {i} has keys and values for it: run it with that layer")
        owners.append(latest[kind.mask])
    return owners


def cached_depth(kinds) -> int:
    """How many layers fill all caches: those up to the last one that has keys and values of its own.

    A prefill chunk whose logits nobody wants needs no others.
    """
    return max(i + 1 for i, kind in enumerate(kinds) if not kind.shares_kv)


def map_slots(function, *kvs: KV) -> KV:
    """Apply function(axis, *arrays) to the values of caches and, if they are int8, to their scales.

    axis: the axis of slots, 2 in the values and 3 in the scales.
    """
    scale = None if kvs[0].scale is None else function(3, *(kv.scale for kv in kvs))
    return KV(function(2, *(kv.values for kv in kvs)), scale, kvs[0].layout)


def as_cached(new: Array, cache: KV | None, layout: SlotLayout) -> KV:
    """New keys and values in the layout and type of a cache: -> a KV with values [B,K,T,C].

    new: [B,T,K,columns], a key beside its value, or a latent beside its rotated key; the padding of C is
    added here. cache: None keeps the values in the type that they have.
    """
    new, scale = new.swapaxes(1, 2), None
    if cache is not None and cache.scale is not None:
        # A latent has one scale for both.
        parts = new.reshape(*new.shape[:3], new.shape[3] // layout.key, -1)
        quantized = quantize(parts, (4,), cache.scale.dtype)
        new = quantized.values.reshape(new.shape)
        scale = jnp.broadcast_to(quantized.scale.swapaxes(2, 3), (*new.shape[:2], 2, new.shape[2]))
    new = jnp.pad(new, [(0, 0)] * 3 + [(0, layout.width - new.shape[3])])
    return KV(new if cache is None else new.astype(cache.values.dtype), scale, layout)
