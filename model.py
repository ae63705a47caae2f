"""Llama as pure functions over trees of weights: tokens in, logits out.

These lines make a small Llama with random weights and run it:

    import jax
    from model import MLP, Attention, Config, LayerKind, Norm, Rope
    from model import decode_step, forward, init_cache, init_weights, prefill
    from sharding.mesh import make_mesh

    llama = LayerKind(Attention(K=2, G=2, H=16), MLP(F=128), Norm(eps=1e-5), rope=Rope(theta=1e4, width=16))
    cfg = Config(D=64, V=512, layers=2 * (llama,), norm=llama.norm, max_positions=2048)
    mesh = make_mesh(cfg, tensor=1)  # tensor=8 divides the model among eight devices
    weights = init_weights(jax.random.key(0), cfg, mesh)
    prompt = jax.numpy.array([[1, 2, 3]])
    logits = forward(prompt, weights, cfg=cfg, mesh=mesh)  # [1,3,512]

    cache = init_cache(cfg, mesh, batch=1, max_len=128, dtype="float32")
    last, cache = prefill(prompt, weights, cache, cfg=cfg, mesh=mesh)  # [1,512]: what follows the prompt
    last, cache = decode_step(last.argmax(-1), weights, cache, cfg=cfg, mesh=mesh)  # what follows that token

The file reads from the top down: `forward`, `prefill` and `decode_step`; a layer; attention; feed-forward
networks; `embed`, `layers` and `unembed`, in which these run on all devices; norms and positions; masks. Then
follow what a family of models must provide, the Config of a model, and the declarations of its weights.
checkpoints/loading.py loads published weights, serving/ answers requests.

Letters, one per dimension, are used in shapes, einsums and comments. Inside a shard_map an uppercase letter
means that the whole dimension is on this device, a lowercase letter that this device holds its shard of the
dimension. These mesh axes split it:

    B  rows of the batch      b: ROWS     E  experts                           e: EXPERT
    T  query positions                    A  experts active per token
    S  key positions, slots   s: SLOTS    M  feed-forward width of an expert   m: TENSOR
    K  key/value heads        k: HEADS    F  feed-forward width                f: MODEL
    G  query heads per K      g: SLOTS    V  vocabulary                        v: MODEL
    H  head width             h: SLOTS    D  model width                       d: MODEL (see below)
    Z  K, in the cache        z: HEADS
    U  width of a value: H, but for latent attention
    C  columns of a slot of the cache: a key beside its value, 2H; above 128 rounded up to a multiple of 128

So `einsum("bTf,Df->bTD", x, w.down)` says what each device has; and because it sums over f, a lowercase
letter, a `psum` must follow. Zeros fill a dimension up, so that all devices have shards of the same size.

MODEL are the axes that divide one copy of the model. For attention they are HEADS x SLOTS, for experts EXPERT
x TENSOR. With 8 key/value heads, 8 devices are HEADS 8 x SLOTS 1, and each has one head. 16 devices are HEADS
8 x SLOTS 2: two share a head, and each of them has half of its queries g, half of the columns h of its key
and value matrices, and every second slot s of its cache. sharding/mesh.py makes the axes, and describes
COPIES of a head, which divide g and z, too.

Outside a shard_map arrays are global: shapes there, [B,T,V], are those of all devices together. Only in the
docstrings of records, such as Cache, shapes are always those on one device.

`einsum`, `products` and `psum` are `jnp.einsum`, several einsums of one array, and `lax.psum`; weights may be
quantized. In steps of many tokens of dense models on TPUs each device has its share d of the residual
stream's columns, and sums over devices hide behind products. The layers are the same functions then, of
weights that sharding/collective_matmul.py has wrapped, and for which these three do more.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ops.attention import merge
from ops.grouped_matmul import expert_mlp
from ops.kv_cache import KV, SlotLayout, as_cached, key_beside_value, kv_owners
from ops.matmul import take_rows
from ops.tpu import declares_vma
from quantize import Format, QuantizedArray, values_and_scale
from ragged_attention import attend_cached, attend_causal, ragged_decode, sees_by_query, write
from sharding.arrays import (
    ArrayInfo,
    abstract,
    declared,
    declared_bias,
    declared_norm,
    infos_of,
    pytree,
    random_arrays,
    sizes_of,
    specs,
    with_norms,
    zeros,
)
from sharding.collective_matmul import (
    BY_COLUMNS,
    Ring,
    by_columns,
    column_mean,
    column_ring,
    einsum,
    products,
    psum,
)
from sharding.mesh import EXPERT, MODEL, ROWS, SLOTS, TENSOR, vocabulary_shard
from sharding.slots import merge_slots, slot_mapping, visible_slots, whole_heads

# ---------------------------------------------------------------------------------- forward, prefill, decode


@partial(jax.jit, static_argnames=("cfg", "mesh", "remat"))
def forward(tokens: Array, weights: Weights, *, cfg: Config, mesh: Mesh, remat: bool = False) -> Array:
    """Logits of every position, without a cache: tokens [B,T] int32 -> [B,T,V] float32.

    It attends to all tokens at once, so it is for short texts. It can be differentiated on CPUs; the kernels
    of other devices have no derivative. remat keeps only the input of each layer for the derivative and
    computes the rest again (gradient checkpointing).
    """
    start = jnp.zeros_like(tokens[:, 0])
    chunk = chunk_at(start, start + tokens.shape[1], tokens.shape[1])  # all T tokens are valid
    x, chunk = embed(tokens, chunk, weights, cfg=cfg, mesh=mesh)
    x, _ = layers(x, weights.layers, None, chunk, kinds=cfg.layers, mesh=mesh, remat=remat)
    return unembed(x, weights, cfg=cfg, mesh=mesh)[..., : cfg.V]


@partial(jax.jit, static_argnames=("cfg", "mesh"), donate_argnames="cache")
def prefill(
    tokens: Array, weights: Weights, cache: Cache, count: Array | None = None, *, cfg: Config, mesh: Mesh
) -> tuple[Array, Cache]:
    """Read tokens [B,T] int32: -> (logits [B,V] float32 of what follows each row's tokens, Cache).

    count: [B] int32, at least 1: how many of a row's tokens are valid, the rest is padding; None: all T.
    A long text may be read in several calls. No row may read more than the cache's max_len tokens, which is
    not checked. The cache is donated: the old one is gone.
    """
    count = jnp.full_like(cache.length, tokens.shape[1]) if count is None else count
    return read_tokens(tokens, count, weights, cache, cfg, mesh)


@partial(jax.jit, static_argnames=("cfg", "mesh"), donate_argnames="cache")
def decode_step(
    tokens: Array, weights: Weights, cache: Cache, *, cfg: Config, mesh: Mesh
) -> tuple[Array, Cache]:
    """Read one token of each row, [B] int32: -> (logits [B,V] float32 of the next one, Cache).

    No row may read more than the cache's max_len tokens, which is not checked. The cache is donated: the old
    one is gone.
    """
    return read_tokens(tokens[:, None], jnp.ones_like(cache.length), weights, cache, cfg, mesh)


def read_tokens(
    tokens: Array, count: Array, weights: Weights, cache: Cache, cfg: Config, mesh: Mesh
) -> tuple[Array, Cache]:
    """What `prefill` and `decode_step` have in common: tokens [B,T] -> (logits [B,V], Cache)."""
    chunk = chunk_at(cache.length, count, tokens.shape[1])
    x, chunk = embed(tokens, chunk, weights, cfg=cfg, mesh=mesh)
    ring = column_ring(cfg, tokens.shape, mesh)
    x, kv = layers(x, weights.layers, cache.layers, chunk, kinds=cfg.layers, mesh=mesh, device_ring=ring)
    last = jnp.take_along_axis(x, count[:, None, None] - 1, 1)  # [B,1,D]
    logits = unembed(last, weights, cfg=cfg, mesh=mesh)[:, 0, : cfg.V]
    return logits, Cache(layers=kv, length=cache.length + count)


@pytree
class Chunk:
    """T consecutive tokens per row, from position `start`; the first `count` are valid, the rest is padding.

    row: [b] int32, for each row of the chunk, which of this device's cache rows it belongs to (serving/ reads
    chunks of some rows); None: row i of the chunk is row i of the cache.
    start, count: [b] int32.
    positions: [b,T] int32.
    inputs: what each layer gets of the tokens beside the residual stream, see Config.layer_inputs: one array
    per layer; inside of a layer its own. None for most models.
    """

    row: Array | None
    start: Array
    count: Array
    positions: Array
    inputs: Any = None

    @property
    def valid(self) -> Array:
        """[b,T] bool: True for tokens, False for padding."""
        return jnp.arange(self.positions.shape[1]) < self.count[:, None]


def chunk_at(start: Array, count: Array, T: int, row: Array | None = None) -> Chunk:
    """The Chunk of T tokens per row. start, count, row: [b] int32."""
    return Chunk(row=row, start=start, count=count, positions=start[:, None] + jnp.arange(T))


# --------------------------------------------------------------------------------------------------- a layer


@partial(jax.jit, static_argnames="kind")  # traced once for all layers of a kind
def decoder_layer(
    x: Array, w: LayerWeights, source: Any, chunk: Chunk, rotation: Rotation | None, kind: LayerKind
) -> tuple[Array, Any, Any]:
    """x: [b,T,D] -> ([b,T,D], the layer's memory with the chunk in it, what the chunk has attended to).

    source: see `AttentionBlock`.
    """
    y = normalize(x, kind.norm, w.attention_norm)
    y, memory, attended = kind.attention(y, w.attention, source, chunk, rotation, kind.mask)
    x = kind.residual(x, y, w.attention_post_norm, chunk)
    y = normalize(x, kind.feed_forward_norm or kind.norm, w.feed_forward_norm)
    with jax.named_scope("feed_forward"):
        y = kind.feed_forward(y, w.feed_forward, chunk)
    residual = kind.feed_forward_residual or kind.residual
    return residual(x, y, w.feed_forward_post_norm, chunk), memory, attended


def normalize(x: Array, norm: Normalization | None, w: Any) -> Array:
    """x: [b,T,D] -> [b,T,D]."""
    return x if norm is None else norm(x, w)


@dataclasses.dataclass(frozen=True)
class Residual:
    """How the output y of attention, or of a feed-forward network, joins the residual stream x: x + y.

    norm: of y, before the sum; None for no norm. Subclasses of families join them in other ways.
    """

    norm: Normalization | None = None

    def __call__(self, x: Array, y: Array, w: Any, chunk: Chunk) -> Array:
        """x, y: [b,T,D] -> [b,T,D]."""
        return x + normalize(y, self.norm, w)

    def declare(self, info: ArrayInfo) -> Any:
        """The declared weights: those of the norm, see `Normalization`."""
        return self.norm and self.norm.declare(info)


def decoder_layers(
    x: Array, weights: list[LayerWeights], memories: list | None, chunk: Chunk,
    kinds: tuple[LayerKind, ...], remat: bool = False,
) -> tuple[Array, Any]:  # fmt: skip
    """x: [b,T,D] -> ([b,T,D] after these layers, their memories with the chunk in them).

    remat: see `forward`.
    """
    ropes = dict.fromkeys(kind.rope for kind in kinds)
    rotations = {rope: rope.rotation(chunk.positions) if rope else None for rope in ropes}
    layer = jax.checkpoint(decoder_layer, static_argnums=5) if remat else decoder_layer
    before: Sequence[Any] = memories or [None] * len(kinds)
    owners = kv_owners(kinds)
    after: list[Any] = []
    attended: list[Any] = []
    for i, (w, memory, kind) in enumerate(zip(weights, before, kinds, strict=True)):
        own = dataclasses.replace(chunk, inputs=chunk.inputs and chunk.inputs[i])
        source = attended[owners[i]] if kind.shares_kv else memory
        x, memory, its_source = layer(x, w, source, own, rotations[kind.rope], kind)
        after.append(memory)
        attended.append(its_source)
    return x, after if memories else None


# ------------------------------------------------------------------------------------------------- attention


@pytree
class KeysValues:
    """What the tokens of a chunk attend to: the new keys and values, which are the chunk's, and a cache.

    new: values [b,k,T,C]. cache: None without a cache. If T is 1, the cache has the token, and `new` is not
    used. The tokens of a longer chunk attend to what was in the cache before, and to `new`, see `attend`.
    """

    new: KV
    cache: KV | None


class SoftmaxAttention(abc.ABC):
    """Attention to the keys and values of a cache: what grouped-query and latent attention have in common.

    K, G: as the letters. A subclass declares at least the weights `o` [D,k,g,U] and `o_bias`, and has the
    three abstract functions, as `Attention` shows. project returns the queries, and keys and values as
    slot_layout (ops/kv_cache.py) says, or None if the layer shares those of another one.
    """

    K: int
    G: int

    @property
    @abc.abstractmethod
    def slot_layout(self) -> SlotLayout: ...

    @abc.abstractmethod
    def project(self, x: Array, w, chunk: Chunk, rotation: Rotation | None) -> tuple[Array, Any]: ...

    @abc.abstractmethod
    def head_outputs(self, o: Array, lse: Array, x: Array, w) -> Array: ...

    @jax.named_scope("attention")
    def __call__(
        self, x: Array, w, source: KV | KeysValues | None, chunk: Chunk, rotation: Rotation | None, mask: Mask
    ) -> tuple[Array, KV | None, KeysValues]:
        """x: [b,T,D] -> ([b,T,D], the layer's cache with the chunk in it, what the chunk has attended to).

        source: the layer's cache before the chunk; None without a cache. Of a layer that shares keys and
        values, what an earlier layer has attended to: such a layer has no cache.

        A token attends to what the cache holds and to the tokens of its chunk up to itself. The chunk's keys
        and values are rounded to the cache's type before anything attends to them, so that the result does
        not depend on where chunks begin.
        """
        q, keys_values = self.project(x, w, chunk, rotation)
        if isinstance(source, KeysValues):
            o, lse = attend(q, source, chunk, mask)
            kv, attended = None, source
        else:
            new = as_cached(keys_values, source, self.slot_layout)  # [b,T,k,2H] -> [b,k,T,C]
            o, lse, kv, attended = write_and_attend(q, new, source, chunk, mask)
        with jax.named_scope("output"):
            o = self.head_outputs(o.astype(x.dtype), lse, x, w)
            y = psum(einsum("bTkgU,DkgU->bTD", o, w.o), MODEL)  # k and g
            return add_bias(y, w.o_bias), kv, attended

    def memory_info(self, mask: Mask, batch: int, max_len: int, dtype) -> KV:
        """The declared cache of `batch` rows of up to `max_len` positions. dtype: float, or int8."""
        layout, slots = self.slot_layout, min(max_len, mask.ring or max_len)
        values: Any = ArrayInfo("bzsC", shape=(batch, self.K, slots, layout.width), dtype=dtype)
        scale: Any = ArrayInfo("bz2s", shape=(batch, self.K, 2, slots), dtype=jnp.bfloat16)
        return KV(values, scale if jnp.dtype(dtype) == jnp.int8 else None, layout)

    @property
    def operations(self) -> dict[str, float]:
        """See AttentionBlock: G queries are multiplied with each key, and G sums get each value."""
        layout = self.slot_layout
        return dict(values=2 * self.G * (layout.key + layout.value_width) / layout.width)


@dataclasses.dataclass(frozen=True)
class Attention(SoftmaxAttention):
    """Grouped-query attention: K heads of keys and values, for G queries each, of width H.

    Source: arXiv 2305.13245.

    qk_norm: the norm of each query and key before RoPE. query_scale: makes the rotated queries [b,T,k,G,H]
    at positions [b,T] larger. bias, output_bias: whether q, k and v, and the output, have a bias. scale: the
    factor of q·k, which the slot layout passes on to the kernels; None for H**-0.5. A family whose attention
    has more weights has subclasses of Attention and AttentionWeights.
    """

    K: int
    G: int
    H: int
    qk_norm: Norm | None = None
    query_scale: Callable[[Array, Array], Array] | None = None
    bias: bool = False
    output_bias: bool = False
    scale: float | None = None

    def project(
        self, x: Array, w: AttentionWeights, chunk: Chunk, rotation: Rotation | None
    ) -> tuple[Array, Array]:
        """x: [b,T,D] -> queries [b,T,k,G,H], and each key beside its value [b,T,k,2H].

        Devices that share a head all get its queries G: each of them attends with all to its own slots.
        """
        q, k, v = whole_heads(*self.projections(x, w))
        if self.qk_norm:
            q, k = self.qk_norm(q, w.q_norm), self.qk_norm(k, w.k_norm)
        if rotation:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if self.query_scale:
            q = self.query_scale(q, chunk.positions)
        return q, jnp.concatenate([k, v], -1)

    @jax.named_scope("qkv")
    def projections(self, x: Array, w: AttentionWeights) -> tuple[Array, Array, Array]:
        """x: [b,T,D] -> this device's part of queries [b,T,k,g,H], keys [b,T,k,h] and values [b,T,k,h]."""
        q, k, v = products(x, ("bTD,kgHD->bTkgH", w.q), ("bTD,khD->bTkh", w.k), ("bTD,khD->bTkh", w.v))
        return add_bias(q, w.q_bias), add_bias(k, w.k_bias), add_bias(v, w.v_bias)

    def head_outputs(self, o: Array, lse: Array, x: Array, w: AttentionWeights) -> Array:
        """What the heads put out, for the output matrix: o, or what a family makes of it: -> [b,T,k,g,U].

        o: [b,T,k,g,U], each query's weighted sum of values. lse: [b,T,k,g] float32, the log of the sum of
        exponentials of its scores. x: [b,T,D], what `project` was given.
        """
        return o

    @property
    def slot_layout(self) -> SlotLayout:
        return key_beside_value(self.H, self.scale)

    @property
    def sharded_widths(self) -> tuple[int, ...]:
        """Widths that must be multiples of the number of devices which share a head, see sharding/mesh.py."""
        return (self.H,)

    def declare(self, prefix: str, D: int, weights: type | None = None) -> Any:
        """The declared weights. prefix: precedes their names in a checkpoint. weights: a subclass's class."""
        absent = dict(q_bias=not self.bias, k_bias=not self.bias, v_bias=not self.bias)
        absent |= dict(o_bias=not self.output_bias)
        infos = infos_of(weights or AttentionWeights, prefix, dict(D=D) | sizes_of(self), absent)
        return with_norms(infos, q_norm=self.qk_norm, k_norm=self.qk_norm)


def add_bias(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias


def write_and_attend(
    q: Array, new: KV, kv: KV | None, chunk: Chunk, mask: Mask
) -> tuple[Array, Array, KV | None, KeysValues]:
    """Write a chunk into the cache, and attend to both: -> (o, lse, the cache, what was attended to).

    q: [b,T,k,G,H]. new: the chunk's keys and values, [b,k,T,C]. kv: the cache before the chunk; None without
    a cache. o, lse: see `attend`.
    """
    if kv is None:
        source = KeysValues(new=new, cache=None)
        return *attend(q, source, chunk, mask), None, source
    T, slots = q.shape[1], slot_mapping(chunk, mask, kv.values.shape[2])
    if T == 1:  # one kernel writes the token and attends to the cache
        length, gap = visible_slots(chunk, mask, has_chunk=True)
        with jax.named_scope("scores"):
            (o, lse), kv = ragged_decode(q, new, kv, length, slots, gap, chunk.row)
        return *merge_slots(o, lse), kv, KeysValues(new=new, cache=kv)
    # A ring is read as it was before the chunk, which may overwrite what its first tokens see. Any other
    # cache is read after it is written, which spares XLA a copy of it.
    with jax.named_scope("cache"):
        is_ring = mask.ring is not None
        most = T // lax.axis_size(SLOTS) + 1  # slots of this device that the chunk can fill
        written = write(kv, new, slots, chunk.row, most, ring=is_ring)
    source = KeysValues(new=new, cache=kv if is_ring else written)
    return *attend(q, source, chunk, mask), written, source


def attend(q: Array, source: KeysValues, chunk: Chunk, mask: Mask) -> tuple[Array, Array]:
    """Attention of a chunk's queries to keys and values: -> (o [b,T,k,g,U], lse [b,T,k,g]).

    q: [b,T,k,G,H]. lse: the log of the sum of exponentials of a query's scores, by which partial results are
    merged. Devices that share a head divide the cache among them by slots, and the chunk by queries.
    """
    if source.cache is None:
        return attend_to_chunk(q, source.new, chunk, mask)
    # Without a ring the cache has the chunk, too; but few kernels let a row's queries see different slots.
    at_once = q.shape[1] == 1 or (mask.ring is None and sees_by_query(q, source.cache))
    length, gap = visible_slots(chunk, mask, has_chunk=at_once)
    with jax.named_scope("scores"):
        o, lse = attend_cached(q, source.cache, length, gap, chunk.row)
    o, lse = merge_slots(o, lse)
    return (o, lse) if at_once else merge((o, lse), attend_to_chunk(q, source.new, chunk, mask))


@jax.named_scope("scores")
def attend_to_chunk(q: Array, new: KV, chunk: Chunk, mask: Mask) -> tuple[Array, Array]:
    """Attention among the chunk's own tokens, by this device's queries: -> (o, lse) as of `attend`."""
    g = q.shape[3] // lax.axis_size(SLOTS)
    own = lax.dynamic_slice_in_dim(q, lax.axis_index(SLOTS) * g, g, 3)
    # Tokens with the same first visible position are a segment, and a query attends within its segment. With
    # a window that position differs from query to query: then the chunk is one segment, and attend_causal
    # applies the window.
    segment = 0 * chunk.positions if mask.window else mask.first_visible(chunk.positions)
    return attend_causal(own, new, segment, mask.window)


# ------------------------------------------------------------------------------------- feed-forward networks


@dataclasses.dataclass(frozen=True)
class SwiGLU:
    """silu(gate) * up. Source: arXiv 2002.05202."""

    def __call__(self, gate: Array, up: Array) -> Array:
        return jax.nn.silu(gate) * up


@dataclasses.dataclass(frozen=True)
class MLP:
    """A gated MLP of width F. Source: arXiv 2002.05202."""

    F: int
    activation: Callable[[Array, Array], Array] = SwiGLU()  # of gate and up

    def __call__(self, x: Array, w: MLPWeights, chunk: Chunk) -> Array:
        """x: [b,T,D] -> [b,T,D]."""
        return psum(self.partial_sum(x, w), MODEL)  # f

    @jax.named_scope("mlp")
    def partial_sum(self, x: Array, w: MLPWeights) -> Array:
        """x: [b,T,D] -> [b,T,D], this device's part of the sum over f."""
        (h,) = products(x, ("bTD,fD->bTf", w.gate), ("bTD,fD->bTf", w.up), then=self.activation)
        return einsum("bTf,Df->bTD", h, w.down)

    def declare(self, prefix: str, D: int) -> MLPWeights:
        """The declared weights. prefix: precedes their names in a checkpoint."""
        return infos_of(MLPWeights, prefix, dict(D=D) | sizes_of(self))


@dataclasses.dataclass(frozen=True)
class MoE:
    """E gated MLPs of width M, of which each token goes through A; beside them `shared`, for all tokens.

    bias: of gate, up and down. Raises ValueError if there are biases and the router scales the input.
    """

    E: int
    A: int
    M: int
    router: Router
    shared: MLP | None
    activation: Callable[[Array, Array], Array] = SwiGLU()  # of gate and up
    bias: bool = False

    def __post_init__(self):
        if self.bias and self.router.scales == "input":
            raise ValueError("experts with biases need a router that scales their output")

    def __call__(self, x: Array, w: MoEWeights, chunk: Chunk) -> Array:
        """x: [b,T,D] -> [b,T,D]. Routed and shared experts are added before the one sum over devices."""
        y = self.routed_experts(x, w, chunk)
        y = y if self.shared is None else self.shared.partial_sum(x, w.shared) + y
        return psum(y, MODEL)  # e and m of the routed experts, f of the shared one

    @jax.named_scope("experts")
    def routed_experts(self, x: Array, w: MoEWeights, chunk: Chunk) -> Array:
        """Each token's A experts. x: [b,T,D] -> [b,T,D], this device's part of the sum over e and m."""
        return self.chosen_experts(x, *self.router(x, w, self.A), w, chunk)

    def chosen_experts(self, x: Array, chosen: Array, score: Array, w: MoEWeights, chunk: Chunk) -> Array:
        """`routed_experts` of x [b,T,D], where a router has chosen: experts [b,T,A], scores [b,T,A].

        Every device sees all tokens of its rows and has room for all of them on any expert, so that no token
        is ever dropped. Padding goes to no expert.
        """
        arrays = x, self.local_experts(chosen, chunk), score
        tokens, experts, scores = (array.reshape(-1, array.shape[-1]) for array in arrays)
        matrices = w.gate, w.up, w.down
        biases = w.gate_bias, w.up_bias, on_first_device(w.down_bias, TENSOR)  # the sum over m adds it once
        y = expert_mlp(tokens, experts, scores, *matrices, biases, self.activation, self.router.scales)
        return y.astype(x.dtype).reshape(x.shape)

    def local_experts(self, chosen: Array, chunk: Chunk) -> Array:
        """Experts [b,T,A] as numbers of this device's own, which has n of them; n for all others."""
        n = self.E // lax.axis_size(EXPERT)
        local = chosen - lax.axis_index(EXPERT) * n
        return jnp.where((local >= 0) & (local < n) & chunk.valid[..., None], local, n)

    def declare(self, prefix: str, D: int, weights: type | None = None) -> Any:
        """The declared weights. prefix: precedes their names in a checkpoint. weights: a subclass's class."""
        shared = self.shared and self.shared.declare(prefix + "shared_expert.", D)
        absent = dict(router_bias=not self.router.bias, logit_bias=not self.router.logit_bias)
        absent |= dict(gate_bias=not self.bias, up_bias=not self.bias, down_bias=not self.bias)
        sizes = dict(D=D) | sizes_of(self)
        return infos_of(weights or MoEWeights, prefix, sizes, absent, shared=shared)


def on_first_device(bias: Array | None, axes: tuple[str, ...]) -> Array | None:
    """The bias on the first device along these mesh axes, zeros on the others: a psum then adds it once."""
    return bias if bias is None else jnp.where(lax.axis_index(axes) == 0, bias, 0)


@dataclasses.dataclass(frozen=True)
class Router:
    """How a token's experts are chosen, and the scores by which their inputs or outputs are multiplied."""

    score: str = "sigmoid"  # or "softmax", over all experts
    normalized: bool = False  # the scores of the chosen experts sum to 1
    scales: str = "input"  # or "output"
    logit_bias: bool = False  # is added to the logits
    bias: bool = False  # is added to the sigmoid scores to choose the experts, but not to weight them
    factor: float = 1  # multiplies the final scores

    def __post_init__(self):
        if self.score not in ("sigmoid", "softmax") or self.scales not in ("input", "output"):
            raise ValueError(
                f"a router of {self.score!r} scores that scale the {self.scales!r} is not supported"
            )
        if self.bias and self.score != "sigmoid":
            raise ValueError("a router's bias is added to sigmoid scores, not to those of a softmax")

    @jax.named_scope("router")
    def __call__(self, x: Array, w: MoEWeights, A: int) -> tuple[Array, Array]:
        """x: [b,T,D] -> each token's A experts [b,T,A] int32, and their scores [b,T,A] float32."""
        logits = self.logits(x, w)
        best, chosen = self.choose(logits, w.router_bias, A)
        if self.score == "sigmoid":
            score = jax.nn.sigmoid(best)
            score = score / jnp.sum(score, -1, keepdims=True) if self.normalized else score
        elif self.normalized:  # the scores of all other experts cancel out
            score = jax.nn.softmax(best)
        else:
            score = jnp.exp(best - jax.nn.logsumexp(logits, -1, keepdims=True))
        return chosen, score * self.factor

    def logits(self, x: Array, w: MoEWeights) -> Array:
        """x: [b,T,D] -> [b,T,E] float32, because rounded logits could choose other experts."""
        x32, router = x.astype(jnp.float32), w.router.astype(jnp.float32)
        return add_bias(jnp.einsum("bTD,DE->bTE", x32, router, precision="highest"), w.logit_bias)

    def choose(self, logits: Array, bias: Array | None, A: int) -> tuple[Array, Array]:
        """logits: [b,T,E] -> those of each token's A best experts [b,T,A], and the experts [b,T,A] int32."""
        if bias is None:
            return lax.top_k(logits, A)
        _, chosen = lax.top_k(self.rank(logits, bias), A)
        return jnp.take_along_axis(logits, chosen, -1), chosen

    def rank(self, logits: Array, bias: Array) -> Array:
        """The numbers by which experts are chosen: [b,T,E] -> [b,T,E]. DeepSeek V3 ranks within groups."""
        return jax.nn.sigmoid(logits) + bias


# ------------------------------------------------------------ embed, layers, unembed: one shard_map for each


@jax.named_scope("embed")
def embed(tokens: Array, chunk: Chunk, weights: Weights, *, cfg: Config, mesh: Mesh) -> tuple[Array, Chunk]:
    """tokens: [B,T] int32 -> ([B,T,D], the chunk with the layers' inputs, if the model has them)."""

    def on_device(tokens: Array, positions: Array, w: Weights) -> tuple[Array, Any]:
        x = psum(look_up(w.embed, tokens), MODEL).astype(float_type(w))  # v
        x = x if cfg.embedding_scale is None else x * jnp.asarray(cfg.embedding_scale, x.dtype)
        x = normalize(x, cfg.embedding_norm, None)
        x = x if cfg.position_embedding is None else cfg.position_embedding(x, w.positions, positions)
        return x, cfg.layer_inputs and cfg.layer_inputs(x, tokens, w.inputs)

    in_specs = P(ROWS), P(ROWS), outer_specs(cfg, weights)
    on_devices = jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=P(ROWS))
    x, inputs = on_devices(tokens, chunk.positions, without_layers(weights))
    return x, dataclasses.replace(chunk, inputs=inputs)


def look_up(table: Array | QuantizedArray, tokens: Array) -> Array:
    """Rows of this device's shard of a table [v,D], and 0 for the tokens of others: [b,T] -> [b,T,D]."""
    size = values_and_scale(table)[0].shape[0]
    index = tokens - lax.axis_index(MODEL) * size
    here = (index >= 0) & (index < size)
    return jnp.where(here[..., None], take_rows(table, index), 0)


def layers(
    x: Array, weights: list[LayerWeights], memories: list | None, chunk: Chunk, *,
    kinds: tuple[LayerKind, ...], mesh: Mesh, device_ring: Ring | None = None, remat: bool = False,
) -> tuple[Array, Any]:  # fmt: skip
    """x: [B,T,D] -> ([B,T,D] after these layers, their memories with the chunk in them).

    memories: one per layer, see Cache, or None: the chunk is all there is. device_ring: the order of the
    devices if the layers run by columns, see sharding/collective_matmul.py. remat: see `forward`. Raises
    ValueError if the numbers of weights, of inputs and of kinds differ, or if a layer shares keys that none
    of these has.
    """
    if len(weights) != len(kinds):
        raise ValueError(f"weights of {len(weights)} layers do not fit a model of {len(kinds)} layers")
    if chunk.inputs and len(chunk.inputs) != len(kinds):
        raise ValueError(f"inputs of {len(chunk.inputs)} layers do not fit {len(kinds)} layers")
    infos = [layer_infos(kind, x.shape[2]) for kind in kinds]
    of_memories, stream = memory_specs(kinds, memories), BY_COLUMNS if device_ring else P(ROWS)

    def on_device(x: Array, weights: list[LayerWeights], memories: list | None, chunk: Chunk):
        if device_ring:
            wrapped, kinds_by_columns = by_columns(infos, weights, kinds, device_ring)
            return decoder_layers(x, wrapped, memories, chunk, kinds_by_columns, remat)
        return decoder_layers(x, weights, memories, chunk, kinds, remat)

    on_devices = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(stream, specs(infos, weights), of_memories, P(ROWS)),
        out_specs=(stream, of_memories),
        check_vma=declares_vma(mesh, x.shape[1]),  # that no psum is missing; jax's splash kernel forbids it
    )
    return on_devices(x, weights, memories, chunk)


def unembed(x: Array, weights: Weights, *, cfg: Config, mesh: Mesh) -> Array:
    """x: [B,T,D] -> logits [B,T,V] float32, of which each device holds its shard of the vocabulary.

    Here V is cfg.V rounded up to a multiple of the devices; the logits of the padding are -inf.
    """
    on_device, in_specs = partial(local_logits, cfg=cfg), (P(ROWS), outer_specs(cfg, weights))
    on_devices = jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=P(ROWS, None, MODEL))
    return on_devices(x, without_layers(weights))


