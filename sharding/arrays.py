"""Arrays declared by letters: their shapes, shardings, quantization and initial values follow from that.

The letters are those of model.py, which declares the weights and the cache. The components of a weight in a
number format (its values and their scale) are declared in the same way, see quantize.py.
"""

import dataclasses
import math
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import layout
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ops.kv_cache import LANES
from ops.platform import on_tpu
from quantize import Format, QuantizedArray
from sharding.mesh import SHARDED_BY, mesh_size

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
    """A frozen dataclass of arrays, whose fields are given by name."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, kw_only=True)(cls))


@dataclasses.dataclass(frozen=True)
class Stored:
    """The tensor of a Hugging Face checkpoint that an array is, or is a part of.

    name:    where {e} is the number of an expert, if each has a tensor of its own.
    letters: its dimensions. Parentheses join letters into one; brackets hold parts that follow one another,
             of which the array is number `part`, from 0: "D[KGH+KH+KH]", or in each head "(K[H+V])D". 1 is
             one element, so that in "(M[1+1])D" the rows of two arrays alternate.
    sizes:   (letter, size) of all letters, also those of the other parts.
    pairs:   letters of the array that are two in the tensor: "QJX" where Q counts all X of all J.
    """

    name: str
    letters: str
    part: int = 0
    sizes: tuple[tuple[str, int], ...] = ()
    pairs: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """One array, declared: shape, sharding, initial value, quantization and checkpoint layout follow.

    Not a pytree node, so jax.tree.map takes it for a leaf.
    letters:    our layout, lowercase where it is sharded.
    contracted: the letters that its matmul sums. Empty: the array is never quantized.
    stored:     where Llama's checkpoints have it; other families say in their files what differs.
    shape:      the true sizes of the letters. dtype: None for the float type of the model or cache.
    initial:    what random values are around; None: around 0, with variance 1 / fan-in.
    format:     the number format of the model's weights.
    min_bits:   below which this weight would lose too much: such a format uses another one for it.
    groups:     of a component, (letter, n) where one step along the letter is a group of n entries.
    """

    letters: str
    contracted: str = ""
    stored: Stored | None = None
    shape: tuple[int, ...] = ()
    dtype: Any = None
    initial: float | None = None
    format: Format | None = None
    min_bits: int = 4
    groups: tuple[str, int] | None = None

    @property
    def spec(self) -> P:
        return P(*(SHARDED_BY.get(letter) for letter in self.letters))

    @property
    def contracted_axes(self) -> tuple[int, ...]:
        return tuple(self.letters.index(letter) for letter in self.contracted)

    @property
    def quantization(self) -> Any:
        """The number format of this array; None if it is not quantized."""
        return self.format.for_array(self) if self.format and self.contracted else None

    @property
    def components(self) -> "ArrayInfo | QuantizedArray":
        """Declarations of its components, values and scale; of an array that is not quantized, itself."""
        return self.quantization.components(self) if self.quantization else self

    def component(self, letters: str, dtype, groups: tuple[str, int] | None = None) -> "ArrayInfo":
        """The declaration of a component. The letter I is the place in a group, see `groups`."""
        sizes = dict(zip(self.letters, self.shape, strict=True))
        if groups:
            letter, n = groups
            sizes |= {letter: sizes[letter] // n, "I": n}
        shape = tuple(sizes[letter] for letter in letters)
        return ArrayInfo(letters, shape=shape, dtype=dtype, format=self.format, groups=groups)

    def in_stages(self, stages: int) -> "ArrayInfo":
        """The declaration of as many arrays, each on a stage of its own. stored: of the first stage's."""
        return dataclasses.replace(self, letters="p" + self.letters, shape=(stages, *self.shape))

    def in_places(self, places: int) -> "ArrayInfo":
        """The declaration of as many such arrays for each row. The letter I counts them."""
        letters, shape = self.letters[0] + "I" + self.letters[1:], (self.shape[0], places, *self.shape[1:])
        return dataclasses.replace(self, letters=letters, shape=shape)

    def placement(self, mesh: Mesh) -> NamedSharding | layout.Format:
        """The array's sharding and, where XLA is not to choose it, the order of dimensions in memory.

        On TPUs XLA makes dimensions the last two that fill whole tiles, if there are any. Pallas kernels read
        arrays in the declared order, so each step would copy an array that is stored in another one. Two
        kinds of arrays keep the declared order: those with the groups of experts' weights, such as scales
        [E,1,D], which XLA would store as [1,E,D]; and those whose last dimension nearly fills whole tiles,
        such as 2880 columns.
        """
        sharding, columns = NamedSharding(mesh, self.spec), self.shape[-1]
        groups_of_experts = self.groups is not None and "e" in self.letters
        nearly_whole = self.letters[-1].isupper() and 0 < -columns % LANES <= columns / 16
        if on_tpu(mesh) and (groups_of_experts or nearly_whole):
            return layout.Format(layout.Layout(tuple(range(len(self.shape)))), sharding)
        return sharding

    def padded_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape with each size rounded up to a multiple of its devices: zeros, which change no result.

        Each device gets a multiple of LANES cache slots, on TPUs also of an expert's width: whole tiles, as
        its kernels want. Of a feed-forward width it gets what the number format asks for: whole groups.
        """
        whole, padded = "sm" if on_tpu(mesh) else "s", []
        for letter, size in zip(self.letters, self.shape, strict=True):
            step = self.groups[1] if self.groups and self.groups[0] == letter else 1
            unit = LANES if letter in whole else 1
            if self.format and letter in "fm":
                unit = math.lcm(unit, self.format.pad_multiple(size * step))
            unit *= mesh_size(mesh, SHARDED_BY.get(letter, ()))
            padded.append(-(-size * step // unit) * unit // step)
        return tuple(padded)


def declared(letters: str, contracted: str, name: str, layout: str, part: int = 0, **other) -> Any:
    """A dataclass field that declares an array: its letters, and the letters that its matmul sums.

    name, layout, part: where checkpoints store the array (Llama's checkpoints, if Llama has such an array),
    see Stored.
    """
    info = ArrayInfo(letters, contracted, Stored(name, layout, part), **other)
    return dataclasses.field(metadata={"info": info})


def declared_norm(letter: str, name: str) -> Any:
    return declared(letter, "", name, letter, initial=1.0)


def declared_bias(letters: str, name: str, layout: str, **other) -> Any:
    return declared(letters, "", name, layout, initial=0.0, **other)


def with_norms(infos, **norms):
    """The infos, with the field of each name=norm replaced by norm.declare(field); None without a norm."""
    changed = {name: norm and norm.declare(getattr(infos, name)) for name, norm in norms.items()}
    return dataclasses.replace(infos, **changed)


def sizes_of(record) -> dict[str, int]:
    """The letters among its fields."""
    return {name: size for name, size in vars(record).items() if len(name) == 1}


def infos_of(cls, prefix: str, sizes: dict[str, int], absent: dict[str, bool] | None = None, **children):
    """The declarations of an instance of cls: its fields with these sizes, beside the children.

    prefix: of the names in a checkpoint. absent: whether fields whose names end so are None.
    """

    def resolve(info: ArrayInfo) -> ArrayInfo:
        assert info.stored is not None  # `declared` gives it
        stored = dataclasses.replace(info.stored, name=prefix + info.stored.name, sizes=tuple(sizes.items()))
        return dataclasses.replace(info, stored=stored, shape=tuple(sizes[x] for x in info.letters.upper()))

    missing = tuple(end for end, is_absent in (absent or {}).items() if is_absent)
    fields = {f.name: f.metadata["info"] for f in dataclasses.fields(cls) if f.name not in children}
    infos = {name: None if name.endswith(missing) else resolve(info) for name, info in fields.items()}
    return cls(**children, **infos)


def specs(infos, arrays):
    """The PartitionSpec of each array in a tree; `arrays` tells which of them are quantized, and how."""

    def spec(info: ArrayInfo, x):
        components = x.format.components(info) if isinstance(x, QuantizedArray) else info
        return jax.tree.map(lambda component: component.spec, components)

    return jax.tree.map(spec, infos, arrays)


def abstract(infos, mesh: Mesh, dtype=None):
    """The declared tree as sharded jax.ShapeDtypeStructs. dtype: of those that declare no other."""

    def struct(info: ArrayInfo):
        shape = info.padded_shape(mesh)
        return jax.ShapeDtypeStruct(shape, info.dtype or dtype, sharding=info.placement(mesh))

    return jax.tree.map(lambda info: jax.tree.map(struct, info.components), infos)


def make(function, tree, *arguments):
    """The arrays that function(array, *static) computes, each shard on its device from the start."""
    placements = jax.tree.map(lambda x: x.format, tree)
    return jax.jit(function, static_argnums=range(1, len(arguments)), out_shardings=placements)(*arguments)


def zeros(tree):
    """A tree of sharded jax.ShapeDtypeStructs as arrays of zeros."""
    return make(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree), tree)


def random_arrays(key: Array, infos, mesh: Mesh, dtype):
    """A declared tree with random values, the same on every mesh, see ArrayInfo.initial."""
    leaves, treedef = jax.tree.flatten(infos)
    arrays = []
    for one, info in zip(jax.random.split(key, len(leaves)), leaves, strict=True):
        info = dataclasses.replace(
            info, stored=None
        )  # those that differ in their names alone share a program
        tree = abstract(info, mesh, dtype)
        array = make(_random, tree, one, info, info.padded_shape(mesh), dtype)
        arrays.append(jax.block_until_ready(array))  # one is in float32 at a time
    return jax.tree.unflatten(treedef, arrays)


def _random(key: Array, info: ArrayInfo, padded: tuple[int, ...], dtype):
    x, summed = jax.random.normal(key, info.shape), info.contracted or "D"
    fan_in = math.prod(n for n, letter in zip(info.shape, info.letters, strict=True) if letter in summed)
    x = x * fan_in**-0.5 if info.initial is None else info.initial + x / 10
    x = jnp.pad(x, [(0, n) for n in np.subtract(padded, info.shape)])
    if info.quantization:
        # Not large: with barriers between the passes, scales were the last bit away on some meshes.
        return info.quantization.encode(x, info, large=False)
    return x.astype(info.dtype or dtype)
