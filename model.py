"""Inference of Llama 3, Llama 4 and Qwen 3: pure functions over pytrees, inside one shard_map.

Letters, one per dimension, used in every shape, einsum and comment:

    B  rows of the batch     S  key positions (slots)   E  experts
    T  query positions       H  head width              A  experts active per token
    K  key/value heads       D  model width             M  feed-forward width of an expert
    G  queries per K         F  feed-forward width      V  vocabulary
                             C  a key beside its value, 2H: the cache's columns

UPPERCASE: the whole dimension is on this device. lowercase: this device holds its shard of it. So
`einsum("bTD,kgHD->bTkgH", x, w.q)` says where every byte is, and where a lowercase letter is summed there
must be a `psum`. SHARDED_BY says which mesh axes split which lowercase letter, for the whole program.
"""

import dataclasses
import functools
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ops.attention import attend_cached, attend_causal, merge, ragged_decode, write
from ops.grouped_matmul import expert_mlp
from ops.matmul import einsum
from ops.platform import on_tpu
from ops.tpu import LANES, take_rows
from quantize import QuantizedArray, quantize, values_and_scale
from ragged_attention import KV

# ----------------------------------------------------------------------------------------------------- mesh
#
# Attention and experts divide the same devices in two ways, so a model mesh is a 2x2 table of axes:
#
#                                other key/value heads    other slots of the same heads' cache
#   other experts                expert_heads             expert_slots
#   other slices of the same      tensor_heads             tensor_slots
#
# The slot axes exceed 1 only where the devices do not divide the key/value heads. There n devices share one:
# each stores 1/n of its queries (g), its key and value columns (h) and its cache slots (s), nothing twice.
# With 2 heads, for example, 2 x 4 devices (expert x tensor) are expert_heads 2 x tensor_slots 4.

HEADS = ("expert_heads", "tensor_heads")
SLOTS = ("expert_slots", "tensor_slots")
EXPERT = ("expert_heads", "expert_slots")
TENSOR = ("tensor_heads", "tensor_slots")
MODEL = ("expert_heads", "expert_slots", "tensor_heads", "tensor_slots")
SHARDED_BY = dict(b="data", k=HEADS, g=SLOTS, h=SLOTS, s=SLOTS, e=EXPERT, m=TENSOR, f=MODEL, v=MODEL)