@jax.named_scope("unembed")
def local_logits(x: Array, w: Weights, cfg: Config) -> Array:
    """x: [b,T,D] -> logits [b,T,v] float32 of this device's vocabulary shard; -inf for its padding.

    No sum over devices is needed: D, which the product sums, is whole on every device.
    """
    matrix = w.embed if w.unembed is None else w.unembed
    logits = einsum("bTD,vD->bTv", cfg.norm(x, w.norm), matrix, jnp.float32)
    logits = logits if cfg.logit_scale is None else cfg.logit_scale * logits
    if cfg.logit_softcap is not None:
        logits = cfg.logit_softcap * jnp.tanh(logits / cfg.logit_softcap)
    return jnp.where(vocabulary_shard(logits) < cfg.V, logits, -jnp.inf)


def outer_specs(cfg: Config, weights: Weights) -> Weights:
    """The PartitionSpecs of all weights except the layers'."""
    return specs(outer_infos(cfg), without_layers(weights))


def without_layers(weights: Weights) -> Weights:
    """The same weights with an empty list of layers."""
    return dataclasses.replace(weights, layers=[])


def float_type(weights: Weights) -> jnp.dtype:
    """The type of the model's activations: that of the last norm's weights, which are never quantized."""
    return jax.tree.leaves(weights.norm)[0].dtype


