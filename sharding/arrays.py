"""Arrays declared by letters: the shapes, shardings, forms in few bits and first values that follow.

The letters are those of model.py, which declares the weights and the cache. In an int4 form there is one
more, I: the place in a group of entries that share a scale.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ops.platform import on_tpu
from ops.tpu import LANES
from quantize import (
    INT8,
    Format,
    GroupedArray,
    QuantizedArray,
    quantize,
    quantize_groups,
    quantize_large,
    ungroup,
)
from sharding.mesh import SHARDED_BY, mesh_size


def pytree(cls):
    """A frozen dataclass of arrays, whose fields are given by name."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, kw_only=True)(cls))


@dataclasses.dataclass(frozen=True)
class Stored:
    """The tensor of a Hugging Face checkpoint that an array is, or is a part of.

    name:    where {e} is the number of an expert, if each has a tensor of its own.
    letters: its dimensions. Parentheses join letters into one; brackets hold parts that follow one another,
             of which the array is number `part`, from 0: "D[KGH+KH+KH]", or in each head "(K[H+V])D".
    sizes:   (letter, size) of all letters, also those of the other parts.
    """

    name: str
    letters: str
    part: int = 0
    sizes: tuple[tuple[str, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """One array, declared: shape, sharding, initial value, form of few bits and checkpoint layout follow.

    Not a pytree node, so jax.tree.map takes it for a leaf.
    letters:    our layout, lowercase where it is sharded.
    contracted: the letters that its matmul sums; int8 has one scale per entry of the rest. Empty: only float.
    stored:     where Llama's checkpoints have it; other families say in their files what differs.
    shape:      the true sizes of the letters. dtype: None for the float type of the model or cache.
    initial:    what random values are around; None: around 0, with variance 1 / fan-in.
    format:     of the model's weights. least_bits: that suffice for this one.
    steps:      of a part of an int4 form: (letter, n), where a step along the letter is n of its entries.
    """

    letters: str
    contracted: str = ""
    stored: Stored | None = None
    shape: tuple[int, ...] = ()
    dtype: Any = None
    initial: float | None = None
    format: Format | None = None
    least_bits: int = 4
    steps: tuple[str, int] | None = None

    @property
    def spec(self) -> P:
        return P(*(SHARDED_BY.get(letter) for letter in self.letters))

    @property
    def contracted_axes(self) -> tuple[int, ...]:
        return tuple(self.letters.index(letter) for letter in self.contracted)

    @property
    def form(self) -> Format | None:
        """What of the model's format suits this array."""
        if not (self.format and self.contracted):
            return None
        return self.format.along(self.shape[self.contracted_axes[-1]]) if self.least_bits == 4 else INT8

    @property
    def held(self) -> "ArrayInfo | QuantizedArray | GroupedArray":
        """The declarations of the arrays that it is in its form."""
        if self.form is None:
            return self
        return self.in_groups(self.form.group) if self.form.bits == 4 else self.in_channels()

    def in_channels(self) -> QuantizedArray:
        """The declarations of int8 values and their scale."""
        kept = "".join(letter for letter in self.letters if letter not in self.contracted)
        return QuantizedArray(self._part(self.letters, jnp.int8), self._part(kept, jnp.float32))

    def in_groups(self, group: int) -> GroupedArray:
        """The declarations of int4 values and their scale, see GroupedArray."""
        last, before = self.contracted[-1], self.first_letters + self.contracted
        after = "".join(letter for letter in self.letters if letter not in before)
        values = self._part(f"{before}I{after}", jnp.int4, I=group)
        scale = self._part(before + after, jnp.bfloat16)
        return GroupedArray(*(x._counting(last, group) for x in (values, scale)))

    @property
    def first_letters(self) -> str:
        """Those that come before what is contracted in an int4 form."""
        return "".join(letter for letter in self.letters if letter in "pe")

    @property
    def groups(self) -> tuple[tuple[int, ...], int, int]:
        """(axes, group, first) of `quantize_groups` and `in_groups`, for its int4 form or the one before."""
        return self.contracted_axes, self.form.grouping, len(self.first_letters)

    def _part(self, letters: str, dtype, **more: int) -> "ArrayInfo":
        sizes = dict(zip(self.letters, self.shape, strict=True)) | more
        shape = tuple(sizes[letter] for letter in letters)
        return ArrayInfo(letters, shape=shape, dtype=dtype, format=self.format)

    def _counting(self, letter: str, group: int) -> "ArrayInfo":
        """A step along the letter is now `group` of its entries."""
        shape = [n // group if x == letter else n for x, n in zip(self.letters, self.shape, strict=True)]
        return dataclasses.replace(self, shape=tuple(shape), steps=(letter, group))

    def in_stages(self, stages: int) -> "ArrayInfo":
        """The declaration of as many arrays, each on a stage of its own. stored: of the first stage's."""
        return dataclasses.replace(self, letters="p" + self.letters, shape=(stages, *self.shape))

    def padded_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape with each size rounded up to a multiple of its devices: zeros, which change no result.

        Each device gets a multiple of LANES cache slots, on TPUs also of an expert's width: whole tiles, as
        its kernels want. Of a feed-forward width it gets whole groups of int4.
        """
        whole, padded = "sm" if on_tpu(mesh) else "s", []
        for letter, size in zip(self.letters, self.shape, strict=True):
            step = self.steps[1] if self.steps and self.steps[0] == letter else 1
            unit = LANES if letter in whole else 1
            if self.format and letter in "fm":
                unit = math.lcm(unit, self.format.along(size * step).grouping or 1)
            unit *= mesh_size(mesh, SHARDED_BY.get(letter, ()))
            padded.append(-(-size * step // unit) * unit // step)
        return tuple(padded)


def sizes_of(record) -> dict[str, int]:
    """The letters among its fields."""
    return {name: size for name, size in vars(record).items() if len(name) == 1}


def declare(cls, prefix: str, sizes: dict[str, int], absent: dict[str, bool] | None = None, **children):
    """An instance of cls: its declared fields with these sizes, beside the children.

    prefix: of the names in a checkpoint. absent: whether fields whose names end so are None.
    """

    def resolve(info: ArrayInfo) -> ArrayInfo:
        stored = dataclasses.replace(info.stored, name=prefix + info.stored.name, sizes=tuple(sizes.items()))
        return dataclasses.replace(info, stored=stored, shape=tuple(sizes[x] for x in info.letters.upper()))

    missing = tuple(end for end, is_absent in (absent or {}).items() if is_absent)
    fields = {f.name: f.metadata["info"] for f in dataclasses.fields(cls) if f.name not in children}
    infos = {name: None if name.endswith(missing) else resolve(info) for name, info in fields.items()}
    return cls(**children, **infos)


def specs(infos, arrays):
    """The PartitionSpec of each array in a tree; `arrays` tells in which form each declared one is."""

    def spec(info: ArrayInfo, x):
        held = info
        if isinstance(x, QuantizedArray):
            held = info.in_channels()
        if isinstance(x, GroupedArray):
            held = info.in_groups(1)
        return jax.tree.map(lambda part: part.spec, held)

    return jax.tree.map(spec, infos, arrays)


def abstract(infos, mesh: Mesh, dtype=None):
    """The declared tree as sharded jax.ShapeDtypeStructs. dtype: of those that declare no other."""

    def struct(info: ArrayInfo):
        sharding = NamedSharding(mesh, info.spec)
        return jax.ShapeDtypeStruct(info.padded_shape(mesh), info.dtype or dtype, sharding=sharding)

    return jax.tree.map(lambda info: jax.tree.map(struct, info.held), infos)


def in_form(x: Array, info: ArrayInfo) -> QuantizedArray | GroupedArray:
    """A float array in the form of its declaration, which must have one."""
    if not info.form.grouping:
        return quantize_large(x, info.contracted_axes)
    return regrouped(quantize_groups(x, *info.groups), info)


def regrouped(q: GroupedArray, info: ArrayInfo) -> QuantizedArray | GroupedArray:
    """An int4 array as its declaration holds it: as it is, or as int8."""
    axes, _, first = info.groups
    return q if info.form.bits == 4 else quantize_large(ungroup(q, axes, first), axes)


def make(function, tree, *arguments):
    """The arrays that function(array, *static) computes, each shard on its device from the start."""
    shardings = jax.tree.map(lambda x: x.sharding, tree)
    return jax.jit(function, static_argnums=range(1, len(arguments)), out_shardings=shardings)(*arguments)


def zeros(tree):
    """A tree of sharded jax.ShapeDtypeStructs as arrays of zeros."""
    return make(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree), tree)


def random_arrays(key: Array, infos, mesh: Mesh, dtype):
    """A declared tree with random values, the same on every mesh, see ArrayInfo.initial."""
    infos, treedef = jax.tree.flatten(infos)
    arrays = []
    for one, info in zip(jax.random.split(key, len(infos)), infos, strict=True):
        info = dataclasses.replace(
            info, stored=None
        )  # those that differ in their names alone share a program
        tree = abstract(info, mesh, dtype)
        array = make(_random, tree, one, info, info.padded_shape(mesh), dtype)
        arrays.append(jax.block_until_ready(array))  # one is in float32 at a time
    return treedef.unflatten(arrays)


def _random(key: Array, info: ArrayInfo, padded: tuple[int, ...], dtype):
    x, summed = jax.random.normal(key, info.shape), info.contracted or "D"
    fan_in = math.prod(n for n, letter in zip(info.shape, info.letters, strict=True) if letter in summed)
    x = x * fan_in**-0.5 if info.initial is None else info.initial + x / 10
    x = jnp.pad(x, [(0, n) for n in np.subtract(padded, info.shape)])
    if info.form == INT8:  # with `in_form`, scales were the last bit away on some meshes
        return quantize(x, info.contracted_axes)
    return in_form(x, info) if info.form else x.astype(info.dtype or dtype)