def mesh_shape(cfg: "Config", data: int = 1, expert: int = 1, tensor: int = 1) -> dict[str, int]:
    """The size of each mesh axis for these degrees of parallelism. Raises ValueError if cfg forbids them."""
    heads = math.gcd(cfg.heads.K, expert * tensor)
    slots = expert * tensor // heads
    experts = cfg.experts.E if cfg.experts else 0
    if expert > 1 and (not experts or experts % expert):
        raise ValueError(f"expert parallelism {expert} does not divide the model's {experts} experts")
    if cfg.heads.H % slots:
        raise ValueError(
            f"{slots} devices would share a key/value head, which does not divide its width {cfg.heads.H}"
        )
    expert_heads = math.gcd(expert, heads)
    tensor_heads = heads // expert_heads
    sizes = (expert_heads, expert // expert_heads, tensor_heads, tensor // tensor_heads)
    return {"data": data, **dict(zip(MODEL, sizes, strict=True))}


def make_mesh(cfg: "Config", data: int = 1, expert: int = 1, tensor: int = 1, devices=None) -> Mesh:
    """The mesh of data x expert x tensor devices, by default the first there are."""
    shape = mesh_shape(cfg, data, expert, tensor)
    devices = devices or jax.devices()[: data * expert * tensor]
    # Neighbours on the interconnect where they can be; several axes may have to divide one of its dimensions.
    grid = mesh_utils.create_device_mesh(tuple(shape.values()), devices, allow_split_physical_axes=True)
    return Mesh(grid, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


# --------------------------------------------------------------------------------------------------- config


@dataclasses.dataclass(frozen=True)
class Norm:
    """Division by the root mean square. Source: arXiv 1910.07467."""

    eps: float
    weight: bool = True


@dataclasses.dataclass(frozen=True)
class QueryScale:
    """A factor of queries: 1 + scale * log1p(floor((position + 1) / floor)). Source: arXiv 2501.19399."""

    scale: float
    floor: float


@dataclasses.dataclass(frozen=True)
class Heads:
    """Grouped-query attention: K heads of keys and values, for G queries each, of width H."""

    K: int
    G: int
    H: int
    qk_norm: Norm | None = None  # of each query and key
    query_scale: QueryScale | None = None


@dataclasses.dataclass(frozen=True)
class Full:
    """Attention to all that came before."""

    ring = None  # how many slots the cache goes round in

    def first(self, position):
        """The first position that a query at this one sees."""
        return position * 0

    def room(self, length: Array) -> Array:
        """How many tokens a row of this length can read and still take back, as rejected draft tokens are."""
        return jnp.full_like(length, jnp.iinfo(jnp.int32).max)

    def reusable(self, n: int, latest: int) -> int:
        """How many of a row's first n tokens another can go on from, when it has read `latest`."""
        return n


@dataclasses.dataclass(frozen=True)
class Chunked:
    """Attention to the earlier positions of the same block of `size`: the cache is a ring of one block."""

    size: int

    @property
    def ring(self) -> int:
        return self.size

    def first(self, position):
        return position - position % self.size

    def room(self, length: Array) -> Array:
        """Up to the end of the block: what comes after takes the places of what its next tokens see."""
        return self.size - length % self.size

    def reusable(self, n: int, latest: int) -> int:
        """Only the block that the row is in is still there; at a block's end nothing is needed."""
        return n if n // self.size == latest // self.size else self.first(n)


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding. Source: arXiv 2104.09864."""

    theta: float
    scaling: tuple[float, ...] | None = None  # factor, low and high frequency factor, original length
    interleaved: bool = False  # rotate neighbours (2i, 2i+1), not halves (i, i + H/2)


@dataclasses.dataclass(frozen=True)
class Gated:
    """SwiGLU: a gated MLP of width F. Source: arXiv 2002.05202."""

    F: int


@dataclasses.dataclass(frozen=True)
class Router:
    """How a token's experts are weighted: by which score, applied to their input or output."""

    score: str = "sigmoid"  # or "softmax", over all experts
    normalized: bool = False  # the scores of the chosen experts sum to 1
    scales: str = "input"  # or "output"


@dataclasses.dataclass(frozen=True)
class Experts:
    """E gated MLPs of width M, of which each token goes through A; beside them one for all tokens."""

    E: int
    A: int
    M: int
    router: Router
    shared: Gated | None


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What tells one decoder layer from another."""

    attention: Heads
    feed_forward: Gated | Experts
    mask: Full | Chunked = Full()
    rope: Rope | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All that the functions below need to know of a model."""

    D: int
    V: int
    layers: tuple[LayerKind, ...]
    norm: Norm
    max_positions: int
    tied_embeddings: bool = False

    @property
    def heads(self) -> Heads:
        """The attention of all layers, as far as its sizes go."""
        return self.layers[0].attention

    @property
    def rope(self) -> Rope | None:
        """That of all layers that have one."""
        return next((kind.rope for kind in self.layers if kind.rope), None)

    @property
    def experts(self) -> Experts | None:
        """Those of all layers that have some, as far as their sizes go."""
        return next((x.feed_forward for x in self.layers if isinstance(x.feed_forward, Experts)), None)

    @property
    def masks(self) -> frozenset[Full | Chunked]:
        return frozenset(kind.mask for kind in self.layers)


# ----------------------------------------------------------------------------------- weights, declared once


@dataclasses.dataclass(frozen=True)
class Stored:
    """The tensor of a Hugging Face checkpoint that an array is, or is a part of.

    name:    {e} numbers the experts, if each has a tensor of its own.
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
    """One array, declared: shape, sharding, initial value, int8 form and checkpoint layout follow from it.

    Not a pytree node, so jax.tree.map takes it for a leaf.
    letters:    our layout, lowercase where it is sharded.
    contracted: the letters that its matmul sums; int8 has one scale per entry of the rest.
    stored:     where a Hugging Face checkpoint may have it; the first that is there counts.
    shape:      the true sizes of the letters. dtype: None for the float type of the model or cache.
    initial:    what random values are around; None: around 0, with variance 1 / fan-in.
    """

    letters: str
    contracted: str = ""
    stored: tuple[Stored, ...] = ()
    shape: tuple[int, ...] = ()
    dtype: Any = None
    initial: float | None = None

    @property
    def spec(self) -> P:
        return P(*(SHARDED_BY.get(letter) for letter in self.letters))

    @property
    def contracted_axes(self) -> tuple[int, ...]:
        return tuple(self.letters.index(letter) for letter in self.contracted)

    @property
    def scale(self) -> "ArrayInfo":
        """The declaration of the int8 scales."""
        kept = [i for i in range(len(self.letters)) if i not in self.contracted_axes]
        return ArrayInfo("".join(self.letters[i] for i in kept), shape=tuple(self.shape[i] for i in kept))

    def padded_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """The shape with each size rounded up to a multiple of its devices: zeros, which change no result.

        Each device gets a multiple of LANES cache slots: whole tiles, as its kernels want.
        """
        degrees = [mesh_size(mesh, SHARDED_BY.get(letter, ())) for letter in self.letters]
        units = [
            degree * LANES if x == "s" else degree for x, degree in zip(self.letters, degrees, strict=True)
        ]
        return tuple(-(-size // unit) * unit for size, unit in zip(self.shape, units, strict=True))


def mesh_size(mesh: Mesh, axes: str | tuple[str, ...]) -> int:
    """The number of devices along the given axes."""
    return math.prod(mesh.shape[axis] for axis in ([axes] if isinstance(axes, str) else axes))


def _array(letters: str, contracted: str = "", *stored: tuple, initial: float | None = None) -> Any:
    """A declared field. stored: (name, letters) or (name, letters, part), see Stored."""
    info = ArrayInfo(letters, contracted, tuple(Stored(*where) for where in stored), initial=initial)
    return dataclasses.field(metadata={"info": info})


def _norm(letter: str, name: str) -> Any:
    return _array(letter, "", (name, letter), initial=1.0)


def _pytree(cls):
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, kw_only=True)(cls))


@_pytree
class Attention:
    q: Array = _array("kgHD", "D", ("q_proj.weight", "(KGH)D"))
    k: Array = _array("khD", "D", ("k_proj.weight", "(KH)D"))
    v: Array = _array("khD", "D", ("v_proj.weight", "(KH)D"))
    o: Array = _array("DkgH", "kgH", ("o_proj.weight", "D(KGH)"))
    q_norm: Array | None = _norm("H", "q_norm.weight")
    k_norm: Array | None = _norm("H", "k_norm.weight")


@_pytree
class MLP:
    gate: Array = _array("fD", "D", ("gate_proj.weight", "FD"))
    up: Array = _array("fD", "D", ("up_proj.weight", "FD"))
    down: Array = _array("Df", "f", ("down_proj.weight", "DF"))


@_pytree
class MoE:
    router: Array = _array("DE", "", ("router.weight", "ED"))
    gate: Array = _array(
        "eDm", "D", ("experts.gate_up_proj", "ED[M+M]", 0), ("experts.{e}.gate_proj.weight", "MD")
    )
    up: Array = _array(
        "eDm", "D", ("experts.gate_up_proj", "ED[M+M]", 1), ("experts.{e}.up_proj.weight", "MD")
    )
    down: Array = _array("emD", "m", ("experts.down_proj", "EMD"), ("experts.{e}.down_proj.weight", "DM"))
    shared: MLP | None


@_pytree
class Layer:
    attention_norm: Array = _norm("D", "input_layernorm.weight")
    attention: Attention
    feed_forward_norm: Array = _norm("D", "post_attention_layernorm.weight")
    feed_forward: MLP | MoE


@_pytree
class Weights:
    embed: Array = _array("vD", "", ("model.embed_tokens.weight", "VD"))
    layers: list[Layer]
    norm: Array = _norm("D", "model.norm.weight")
    unembed: Array | None = _array("vD", "D", ("lm_head.weight", "VD"))  # None: the embedding is used again


@_pytree
class Cache:
    """The text of each row, and what the layers keep of the tokens that they have read.

    tokens: [b,S] int32. The first length[b] have been read, the next one is to be read next; what is beyond
    has no meaning, unless it is the rest of a prompt.
    layers: one KV each, [b,k,s,C]: the keys and values of the tokens read. Position p is in slot p; in a
    chunked layer, a ring of one chunk, in slot p % chunk. Slot s is on device s % n of the n that share the
    head, in place s // n, so that they fill evenly.
    """

    layers: list[KV]
    tokens: Array
    length: Array


def _sizes(record) -> dict[str, int]:
    """The letters among its fields."""
    return {name: size for name, size in vars(record).items() if len(name) == 1}


def _declare(cls, prefix: str, sizes: dict[str, int], **children):
    """An instance of cls: a resolved ArrayInfo in each declared field that is not among the children."""

    def resolve(info: ArrayInfo) -> ArrayInfo:
        known = tuple(sizes.items())
        stored = tuple(dataclasses.replace(x, name=prefix + x.name, sizes=known) for x in info.stored)
        return dataclasses.replace(info, stored=stored, shape=tuple(sizes[x] for x in info.letters.upper()))

    fields = {f.name: f.metadata["info"] for f in dataclasses.fields(cls) if f.name not in children}
    return cls(**children, **{name: resolve(info) for name, info in fields.items()})


def weight_infos(cfg: Config) -> Weights:
    """The tree of all weights with their ArrayInfo in the place of arrays."""
    sizes = _sizes(cfg)

    def attention(heads: Heads, prefix: str) -> Attention:
        weighted = heads.qk_norm and heads.qk_norm.weight
        absent = {} if weighted else dict(q_norm=None, k_norm=None)
        return _declare(Attention, prefix, sizes | _sizes(heads), **absent)

    def feed_forward(kind: Gated | Experts, prefix: str) -> MLP | MoE:
        if isinstance(kind, Gated):
            return _declare(MLP, prefix, sizes | _sizes(kind))
        shared = kind.shared and feed_forward(kind.shared, prefix + "shared_expert.")
        return _declare(MoE, prefix, sizes | _sizes(kind), shared=shared)

    def layer(i: int, kind: LayerKind) -> Layer:
        prefix = f"model.layers.{i}."
        parts = dict(
            attention=attention(kind.attention, prefix + "self_attn."),
            feed_forward=feed_forward(kind.feed_forward, prefix + "mlp."),
        )
        return _declare(Layer, prefix, sizes, **parts)

    layers = [layer(i, kind) for i, kind in enumerate(cfg.layers)]
    if not cfg.tied_embeddings:
        return _declare(Weights, "", sizes, layers=layers)
    weights = _declare(Weights, "", sizes, layers=layers, unembed=None)
    return dataclasses.replace(weights, embed=dataclasses.replace(weights.embed, contracted="D"))


def cache_infos(cfg: Config, batch: int, max_len: int, dtype) -> Cache:
    """The cache of `batch` rows of up to `max_len` positions, declared. dtype: float, or int8 with scales."""

    def layer(kind: LayerKind) -> KV:
        K, H, slots = kind.attention.K, kind.attention.H, min(max_len, kind.mask.ring or max_len)
        values = ArrayInfo("bksC", shape=(batch, K, slots, 2 * H), dtype=dtype)
        if jnp.dtype(dtype) != jnp.int8:
            return KV(values, None)
        return KV(values, ArrayInfo("bk2s", shape=(batch, K, 2, slots), dtype=jnp.bfloat16))

    tokens = ArrayInfo("bS", shape=(batch, max_len), dtype=jnp.int32)
    length = ArrayInfo("b", shape=(batch,), dtype=jnp.int32)
    return Cache(layers=[layer(kind) for kind in cfg.layers], tokens=tokens, length=length)


def specs(infos, arrays):
    """The PartitionSpec of each array in a tree; `arrays` tells which of the declared ones are int8."""

    def spec(info: ArrayInfo, x):
        return QuantizedArray(info.spec, info.scale.spec) if isinstance(x, QuantizedArray) else info.spec

    return jax.tree.map(spec, infos, arrays)


def abstract(infos, mesh: Mesh, dtype=None, quantized: bool = False):
    """The declared tree as sharded jax.ShapeDtypeStructs. quantized: int8 where a matmul contracts."""

    def struct(info: ArrayInfo, dtype):
        return jax.ShapeDtypeStruct(info.padded_shape(mesh), dtype, sharding=NamedSharding(mesh, info.spec))

    def leaf(info: ArrayInfo):
        if quantized and info.contracted:
            return QuantizedArray(struct(info, jnp.int8), struct(info.scale, jnp.float32))
        return struct(info, info.dtype or dtype)

    return jax.tree.map(leaf, infos)


def _make(function, tree, *arguments):
    """The arrays that function(array, *static) computes, each shard on its device from the start."""
    shardings = jax.tree.map(lambda x: x.sharding, tree)
    return jax.jit(function, static_argnums=range(1, len(arguments)), out_shardings=shardings)(*arguments)


def init_cache(cfg: Config, mesh: Mesh, batch: int, max_len: int, dtype) -> Cache:
    """An empty cache, see `cache_infos`."""
    tree = abstract(cache_infos(cfg, batch, max_len, dtype), mesh)
    return _make(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree), tree)


def init_weights(key: Array, cfg: Config, mesh: Mesh, dtype=jnp.float32, quantized: bool = False) -> Weights:
    """Random weights, the same on every mesh: normal with variance 1 / fan-in, norms around 1."""
    infos, treedef = jax.tree.flatten(weight_infos(cfg))
    weights = []
    for one, info in zip(jax.random.split(key, len(infos)), infos, strict=True):
        info = dataclasses.replace(info, stored=())  # those that differ in their names alone share a program
        tree = abstract(info, mesh, dtype, quantized)
        weight = _make(_init_weight, tree, one, info, info.padded_shape(mesh), dtype, quantized)
        weights.append(jax.block_until_ready(weight))  # one is in float32 at a time
    return treedef.unflatten(weights)


def _init_weight(key: Array, info: ArrayInfo, padded: tuple[int, ...], dtype, quantized: bool):
    x, summed = jax.random.normal(key, info.shape), info.contracted or "D"
    fan_in = math.prod(n for n, letter in zip(info.shape, info.letters, strict=True) if letter in summed)
    x = x * fan_in**-0.5 if info.initial is None else info.initial + x / 10
    x = jnp.pad(x, [(0, n) for n in np.subtract(padded, info.shape)])
    if quantized and info.contracted:
        return quantize(x, info.contracted_axes)
    return x.astype(info.dtype or dtype)


# --------------------------------------------------------------------------------------------------- layers


@_pytree
class Span:
    """Where T consecutive tokens stand in each row: after `start` others; the first `count` of them are real.

    row: [b] int32, the cache's rows that they belong to; None: all, in order. start, count: [b] int32.
    positions: [b,T] int32. cos, sin: [b,T,H/2] float32, their rotations.
    """

    row: Array | None
    start: Array
    count: Array
    positions: Array
    cos: Array
    sin: Array


def normalize(x: Array, weight: Array | None, norm: Norm) -> Array:
    """x: [...,D] -> the same, with unit mean square times `weight`."""
    y = x.astype(jnp.float32)
    y = (y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + norm.eps)).astype(x.dtype)
    return y if weight is None else y * weight


def rope_frequencies(rope: Rope, width: int) -> np.ndarray:
    """Radians per position, [H/2] float32. Source: transformers modeling_rope_utils.py."""
    frequency = 1 / np.float32(rope.theta) ** (np.arange(0, width, 2, dtype=np.float32) / np.float32(width))
    if rope.scaling is None:
        return frequency
    factor, low, high, original = rope.scaling
    turns = original * frequency / np.float32(2 * np.pi)  # in the original context
    # Keep what turns more than `high` times, slow down what turns less than `low` times, blend between.
    blend = (turns - low) / (high - low) if high > low else np.where(turns >= low, 1, 0)
    blend = np.clip(blend, 0, 1).astype(np.float32)
    return (1 - blend) * frequency / np.float32(factor) + blend * frequency


def span_at(start: Array, count: Array, width: int, cfg: Config, row: Array | None = None) -> Span:
    """The Span of `width` tokens per row. row, start, count: [b] int32."""
    positions = start[:, None] + jnp.arange(width)
    frequencies = rope_frequencies(cfg.rope, cfg.heads.H) if cfg.rope else np.zeros(0, np.float32)
    angle = positions[..., None].astype(jnp.float32) * frequencies
    return Span(
        row=row, start=start, count=count, positions=positions, cos=jnp.cos(angle), sin=jnp.sin(angle)
    )


def rotate(x: Array, span: Span, interleaved: bool) -> Array:
    """Rotary embedding of x: [b,T,...,H], in float32."""
    pairs = x.astype(jnp.float32)
    pairs = pairs.reshape(*x.shape[:-1], *((-1, 2) if interleaved else (2, x.shape[-1] // 2)))
    axis = -1 if interleaved else -2
    a, b = pairs.take(0, axis), pairs.take(1, axis)
    per_head = (*span.cos.shape[:2], *(1,) * (x.ndim - 3), -1)
    cos, sin = span.cos.reshape(per_head), span.sin.reshape(per_head)
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis).reshape(x.shape).astype(x.dtype)


def project(x: Array, w: Attention) -> tuple[Array, Array, Array]:
    """x: [b,T,D] -> q [b,T,k,G,H], k and v [b,T,k,H].

    Devices that share a key/value head each hold a part of its columns, and get the rest by one all-gather.
    """
    q = einsum("bTD,kgHD->bTkgH", x, w.q)
    k = einsum("bTD,khD->bTkh", x, w.k)
    v = einsum("bTD,khD->bTkh", x, w.v)
    if lax.axis_size(SLOTS) == 1:
        # Else XLA applies rotate's reshape to the weights instead, in every step: a copy of q per layer.
        return lax.optimization_barrier((q, k, v))
    *bTk, g, H = q.shape
    columns = jnp.concatenate([q.reshape(*bTk, g * H), k, v], -1)
    columns = lax.all_gather(columns, SLOTS, axis=3)  # [b,T,k,slots,g*H+2*h]
    q, k, v = jnp.split(columns, [g * H, g * H + k.shape[-1]], -1)
    return q.reshape(*bTk, -1, H), k.reshape(*bTk, H), v.reshape(*bTk, H)


def merge_slots(o: Array, lse: Array) -> tuple[Array, Array]:
    """Attention over this device's slots -> over all, for this device's queries: [b,T,k,G,H] -> [b,T,k,g,H].

    One all-to-all of the partial results; each device merges the queries whose output columns it holds.
    """
    slots = lax.axis_size(SLOTS)
    if slots == 1:
        return o, lse
    parts = jnp.concatenate([o, lse[..., None]], -1)
    parts = parts.reshape(*o.shape[:3], slots, -1, parts.shape[-1])
    parts = lax.all_to_all(parts, SLOTS, 3, 0)  # [slots,b,T,k,g,H+1]
    return merge(*((part[..., :-1], part[..., -1]) for part in parts))


def local_slots(n: Array) -> Array:
    """How many of a head's first n slots are on this device, and so the place here of the first one after."""
    slots = lax.axis_size(SLOTS)
    return (n + slots - 1 - lax.axis_index(SLOTS)) // slots


def attend_span(q: Array, new: KV, span: Span, mask: Full | Chunked):
    """Attention among the span's own tokens, by this device's queries.

    q: [b,T,k,G,H], new: [b,k,T,C] -> (o [b,T,k,g,H], lse [b,T,k,g]).
    """
    g = q.shape[3] // lax.axis_size(SLOTS)
    own = lax.dynamic_slice_in_dim(q, lax.axis_index(SLOTS) * g, g, 3)
    return attend_causal(own, new, mask.first(span.positions))


def attend_cache(q: Array, new: KV, kv: KV, span: Span, mask: Full | Chunked):
    """Write a span into the cache, and attend to what the cache holds: -> (as `attend_span`, KV).

    One token sees itself there, too: a kernel writes it, then reads one cache that holds all there is to see.
    Several see there only what came before them.
    """
    T, place = q.shape[1], places(span, mask, kv.values.shape[2])
    in_ring = span.start - mask.first(span.start) if mask.ring else span.start
    length = local_slots(jnp.where(span.count > 0, in_ring + (T == 1), 0))  # without a token: nothing
    if T == 1:
        part, kv = ragged_decode(q, new, kv, length, place[:, 0], row=span.row)
        return merge_slots(*part), kv
    # A ring is read as it was: the span may overwrite what its first tokens see. Any other cache is read as
    # it will be, which spares XLA a copy of it.
    written = write(kv, new, place, span.row, T // lax.axis_size(SLOTS) + 1, ring=mask.ring is not None)
    sees = mask.first(span.positions) < span.start[:, None] if mask.ring else None
    past = attend_cached(q, kv if mask.ring else written, length, sees=sees, row=span.row)
    return merge_slots(*past), written


def places(span: Span, mask: Full | Chunked, capacity: int) -> Array:
    """Where each of a span's tokens goes among this device's slots, [b,T]; `capacity` if nowhere."""
    slots = lax.axis_size(SLOTS)
    keep = jnp.arange(span.positions.shape[1]) < span.count[:, None]
    slot = span.positions
    if mask.ring:  # it keeps the last ones; older ones of this span would land in the same slots
        keep &= slot >= (span.start + span.count)[:, None] - mask.ring
        slot = slot % mask.ring
    return jnp.where(keep & (slot % slots == lax.axis_index(SLOTS)), slot // slots, capacity)


def cached_form(k: Array, v: Array, kv: KV | None) -> KV:
    """A span's keys and values, [b,T,k,H] each, as the cache, if there is one, holds them: [b,k,T,C]."""
    new = jnp.stack([k, v], 3).swapaxes(1, 2)  # bkT2H
    scale, dtype = None, new.dtype if kv is None else kv.values.dtype
    if dtype == jnp.int8:
        quantized = quantize(new, (4,), kv.scale.dtype)
        new, scale = quantized.values, quantized.scale.swapaxes(2, 3)
    return KV(new.reshape(*new.shape[:3], -1).astype(dtype), scale)


@jax.named_scope("attention")
def attention(x: Array, w: Attention, kv: KV | None, span: Span, kind: LayerKind):
    """x: [b,T,D] -> ([b,T,D], the layer's cache with the span in it; None without one).

    A token attends to what the cache holds and, if its span has several, to those before it there, as the
    cache will hold them: so it makes no difference in what prefill chunks a text is read.
    """
    q, k, v = project(x, w)
    heads = kind.attention
    if heads.qk_norm:
        q, k = normalize(q, w.q_norm, heads.qk_norm), normalize(k, w.k_norm, heads.qk_norm)
    if kind.rope:
        q, k = rotate(q, span, kind.rope.interleaved), rotate(k, span, kind.rope.interleaved)
    if heads.query_scale:
        scale, floor = heads.query_scale.scale, heads.query_scale.floor
        growth = 1 + scale * jnp.log1p(jnp.floor((span.positions + 1) / floor))
        q = (q * growth[:, :, None, None, None]).astype(q.dtype)
    new, parts = cached_form(k, v, kv), []
    if kv is not None:
        past, kv = attend_cache(q, new, kv, span, kind.mask)
        parts.append(past)
    if not parts or x.shape[1] > 1:
        parts.append(attend_span(q, new, span, kind.mask))
    o, _ = merge(*parts)
    o = o.astype(x.dtype)
    return lax.psum(einsum("bTkgH,DkgH->bTD", o, w.o), MODEL), kv  # k, g


@jax.named_scope("mlp")
def mlp(x: Array, w: MLP) -> Array:
    """x: [b,T,D] -> [b,T,D], this device's part of the sum over f."""
    h = jax.nn.silu(einsum("bTD,fD->bTf", x, w.gate)) * einsum("bTD,fD->bTf", x, w.up)
    return einsum("bTf,Df->bTD", h, w.down)


@jax.named_scope("experts")
def experts(x: Array, w: MoE, span: Span, kind: Experts) -> Array:
    """Each token's A best experts. x: [b,T,D] -> [b,T,D], this device's part of the sum over e and m.

    Every device sees all tokens of its rows and has room for all of them on any expert: none is ever dropped.
    Padding goes to no expert.
    """
    x32, router = x.astype(jnp.float32), w.router.astype(jnp.float32)
    logits = jnp.einsum("bTD,DE->bTE", x32, router, precision="highest")  # a rounded one may choose another
    best, chosen = lax.top_k(logits, kind.A)  # bTA
    score = jnp.exp(best - jax.nn.logsumexp(logits, -1, keepdims=True))
    score = jax.nn.sigmoid(best) if kind.router.score == "sigmoid" else score
    score = score / jnp.sum(score, -1, keepdims=True) if kind.router.normalized else score
    n_local = kind.E // lax.axis_size(EXPERT)
    local = chosen - lax.axis_index(EXPERT) * n_local
    real = jnp.arange(x.shape[1]) < span.count[:, None]
    local = jnp.where((local >= 0) & (local < n_local) & real[..., None], local, n_local)
    rows = (array.reshape(-1, array.shape[-1]) for array in (x, local, score))
    y = expert_mlp(*rows, w.gate, w.up, w.down, scales=kind.router.scales)
    return y.astype(x.dtype).reshape(x.shape)


@jax.named_scope("feed_forward")
def feed_forward(x: Array, w: MLP | MoE, span: Span, kind: Gated | Experts) -> Array:
    """x: [b,T,D] -> [b,T,D]. Routed and shared experts are added before the one sum over devices."""
    if isinstance(kind, Gated):
        y = mlp(x, w)
    else:
        y = experts(x, w, span, kind) if w.shared is None else mlp(x, w.shared) + experts(x, w, span, kind)
    return lax.psum(y, MODEL)  # f; or f, e, m


@jax.named_scope("embed")
def embed(tokens: Array, w: Weights) -> Array:
    """tokens: [b,T] -> [b,T,D]. Each device looks up the tokens of its vocabulary shard."""
    table, scale = values_and_scale(w.embed)
    row = tokens - lax.axis_index(MODEL) * table.shape[0]
    here = (row >= 0) & (row < table.shape[0])
    x = table[row] if scale is None else take_rows(table, row) * scale[row][..., None]
    return lax.psum(jnp.where(here[..., None], x, 0), MODEL).astype(w.norm.dtype)  # v


@jax.named_scope("unembed")
def unembed(x: Array, w: Weights, cfg: Config) -> Array:
    """x: [b,T,D] -> logits [b,T,v] float32 of this device's vocabulary shard; padding has -inf."""
    x = normalize(x, w.norm, cfg.norm)
    matrix = w.embed if w.unembed is None else w.unembed
    logits = einsum("bTD,vD->bTv", x, matrix, jnp.float32)
    return jnp.where(vocabulary_shard(logits) < cfg.V, logits, -jnp.inf)


def vocabulary_shard(logits: Array) -> Array:
    """The token ids, [v] int32, that this device's logits stand for."""
    return lax.axis_index(MODEL) * logits.shape[-1] + jnp.arange(logits.shape[-1])


def decoder(tokens: Array, w: Weights, cache: list | None, span: Span, cfg: Config):
    """tokens: [b,T] -> (hidden states [b,T,D] before the last norm, the layers' caches)."""
    cache = cache or [None] * len(cfg.layers)
    return decoder_layers(embed(tokens, w), w.layers, cache, span, cfg.layers, cfg.norm)


def decoder_layers(x: Array, weights: list[Layer], cache: list, span: Span, kinds, norm: Norm):
    """x: [b,T,D] -> (the same after these layers, their caches)."""
    caches = []
    for w, kind, kv in zip(weights, kinds, cache, strict=True):
        x, kv = decoder_layer(x, w, kv, span, kind, norm)
        caches.append(kv)
    return x, caches


@partial(jax.jit, static_argnames=("kind", "norm"))  # traced once for all layers of a kind
def decoder_layer(x: Array, w: Layer, kv: KV | None, span: Span, kind: LayerKind, norm: Norm):
    """x: [b,T,D] -> ([b,T,D], the layer's cache with the span in it, or None)."""
    y, kv = attention(normalize(x, w.attention_norm, norm), w.attention, kv, span, kind)
    x = x + y
    y = feed_forward(normalize(x, w.feed_forward_norm, norm), w.feed_forward, span, kind.feed_forward)
    return x + y, kv


def row_of(arrays, row: Array):
    """One row of a tree of arrays [b,...], as a batch of one."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, row, 1), arrays)


def with_row(arrays, row: Array, new):
    """The arrays with `new`, a batch of one, in the place of this row."""
    return jax.tree.map(lambda x, new: lax.dynamic_update_slice_in_dim(x, new, row, 0), arrays, new)


# ------------------------------------------------------------------------------------------------- sampling


@_pytree
class Sampling:
    """How each row chooses its next token: [B] each, or None for what no row asks for. By default greedy.

    In the order in which they apply: repetition_penalty divides the positive logits of tokens that are in the
    text, and multiplies the negative ones. temperature divides all logits; 0 takes the likeliest. top_k keeps
    the likeliest k, 0 all. top_p keeps the likeliest that hold this much probability; min_p those at least
    this much as likely as the likeliest. seed: uint32, with the position makes the draw.
    """

    seed: Array | None = None
    temperature: Array | None = None
    top_k: Array | None = None
    top_p: Array | None = None
    min_p: Array | None = None
    repetition_penalty: Array | None = None


NEUTRAL = Sampling(  # what asks for nothing, and the types
    seed=np.uint32(0),
    temperature=np.float32(0),
    top_k=np.int32(0),
    top_p=np.float32(1),
    min_p=np.float32(0),
    repetition_penalty=np.float32(1),
)


def argmax(logits: Array) -> Array:
    """[...,v] -> token ids [...]; the smallest id among equals."""
    best = lax.pmax(jnp.max(logits, -1, keepdims=True), MODEL)
    ids = jnp.where(logits == best, vocabulary_shard(logits), jnp.iinfo(jnp.int32).max)
    return lax.pmin(jnp.min(ids, -1), MODEL)


def log_normalizer(logits: Array) -> Array:
    """[...,v] -> log of the sum of exp(logits) over the whole vocabulary, [...,1]."""
    peak = lax.pmax(jnp.max(logits, -1, keepdims=True), MODEL)
    return peak + jnp.log(lax.psum(jnp.sum(jnp.exp(logits - peak), -1, keepdims=True), MODEL))


def logprob(logits: Array, tokens: Array) -> Array:
    """Natural log of the probability of each token: logits [...,v], tokens [...] -> [...]."""
    chosen = jnp.where(vocabulary_shard(logits) == tokens[..., None], logits, 0)
    return lax.psum(jnp.sum(chosen, -1), MODEL) - log_normalizer(logits)[..., 0]


def top(x: Array, mass: Array, target: Array) -> Array:
    """Which entries of each row of x to keep, [b,v] bool: the fewest and largest whose masses reach `target`.

    x, mass: [b,v], target: [b]. Equal entries go together. Exact, without moving or sorting the vocabulary: a
    search over the 32 bits of a float, in 8 rounds in which devices exchange 15 sums.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    order = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))  # sorts like the floats
    target = jnp.maximum(target, 1e-30)[:, None]
    least = jnp.zeros((x.shape[0], 1), jnp.uint32)
    for shift in range(28, -1, -4):

        def mass_from(digit: int, least=least, shift=shift) -> Array:
            return jnp.sum(jnp.where(order >= least + jnp.uint32(digit << shift), mass, 0), -1)

        masses = lax.psum(jnp.stack([mass_from(digit) for digit in range(1, 16)], -1), MODEL)
        digit = jnp.sum(masses >= target, -1, keepdims=True, dtype=jnp.uint32)
        least = least + (digit << shift)
    return order >= least


def penalize(logits: Array, penalty: Array, text: Array, length: Array) -> Array:
    """Make the tokens of text [b,:length[b]] less likely: logits [b,v], penalty [b]. arXiv 1909.05858."""
    ids = text - lax.axis_index(MODEL) * logits.shape[-1]
    here = (ids >= 0) & (jnp.arange(text.shape[1]) < length[:, None])
    rows, ids = jnp.arange(text.shape[0])[:, None], jnp.where(here, ids, logits.shape[-1])
    present = jnp.zeros(logits.shape, bool).at[rows, ids].set(True, mode="drop")
    penalty = penalty[:, None]
    return jnp.where(present, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


@jax.named_scope("sample")
def sample(logits: Array, how: Sampling, text: Array, length: Array, cfg: Config) -> Array:
    """Choose a token to follow text [b,:length[b]] in each row: logits [b,v] -> [b] int32.

    A row's draw depends on its seed, its length and its logits alone, not on its neighbours or the mesh.
    """
    if how.repetition_penalty is not None:
        logits = penalize(logits, how.repetition_penalty, text, length)
    if how.temperature is None:
        return argmax(logits)
    drawn = how.temperature[:, None] > 0
    logits = logits / jnp.where(drawn, jnp.maximum(how.temperature[:, None], 1e-6), 1)  # less may overflow
    if how.top_k is not None:
        target = jnp.where(how.top_k > 0, how.top_k, jnp.inf)
        logits = jnp.where(top(logits, jnp.ones_like(logits), target), logits, -jnp.inf)
    if how.top_p is not None:
        probability = jnp.exp(logits - log_normalizer(logits))
        target = jnp.where(how.top_p < 1, how.top_p, jnp.inf)
        logits = jnp.where(top(logits, probability, target), logits, -jnp.inf)
    if how.min_p is not None:
        peak = lax.pmax(jnp.max(logits, -1, keepdims=True), MODEL)
        logits = jnp.where(logits < peak + jnp.log(how.min_p)[:, None], -jnp.inf, logits)

    def noise(seed: Array, position: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (cfg.V,))

    # The likeliest after adding Gumbel noise is a draw. Source: arXiv 1411.0030.
    ids = jnp.minimum(vocabulary_shard(logits), cfg.V - 1)
    return argmax(logits + jnp.where(drawn, jax.vmap(noise)(how.seed, length)[:, ids], 0))


# --------------------------------------------------------------------------------- forward, prefill, decode


def on_each_device(mesh: Mesh, T: int, in_specs, out_specs):
    """shard_map, which checks that every psum is there. Not on TPUs if LANES divides T: a library's kernel
    attends then, which does not declare over which axes its result varies.
    """
    check_vma = T % LANES != 0 or not on_tpu(mesh)
    return partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


@partial(jax.jit, static_argnames=("cfg", "mesh"))
def forward(tokens: Array, weights: Weights, *, cfg: Config, mesh: Mesh) -> Array:
    """Logits of every position, without a cache: tokens [B,T] int32 -> [B,T,V] float32.

    For short sequences, and on a CPU for training: the kernels of other devices have no derivative.
    """
    layouts = P("data"), specs(weight_infos(cfg), weights)

    @on_each_device(mesh, tokens.shape[1], layouts, P("data", None, MODEL))
    def on_device(tokens: Array, w: Weights):
        start = jnp.zeros_like(tokens[:, 0])
        span = span_at(start, start + tokens.shape[1], tokens.shape[1], cfg)
        return unembed(decoder(tokens, w, None, span, cfg)[0], w, cfg)

    return on_device(tokens, weights)[..., : cfg.V]


def cache_specs(cfg: Config, cache: Cache) -> Cache:
    return specs(cache_infos(cfg, 0, 0, cache.layers[0].values.dtype), cache)


@partial(jax.jit, static_argnames=("cfg", "mesh"), donate_argnames="cache")
def begin(rows, text, length, source, cache: Cache, *, cfg: Config, mesh: Mesh) -> Cache:
    """Give rows another text, of which some has been read. The cache is donated.

    rows: [n] int32, as many on each data shard, counted there from 0; -1 for none. text: [n,S] int32.
    length: [n] int32, how many of its tokens count as read: by row source[n] of the same shard, whose layers
    are copied, or, if source is None, by the row itself.
    """
    layout = cache_specs(cfg, cache)

    @partial(jax.shard_map, mesh=mesh, in_specs=(*(P("data"),) * 4, layout), out_specs=layout)
    def on_device(rows: Array, text: Array, length: Array, source: Array | None, cache: Cache):
        layers = cache.layers
        for i in range(0 if source is None else rows.size):
            to = jnp.maximum(rows[i], 0)
            layers = with_row(layers, to, row_of(layers, jnp.where(rows[i] < 0, to, source[i])))
        at = jnp.where(rows < 0, cache.length.size, rows)
        tokens = cache.tokens.at[at].set(text, mode="drop")
        return Cache(layers=layers, tokens=tokens, length=cache.length.at[at].set(length, mode="drop"))

    return on_device(rows, text, length, source, cache)


def text_at(text: Array, positions: Array) -> Array:
    """The tokens of text [b,S] at positions [b,T]; beyond its end, any."""
    return jnp.take_along_axis(text, positions, 1, mode="clip")


def chunk_at(rows: Array | None, count: Array, width: int, cache: Cache, cfg: Config):
    """The next `width` tokens of these rows, see `prefill`: -> (tokens [b,T], Span)."""
    at = slice(None) if rows is None else rows
    span = span_at(cache.length[at], count, width, cfg, rows)
    return text_at(cache.tokens[at], span.positions), span


def after_chunk(x: Array, span: Span, score: bool, w: Weights, cache: Cache, cfg: Config):
    """x: [b,T,D], of a chunk that has been read -> (its scores [b,T] or None, see `prefill`, all lengths)."""
    at = slice(None) if span.row is None else span.row
    following = text_at(cache.tokens[at], span.positions + 1)

    def score_row(row: tuple[Array, Array]) -> Array:
        return logprob(unembed(row[0][None], w, cfg)[0], row[1])

    # Row by row: the logits of a whole batch would not fit.
    scores = lax.map(score_row, (x, following)) if score else None
    return scores, cache.length.at[at].add(span.count)


@partial(jax.jit, static_argnames=("width", "score", "cfg", "mesh"), donate_argnames="cache")
def prefill(
    rows, count, weights: Weights, cache: Cache, *, width: int, score: bool = False, cfg: Config, mesh: Mesh
) -> tuple[Array | None, Cache]:
    """Read more of the text of some rows: -> (scores, Cache). The cache is donated.

    rows: [n] int32, as in `begin` but each another one, or None: all. count: [n] int32, how many tokens of
    each, at most `width`. scores: [n,width], if asked for: the log-probability of the token after each that
    was read, by the model's own logits.
    """
    cache_layout = cache_specs(cfg, cache)
    layouts = P("data"), P("data"), specs(weight_infos(cfg), weights), cache_layout

    @on_each_device(mesh, width, layouts, (P("data"), cache_layout))
    def on_device(rows: Array | None, count: Array, w: Weights, cache: Cache):
        tokens, span = chunk_at(rows, count, width, cache, cfg)
        x, layers = decoder(tokens, w, cache.layers, span, cfg)
        scores, length = after_chunk(x, span, score, w, cache, cfg)
        return scores, Cache(layers=layers, tokens=cache.tokens, length=length)

    return on_device(rows, count, weights, cache)


@_pytree
class Output:
    """What a step chose in each row.

    tokens: [B,T], of which row b has the first count[b]. logprobs: [B,T], of each, by the model's own logits.
    drafted: [B], how many draft tokens were looked at; count - 1 of them were accepted.
    """

    tokens: Array
    logprobs: Array
    count: Array
    drafted: Array


def room(length: Array, cfg: Config) -> Array:
    """How many tokens rows of this length can read and still take back, [b]."""
    return functools.reduce(jnp.minimum, [mask.room(length) for mask in cfg.masks])


def accepted(tokens: Array, chosen: Array, count: Array) -> Array:
    """How many of the tokens [b,T] that were read are right: the first, and drafts that were then chosen.

    chosen: [b,T], after each. count: [b], how many were read.
    """
    right = (tokens[:, 1:] == chosen[:, :-1]) & (jnp.arange(1, tokens.shape[1]) < count[:, None])
    return jnp.minimum(count, 1 + jnp.sum(jnp.cumprod(right, 1, dtype=jnp.int32), 1))


def step_at(count: Array, drafts: Array | None, cache: Cache, cfg: Config):
    """Each row's next token, and drafts of those after it, see `decode_step`: -> (tokens [b,T], Span)."""
    T = 1 if drafts is None else 1 + drafts.shape[1]
    span = span_at(cache.length, jnp.minimum(count, room(cache.length, cfg)), T, cfg)
    tokens = text_at(cache.tokens, span.positions[:, :1])
    return (tokens if drafts is None else jnp.concatenate([tokens, drafts], 1)), span


def after_step(x: Array, tokens: Array, span: Span, sampling: Sampling, w: Weights, cache: Cache, cfg):
    """x: [b,T,D], of tokens that have been read -> (Output, the rows' texts, their lengths)."""
    T, rows = tokens.shape[1], jnp.arange(tokens.shape[0])[:, None]
    logits = unembed(x, w, cfg)  # bTv
    text = cache.tokens.at[rows, span.positions].set(tokens, mode="drop")
    each_token = jax.tree.map(partial(jnp.repeat, repeats=T, axis=0), (sampling, text))
    after = span.positions.reshape(-1) + 1
    chosen = sample(logits.reshape(-1, logits.shape[-1]), *each_token, after, cfg).reshape(tokens.shape)

    kept = accepted(tokens, chosen, span.count)
    at = jnp.where(jnp.arange(T) < kept[:, None], span.positions + 1, text.shape[1])
    text = cache.tokens.at[rows, at].set(chosen, mode="drop")
    drafted = jnp.maximum(span.count - 1, 0)
    output = Output(tokens=chosen, logprobs=logprob(logits, chosen), count=kept, drafted=drafted)
    return output, text, cache.length + kept


@partial(jax.jit, static_argnames=("cfg", "mesh"), donate_argnames="cache")
def decode_step(
    count, drafts, sampling: Sampling, weights: Weights, cache: Cache, *, cfg: Config, mesh: Mesh
) -> tuple[Output, Cache]:
    """Read each row's next token and choose the one after it: -> (Output, Cache). The cache is donated.

    count: [B] int32: 0 leaves a row as it is, 1 reads its next token, 1 + n also the first n drafts.
    drafts: [B,T-1] int32, tokens that may come after the next, or None. The right ones are accepted, so a
    step may choose several; they are those that as many steps without drafts would. A row must not grow
    beyond the cache's max_len: what does is not kept.
    """
    cache_layout = cache_specs(cfg, cache)
    layouts = *(P("data"),) * 3, specs(weight_infos(cfg), weights), cache_layout

    @on_each_device(mesh, 1 if drafts is None else 1 + drafts.shape[1], layouts, (P("data"), cache_layout))
    def on_device(count: Array, drafts: Array | None, sampling: Sampling, w: Weights, cache: Cache):
        tokens, span = step_at(count, drafts, cache, cfg)
        x, layers = decoder(tokens, w, cache.layers, span, cfg)
        output, text, length = after_step(x, tokens, span, sampling, w, cache, cfg)
        return output, Cache(layers=layers, tokens=text, length=length)

    return on_device(count, drafts, sampling, weights, cache)