def memory_specs(kinds: tuple[LayerKind, ...], memories: list | None) -> list | None:
    """The PartitionSpecs of the layers' memories."""
    if memories is None:
        return None
    # The sizes do not matter here: specs depend on the letters alone.
    infos = [x and memory_info(kind, 0, 0, x.dtype) for kind, x in zip(kinds, memories, strict=True)]
    return specs(infos, memories)


# --------------------------------------------------------------------------------------- norms and positions


@dataclasses.dataclass(frozen=True)
class Norm:
    """Division by the root mean square, times a weight. Source: arXiv 1910.07467.

    offset: None: the quotient is rounded before it is multiplied by the weight. A number, even 0: it is added
    to the weight, and only the product is rounded.
    """

    eps: float
    weight: bool = True
    offset: float | None = None

    def __call__(self, x: Array, w: Array | None, mean: Callable[[Array], Array] = column_mean) -> Array:
        """x: [...,D] -> [...,D] in x's dtype. mean: over all D, also if a device has some of the columns."""
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(mean(y * y) + self.eps)
        if w is None:
            return y.astype(x.dtype)
        if self.offset is None:
            return y.astype(x.dtype) * w
        return (y * (self.offset + w.astype(jnp.float32))).astype(x.dtype)

    def declare(self, info: ArrayInfo) -> ArrayInfo | None:
        """The declaration of the norm's weights: info, one factor per column; None if it has no weights."""
        return info if self.weight else None


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding of the first `width` columns of a head. Source: arXiv 2104.09864.

    scaling: (frequencies, theta) -> frequencies, one of families/rope_scaling.py.
    interleaved: the pairs that are rotated are neighbors (2i, 2i+1), not halves (i, i + width/2).
    magnitude: the factor of what is rotated.
    """

    theta: float
    width: int
    scaling: Callable[[np.ndarray, float], np.ndarray] | None = None
    interleaved: bool = False
    magnitude: float = 1

    @property
    def frequencies(self) -> np.ndarray:
        """Radians per position, [width/2] float32. Source: transformers modeling_rope_utils.py."""
        exponent = np.arange(0, self.width, 2, dtype=np.float32) / np.float32(self.width)
        frequencies = 1 / np.float32(self.theta) ** exponent
        return self.scaling(frequencies, self.theta) if self.scaling else frequencies

    def rotation(self, positions: Array) -> Rotation:
        """positions: [b,T] -> the rotation of queries and keys there."""
        angle = positions[..., None].astype(jnp.float32) * self.frequencies
        return Rotation(self.magnitude * jnp.cos(angle), self.magnitude * jnp.sin(angle), self.interleaved)


@partial(jax.tree_util.register_dataclass, data_fields=["cos", "sin"], meta_fields=["interleaved"])
@dataclasses.dataclass(frozen=True)
class Rotation:
    """The cosine and sine of each position's angles, [b,T,width/2] float32 each. interleaved: see Rope."""

    cos: Array
    sin: Array
    interleaved: bool


@jax.named_scope("rope")
def rotate(x: Array, rotation: Rotation) -> Array:
    """Apply RoPE to x [b,T,...,H], in float32. A rotation narrower than H rotates the first columns only."""
    width = 2 * rotation.cos.shape[-1]
    if width < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :width], rotation), x[..., width:]], -1)
    pairs = x.astype(jnp.float32)
    pairs = pairs.reshape(*x.shape[:-1], *((-1, 2) if rotation.interleaved else (2, x.shape[-1] // 2)))
    axis = -1 if rotation.interleaved else -2
    a, b = pairs.take(0, axis), pairs.take(1, axis)
    per_head = (*rotation.cos.shape[:2], *(1,) * (x.ndim - 3), -1)
    cos, sin = rotation.cos.reshape(per_head), rotation.sin.reshape(per_head)
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis).reshape(x.shape).astype(x.dtype)


# ----------------------------------------------------------------------------------------------------- masks


@dataclasses.dataclass(frozen=True)
class Full:
    """Attention to all earlier tokens and to the token itself."""

    ring = None  # slots of a cache that overwrites its oldest tokens; None: the cache keeps all tokens
    window = None  # the most tokens that a query sees, if that is the same at all positions

    def first_visible(self, position):
        """The first position that a query at this position sees. position: a number or an array."""
        return position * 0  # 0 in the shape of position


@dataclasses.dataclass(frozen=True)
class BlockLocal:
    """Attention to the positions of the same block of `size` tokens, up to the token itself.

    The cache is a ring of one block. Llama 4 calls it chunked attention.
    """

    size: int
    window = None

    @property
    def ring(self) -> int:
        return self.size

    def first_visible(self, position):
        return position - position % self.size


@dataclasses.dataclass(frozen=True)
class Window:
    """Attention to the last `size` tokens, the query's own included. Source: arXiv 2004.05150.

    The cache is a ring with `spare` slots more than a query sees, so that a row can be shortened by a few
    tokens and read on from there.
    """

    size: int
    spare: int = 128

    @property
    def ring(self) -> int:
        return self.size + self.spare

    @property
    def window(self) -> int:
        return self.size

    def first_visible(self, position):
        return (position - self.size + 1) * (position >= self.size)


Mask = Full | BlockLocal | Window


@dataclasses.dataclass(frozen=True)
class Recurrent:
    """In the place of a mask: all earlier tokens are in the layer's state, which each token changes.

    spare: how many of its latest tokens a row can take back, as it does with drafts that were wrong. kept: in
    how many places serving/ keeps states of earlier tokens, from which another text can go on.
    """

    spare: int = 0
    kept: int = 0


# --------------------------------------------------------------- what a model is, and what a family provides


# These records are static arguments of jit: frozen dataclasses, or others that are hashed by their values.


class AttentionBlock(Protocol):
    """What a layer's attention must have: `SoftmaxAttention`, and layers whose memory is a state.

    The call takes the normalized stream x [b,T,D] and `source`, the layer's memory before the chunk, or None
    without one; of a layer that shares keys and values, what an earlier one has attended to. It returns
    ([b,T,D], the memory with the chunk in it, what the chunk has attended to), and sums over MODEL.
    memory_info declares the memory: a tree of arrays with the rows of the batch as their first axis, and the
    attribute `dtype`, which memory_info would be given to declare the same. K, sharded_widths: of key/value
    heads, see sharding/mesh.py; K is 0 without any. operations: by the name of an array of the memory, how
    many operations a token does for each number that it reads there.
    """

    @property
    def K(self) -> int: ...
    @property
    def sharded_widths(self) -> tuple[int, ...]: ...
    @property
    def operations(self) -> dict[str, float]: ...
    def declare(self, prefix: str, D: int) -> Any: ...
    def memory_info(self, mask: Any, batch: int, max_len: int, dtype) -> Any: ...
    def __call__(
        self, x: Array, w, source: Any, chunk: Chunk, rotation: Rotation | None, mask: Any
    ) -> tuple[Array, Any, Any]: ...


class FeedForward(Protocol):
    """What a layer's feed-forward network must have. The call sums over MODEL, by columns with `psum`."""

    def declare(self, prefix: str, D: int) -> Any: ...
    def __call__(self, x: Array, w, chunk: Chunk) -> Array: ...


class Normalization(Protocol):
    """declare: info declares one factor per column, [D]. It returns info, a tree of such, or None."""

    def declare(self, info: ArrayInfo) -> Any: ...
    def __call__(self, x: Array, w, mean: Callable[[Array], Array] = column_mean) -> Array: ...


class LayerInputs(Protocol):
    """Makes an array for each layer from the tokens [b,T] int32 and their embedding x [b,T,D].

    declare: a weight of which only rows are looked up is its field `table`, which counts for no step's bytes.
    """

    def declare(self, D: int, V: int) -> Any: ...
    def __call__(self, x: Array, tokens: Array, w) -> list[Array]: ...


class PositionEmbedding(Protocol):
    """Adds learned position embeddings to the embedded tokens x [b,T,D]. positions: [b,T] int32."""

    def declare(self, D: int) -> Any: ...
    def __call__(self, x: Array, w, positions: Array) -> Array: ...


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What tells one decoder layer from another.

    attention, feed_forward: records of sizes and functions, those above or a family's own.
    norm:      of the inputs of attention and of feed_forward; None for no norm.
    residual:  how their outputs join the residual stream.
    feed_forward_norm, feed_forward_residual: those of feed_forward, where they are not the same.
    shares_kv: it has no keys and values, but attends to those of the last layer with the same mask that has.
    """

    attention: AttentionBlock
    feed_forward: FeedForward
    norm: Normalization | None
    mask: Mask | Recurrent = Full()
    rope: Rope | None = None
    residual: Residual = Residual()
    feed_forward_norm: Normalization | None = None
    feed_forward_residual: Residual | None = None
    shares_kv: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All that the functions above need to know of a model.

    max_positions: the longest context. norm: after the last layer. embedding_norm: of the embedded tokens,
    without a weight. layer_inputs: for the residuals of families whose layers get more than the stream.
    logit_scale, logit_softcap: logits are multiplied by the first, then become cap * tanh(logits / cap).
    """

    D: int
    V: int
    layers: tuple[LayerKind, ...]
    norm: Normalization
    max_positions: int
    tied_embeddings: bool = False
    embedding_scale: float | None = None
    embedding_norm: Norm | None = None
    position_embedding: PositionEmbedding | None = None
    layer_inputs: LayerInputs | None = None
    logit_scale: float | None = None
    logit_softcap: float | None = None

    @property
    def moe(self) -> MoE | None:
        """The first MoE among the layers, whose sizes are those of all; None for a dense model."""
        return next((x.feed_forward for x in self.layers if isinstance(x.feed_forward, MoE)), None)

    @property
    def masks(self) -> frozenset[Mask | Recurrent]:
        return frozenset(kind.mask for kind in self.layers)


# ----------------------------------------------------------------------- the weights and the cache, declared


# declared("kgHD", "D", "q_proj.weight", "(KGH)D"): the array's letters; those that its matmul sums, "" if it
# is never quantized; the tensor's name in Llama's checkpoints, behind a prefix; the tensor's letters there:
# in "ED[M+M]" two arrays follow one another, and this one is number 0 or 1. min_bits: fewer lose too much.
# The fields of a @pytree are given by name, so those without a default may come last.


@pytree
class AttentionWeights:
    q: Array = declared("kgHD", "D", "q_proj.weight", "(KGH)D")
    k: Array = declared("khD", "D", "k_proj.weight", "(KH)D")
    v: Array = declared("khD", "D", "v_proj.weight", "(KH)D")
    o: Array = declared("DkgH", "kgH", "o_proj.weight", "D(KGH)")
    q_norm: Array | None = declared_norm("H", "q_norm.weight")
    k_norm: Array | None = declared_norm("H", "k_norm.weight")
    q_bias: Array | None = declared_bias("kgH", "q_proj.bias", "(KGH)")
    k_bias: Array | None = declared_bias("kh", "k_proj.bias", "(KH)")
    v_bias: Array | None = declared_bias("kh", "v_proj.bias", "(KH)")
    o_bias: Array | None = declared_bias("D", "o_proj.bias", "D")


@pytree
class MLPWeights:
    gate: Array = declared("fD", "D", "gate_proj.weight", "FD")
    up: Array = declared("fD", "D", "up_proj.weight", "FD")
    down: Array = declared("Df", "f", "down_proj.weight", "DF")


@pytree
class MoEWeights:
    router: Array = declared("DE", "", "router.weight", "ED")
    router_bias: Array | None = declared_bias("E", "router.e_score_correction_bias", "E", dtype=jnp.float32)
    logit_bias: Array | None = declared_bias("E", "router.bias", "E")
    gate: Array = declared("eDm", "D", "experts.gate_up_proj", "ED[M+M]", 0)
    up: Array = declared("eDm", "D", "experts.gate_up_proj", "ED[M+M]", 1)
    down: Array = declared("emD", "m", "experts.down_proj", "EMD")
    gate_bias: Array | None = declared_bias("em", "experts.gate_up_proj_bias", "E[M+M]", part=0)
    up_bias: Array | None = declared_bias("em", "experts.gate_up_proj_bias", "E[M+M]", part=1)
    down_bias: Array | None = declared_bias("eD", "experts.down_proj_bias", "ED")
    shared: Any


@pytree
class LayerWeights:
    attention_norm: Any = declared_norm("D", "input_layernorm.weight")
    attention: Any
    attention_post_norm: Any = declared_norm("D", "post_self_attn_layernorm.weight")
    feed_forward_norm: Any = declared_norm("D", "post_attention_layernorm.weight")
    feed_forward: Any
    feed_forward_post_norm: Any = declared_norm("D", "post_mlp_layernorm.weight")


def layer_infos(kind: LayerKind, D: int, prefix: str = "") -> LayerWeights:
    """The tree of a layer's weights, with an ArrayInfo in the place of each. prefix: precedes their names."""
    attention = kind.attention.declare(prefix + "self_attn.", D)
    feed_forward = kind.feed_forward.declare(prefix + "mlp.", D)
    infos = infos_of(LayerWeights, prefix, dict(D=D), attention=attention, feed_forward=feed_forward)
    before = dict(attention_norm=kind.norm, feed_forward_norm=kind.feed_forward_norm or kind.norm)
    after = kind.feed_forward_residual or kind.residual
    return with_norms(infos, **before, attention_post_norm=kind.residual, feed_forward_post_norm=after)


@pytree
class Weights:
    """The weights of a model. unembed: None if tied to `embed`."""

    embed: Array = declared("vD", "", "model.embed_tokens.weight", "VD")
    positions: Any
    inputs: Any
    layers: list[LayerWeights]
    norm: Any = declared_norm("D", "model.norm.weight")
    unembed: Array | None = declared("vD", "D", "lm_head.weight", "VD", min_bits=8)


def outer_infos(cfg: Config) -> Weights:
    """The declared weights outside of the layers: the embedding, the last norm and the logits' matrix."""
    positions = cfg.position_embedding and cfg.position_embedding.declare(cfg.D)
    others = dict(positions=positions, inputs=cfg.layer_inputs and cfg.layer_inputs.declare(cfg.D, cfg.V))
    weights = infos_of(Weights, "", sizes_of(cfg), dict(unembed=cfg.tied_embeddings), layers=[], **others)
    if cfg.tied_embeddings:
        embed = dataclasses.replace(weights.embed, contracted="D", min_bits=8)
        weights = dataclasses.replace(weights, embed=embed)
    return with_norms(weights, norm=cfg.norm)


def weight_infos(cfg: Config, format: Format | None = None) -> Weights:
    """The tree of all weights with an ArrayInfo in the place of each array. format: None for float."""
    numbered = enumerate(cfg.layers)
    layers = [layer_infos(kind, cfg.D, f"model.layers.{i}.") for i, kind in numbered]
    weights = dataclasses.replace(outer_infos(cfg), layers=layers)
    return jax.tree.map(lambda info: dataclasses.replace(info, format=format), weights)


def init_weights(
    key: Array, cfg: Config, mesh: Mesh, dtype=jnp.float32, format: Format | None = None
) -> Weights:
    """Random weights, the same on every mesh: normal with variance 1 / fan-in.

    The weights of norms are around 1, biases around 0.
    """
    return random_arrays(key, weight_infos(cfg, format), mesh, dtype)


@pytree
class Cache:
    """What each layer remembers of the tokens that each row has read.

    layers: the memory of each layer; None for a layer without keys and values of its own. It is a KV, values
    [b,k,s,C], or a state, see families/gated_delta_net.py. In a KV the token at position p is in slot p, or
    in slot p % ring where the cache is a ring. Where n devices share a key/value head, slot s is on device
    s % n, at local index s // n, so that the devices fill evenly.
    length: [b] int32, how many tokens a row has read.
    """

    layers: list
    length: Array


def memory_info(kind: LayerKind, batch: int, max_len: int, dtype) -> Any:
    """A layer's declared memory of `batch` rows of up to `max_len` positions. dtype: float, or int8."""
    return None if kind.shares_kv else kind.attention.memory_info(kind.mask, batch, max_len, dtype)


def cache_infos(cfg: Config, batch: int, max_len: int, dtype) -> Cache:
    """The declared memories of all layers, see `memory_info`."""
    layers = [memory_info(kind, batch, max_len, dtype) for kind in cfg.layers]
    length: Any = ArrayInfo("b", shape=(batch,), dtype=jnp.int32)
    return Cache(layers=layers, length=length)


def init_cache(cfg: Config, mesh: Mesh, batch: int, max_len: int, dtype) -> Cache:
    """An empty cache of `batch` rows of up to `max_len` positions. dtype: float, or int8."""
    return zeros(abstract(cache_infos(cfg, batch, max_len, dtype), mesh))
