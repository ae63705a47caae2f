"""Inference of Llama and its relatives: pure functions over pytrees, inside one shard_map.

Letters, one per dimension, used in every shape, einsum and comment:

    B  rows of the batch     S  key positions (slots)   E  experts
    T  query positions       H  head width              A  experts active per token
    K  key/value heads       D  model width             M  feed-forward width of an expert
    G  queries per K         F  feed-forward width      V  vocabulary
    C  columns of a slot of the cache: a key beside its value, 2H, or a latent beside a rotated key, L+R;
       more than 128 are filled up to a multiple of it

and of latent attention (see Latent): L  latent, Q  compressed query, and in a head U  value, R  key with
rotation, N  key without; P  positions that have an embedding.

UPPERCASE: the whole dimension is on this device. lowercase: this device holds its shard of it. So
`einsum("bTD,kgHD->bTkgH", x, w.q)` says where every byte is, and where a lowercase letter is summed there
must be a `psum`. SHARDED_BY in sharding/mesh.py says which mesh axes split which lowercase letter. Outside
of shard_map arrays are global: there [B,T,V] is the shape of all of it, on all devices together.

The layers may be in stages that are alike. Then their weights begin with p (no shard of P): those that have
the same place in each stage, of which a device has its own stage's. A stage runs the program of a data shard,
but its layers begin with the hidden states that the stage before has passed on: see sharding/stages.py.
"""

import dataclasses
import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ops.attention import attend_cached, attend_causal, merge, ragged_decode, write
from ops.grouped_matmul import expert_mlp
from ops.matmul import einsum, take_rows
from ops.platform import on_tpu
from ops.tpu import LANES
from quantize import Format, quantize, values_and_scale
from ragged_attention import KV, Columns, key_beside_value
from sharding.arrays import (
    ArrayInfo,
    Stored,
    abstract,
    declare,
    pytree,
    random_arrays,
    sizes_of,
    specs,
    zeros,
)
from sharding.mesh import EXPERT, MODEL, ROWS, SLOTS, STAGE
from sharding.sampling import TOP, Likeliest, Sampling, likeliest, logprob, sample, vocabulary_shard
from sharding.stages import enter, from_last_stage, is_last_stage, pass_on, result_spec

# --------------------------------------------------------------------------------------------------- config


@dataclasses.dataclass(frozen=True)
class Norm:
    """Division by the root mean square, times a weight. Source: arXiv 1910.07467.

    offset: added to the weight. centered: the mean is subtracted first, and a bias added: arXiv 1607.06450.
    """

    eps: float
    weight: bool = True
    offset: float = 0
    centered: bool = False


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
    bias: bool = False  # of queries, keys and values
    output_bias: bool = False

    @property
    def columns(self) -> Columns:
        return key_beside_value(self.H)

    @property
    def divided(self) -> tuple[int, ...]:
        """The widths that devices with the same key/value head divide among them."""
        return (self.H,)


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention, as G queries of one key/value head. Source: arXiv 2405.04434.

    A token's keys and values of all heads come from one latent of width L, and a rotated key of width R that
    they share. A query of width N is multiplied by its head's part of the key's matrix, and so compared with
    the latent itself; the sum of latents is multiplied by the value's matrix. So the cache holds the latents.
    """

    G: int
    Q: int
    L: int
    N: int
    R: int
    U: int
    norm: Norm  # of the compressed query and of the latent
    K = 1

    @property
    def columns(self) -> Columns:
        return Columns(self.L + self.R, (0, self.L), (self.N + self.R) ** -0.5)

    @property
    def divided(self) -> tuple[int, ...]:
        return self.L, self.R


@dataclasses.dataclass(frozen=True)
class Full:
    """Attention to all that came before. The functions of masks take numbers and arrays."""

    ring = None  # how many slots the cache goes round in
    window = None  # how many tokens a query sees, wherever it is

    def first(self, position):
        """The first position that a query at this one sees."""
        return position * 0

    def room(self, length: Array) -> Array:
        """How many tokens a row of this length can read and still take back, as rejected draft tokens are."""
        return jnp.full_like(length, jnp.iinfo(jnp.int32).max)

    def reusable(self, n: int, latest: int) -> int:
        """How many of a row's first n tokens another row can use, when that row has read `latest` tokens."""
        return n


@dataclasses.dataclass(frozen=True)
class Chunked:
    """Attention to the earlier positions of the same block of `size`: the cache is a ring of one block."""

    size: int
    window = None

    @property
    def ring(self) -> int:
        return self.size

    def first(self, position):
        return position - position % self.size

    def room(self, length: Array) -> Array:
        """Up to the end of the block: what comes after takes the places of what its next tokens see."""
        return self.size - length % self.size

    def reusable(self, n: int, latest: int) -> int:
        """Only the block that the row is in is still there; from a block's start on nothing is needed."""
        return n if n // self.size == latest // self.size else self.first(n)


@dataclasses.dataclass(frozen=True)
class Window:
    """Attention to the last `size` tokens, the own one counted. Source: arXiv 2004.05150.

    The cache is a ring of more slots, twice `spare`: so draft tokens can be rejected, and another row can go
    on from up to `spare` tokens before the end of what this one has read.
    """

    size: int
    spare: int = 64

    @property
    def ring(self) -> int:
        return self.size + 2 * self.spare

    @property
    def window(self) -> int:
        return self.size

    def first(self, position):
        return (position - self.size + 1) * (position >= self.size)

    def room(self, length: Array) -> Array:
        return jnp.full_like(length, self.spare)

    def reusable(self, n: int, latest: int) -> int:
        return n if self.first(n) >= latest + self.spare - self.ring else 0


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding. Source: arXiv 2104.09864."""

    theta: float
    scaling: tuple[float, ...] | None = None  # factor, low and high frequency factor, original length
    interleaved: bool = False  # rotate neighbours (2i, 2i+1), not halves (i, i + H/2)
    width: int | None = None  # how many columns of a head rotate, the first; None: all H; of a latent, R


@dataclasses.dataclass(frozen=True)
class Gated:
    """A gated MLP of width F. Source: arXiv 2002.05202."""

    F: int
    activation: str = "silu"


@dataclasses.dataclass(frozen=True)
class Plain:
    """Two matrices with biases, and what is between them. Source: arXiv 1706.03762."""

    F: int
    activation: str


@dataclasses.dataclass(frozen=True)
class Router:
    """How a token's experts are weighted: by which score, applied to their input or output."""

    score: str = "sigmoid"  # or "softmax", over all experts
    normalized: bool = False  # the scores of the chosen experts sum to 1
    scales: str = "input"  # or "output"
    bias: bool = False  # of the sigmoid scores, to choose by and not to weight by
    factor: float = 1  # of the scores, at last


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

    attention: Heads | Latent
    feed_forward: Gated | Plain | Experts
    mask: Full | Chunked | Window = Full()
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
    embedding_scale: float | None = None
    P: int | None = None  # positions that have an embedding of their own, which is added to the token's

    @property
    def heads(self) -> Heads | Latent:
        """The attention of all layers, as far as its sizes go."""
        return self.layers[0].attention

    @property
    def rope(self) -> Rope | None:
        """That of all layers that have one: it is the same."""
        return next((kind.rope for kind in self.layers if kind.rope), None)

    @property
    def experts(self) -> Experts | None:
        """Those of all layers that have some, as far as their sizes go."""
        return next((x.feed_forward for x in self.layers if isinstance(x.feed_forward, Experts)), None)

    @property
    def masks(self) -> frozenset[Full | Chunked | Window]:
        return frozenset(kind.mask for kind in self.layers)

    def stage(self, stages: int) -> tuple[LayerKind, ...]:
        """The layers of one of so many stages."""
        return self.layers[: len(self.layers) // stages]


# ----------------------------------------------------------------------------------- weights, declared once


def _array(letters: str, contracted: str = "", *stored: tuple, **other) -> Any:
    """A declared field. stored: (name, letters) or (name, letters, part), see Stored."""
    info = ArrayInfo(letters, contracted, tuple(Stored(*where) for where in stored), **other)
    return dataclasses.field(metadata={"info": info})


def _norm(letter: str, name: str) -> Any:
    return _array(letter, "", (name, letter), initial=1.0)


def _bias(letters: str, *stored: tuple, dtype=None) -> Any:
    return _array(letters, "", *stored, initial=0.0, dtype=dtype)


@pytree
class Attention:
    q: Array = _array("kgHD", "D", ("q_proj.weight", "(KGH)D"), ("qkv.weight", "D[KGH+KH+KH]", 0))
    k: Array = _array("khD", "D", ("k_proj.weight", "(KH)D"), ("qkv.weight", "D[KGH+KH+KH]", 1))
    v: Array = _array("khD", "D", ("v_proj.weight", "(KH)D"), ("qkv.weight", "D[KGH+KH+KH]", 2))
    o: Array = _array("DkgH", "kgH", ("o_proj.weight", "D(KGH)"), ("out.weight", "(KGH)D"))
    q_norm: Array | None = _norm("H", "q_norm.weight")
    k_norm: Array | None = _norm("H", "k_norm.weight")
    q_bias: Array | None = _bias("kgH", ("q_proj.bias", "(KGH)"), ("qkv.bias", "[KGH+KH+KH]", 0))
    k_bias: Array | None = _bias("kh", ("k_proj.bias", "(KH)"), ("qkv.bias", "[KGH+KH+KH]", 1))
    v_bias: Array | None = _bias("kh", ("v_proj.bias", "(KH)"), ("qkv.bias", "[KGH+KH+KH]", 2))
    o_bias: Array | None = _bias("D", ("out.bias", "D"))


@pytree
class LatentAttention:
    q_a: Array = _array("QD", "D", ("q_a_proj.weight", "QD"))
    q_a_norm: Array = _norm("Q", "q_a_layernorm.weight")
    q_b: Array = _array("kgNQ", "Q", ("q_b_proj.weight", "(KG[N+R])Q", 0))
    q_rope: Array = _array("kgRQ", "Q", ("q_b_proj.weight", "(KG[N+R])Q", 1))
    kv_a: Array = _array("lD", "D", ("kv_a_proj_with_mqa.weight", "[L+R]D", 0))
    k_rope: Array = _array("rD", "D", ("kv_a_proj_with_mqa.weight", "[L+R]D", 1))
    kv_a_norm: Array = _norm("L", "kv_a_layernorm.weight")
    k_b: Array = _array("kgLN", "N", ("kv_b_proj.weight", "(KG[N+U])L", 0), min_bits=8)
    v_b: Array = _array("kgUL", "L", ("kv_b_proj.weight", "(KG[N+U])L", 1), min_bits=8)
    o: Array = _array("DkgU", "kgU", ("o_proj.weight", "D(KGU)"))


@pytree
class MLP:
    gate: Array | None = _array("fD", "D", ("gate_proj.weight", "FD"), ("gate_up_proj.weight", "[F+F]D", 0))
    up: Array = _array(
        "fD", "D", ("up_proj.weight", "FD"), ("gate_up_proj.weight", "[F+F]D", 1), ("c_fc.weight", "DF")
    )
    down: Array = _array("Df", "f", ("down_proj.weight", "DF"), ("c_proj.weight", "FD"))
    up_bias: Array | None = _bias("f", ("c_fc.bias", "F"))
    down_bias: Array | None = _bias("D", ("c_proj.bias", "D"))


@pytree
class MoE:
    router: Array = _array("DE", "", ("router.weight", "ED"))
    router_bias: Array | None = _bias("E", ("router.bias", "E"), dtype=jnp.float32)
    gate: Array = _array(
        "eDm", "D", ("experts.gate_up_proj", "ED[M+M]", 0), ("experts.{e}.gate_proj.weight", "MD"),
        ("experts.gate_up_proj.weight", "E[M+M]D", 0),
    )  # fmt: skip
    up: Array = _array(
        "eDm", "D", ("experts.gate_up_proj", "ED[M+M]", 1), ("experts.{e}.up_proj.weight", "MD"),
        ("experts.gate_up_proj.weight", "E[M+M]D", 1),
    )  # fmt: skip
    down: Array = _array(
        "emD", "m", ("experts.down_proj", "EMD"), ("experts.{e}.down_proj.weight", "DM"),
        ("experts.down_proj.weight", "EDM"),
    )  # fmt: skip
    shared: MLP | None


@pytree
class Layer:
    attention_norm: Array = _norm("D", "input_layernorm.weight")
    attention_norm_bias: Array | None = _bias("D", ("input_layernorm.bias", "D"))
    attention: Attention | LatentAttention
    feed_forward_norm: Array = _norm("D", "post_attention_layernorm.weight")
    feed_forward_norm_bias: Array | None = _bias("D", ("post_attention_layernorm.bias", "D"))
    feed_forward: MLP | MoE


@pytree
class Weights:
    embed: Array = _array("vD", "", ("model.embed_tokens.weight", "VD"))
    positions: Array | None = _array("PD", "", ("model.embed_positions.weight", "PD"))
    layers: list[Layer]
    norm: Array = _norm("D", "model.norm.weight")
    norm_bias: Array | None = _bias("D", ("model.norm.bias", "D"))
    unembed: Array | None = _array("vD", "D", ("lm_head.weight", "VD"), min_bits=8)  # None: embed, again


@pytree
class Passed:
    """What stages have passed on in the turn before.

    hidden: by T, [b,T,d] each: of steps, and of prefill chunks. chosen: [b,1] int32, by the last stage in the
    rows that are now the first one's.
    """

    hidden: dict[int, Array]
    chosen: Array


@pytree
class Cache:
    """The text of each row, and what the layers keep of the tokens that they have read.

    tokens: [b,S] int32. The first length[b] have been read, the next one is to be read next; what is beyond
    has no meaning, unless it is the rest of a prompt. -1: not known to this stage.
    layers: one KV each, [b,k,s,C]: the keys and values of the tokens read. Position p is in slot p; in a
    ring, of one chunk or a window, in slot p % ring. Slot s is on device s % n of the n that share the
    head, in place s // n, so that they fill evenly.
    """

    layers: list[KV]
    tokens: Array
    length: Array
    passed: Passed | None = None  # if there are several stages


def weight_infos(cfg: Config, stages: int = 1, format: Format | None = None) -> Weights:
    """The tree of all weights with their ArrayInfo in the place of arrays.

    stages: if there are several, the layers are those of one, each array [p,...]. format: None for float.
    """
    sizes, centered = sizes_of(cfg), cfg.norm.centered

    def attention(kind: Heads | Latent, prefix: str) -> Attention | LatentAttention:
        if isinstance(kind, Latent):
            return declare(LatentAttention, prefix, sizes | sizes_of(kind) | dict(K=kind.K))
        absent = {"norm": not (kind.qk_norm and kind.qk_norm.weight), "o_bias": not kind.output_bias}
        absent |= {name + "_bias": not kind.bias for name in "qkv"}
        return declare(Attention, prefix, sizes | sizes_of(kind), absent)

    def feed_forward(kind: Gated | Plain | Experts, prefix: str) -> MLP | MoE:
        if not isinstance(kind, Experts):
            plain = isinstance(kind, Plain)
            return declare(MLP, prefix, sizes | sizes_of(kind), dict(gate=plain, bias=not plain))
        shared = kind.shared and feed_forward(kind.shared, prefix + "shared_expert.")
        absent = dict(bias=not kind.router.bias)
        return declare(MoE, prefix, sizes | sizes_of(kind), absent, shared=shared)

    def layer(i: int, kind: LayerKind) -> Layer:
        prefix = f"model.layers.{i}."
        parts = dict(
            attention=attention(kind.attention, prefix + "self_attn."),
            feed_forward=feed_forward(kind.feed_forward, prefix + "mlp."),
        )
        return declare(Layer, prefix, sizes, dict(bias=not centered), **parts)

    layers = [layer(i, kind) for i, kind in enumerate(cfg.stage(stages))]
    if stages > 1:
        layers = jax.tree.map(lambda info: info.in_stages(stages), layers)
    absent = dict(unembed=cfg.tied_embeddings, positions=not cfg.P, bias=not centered)
    weights = declare(Weights, "", sizes, absent, layers=layers)
    if cfg.tied_embeddings:
        embed = dataclasses.replace(weights.embed, contracted="D", min_bits=8)
        weights = dataclasses.replace(weights, embed=embed)
    return jax.tree.map(lambda info: dataclasses.replace(info, format=format), weights)


def cache_infos(cfg: Config, batch: int, max_len: int, dtype, stages: int = 1) -> Cache:
    """The cache of `batch` rows of up to `max_len` positions, declared. dtype: float, or int8 with scales.

    stages: there are as many Caches, and each stage has its layers' share of each.
    """

    def layer(kind: LayerKind) -> KV:
        K, columns = kind.attention.K, kind.attention.columns
        slots = min(max_len, kind.mask.ring or max_len)
        values = ArrayInfo("bksC", shape=(batch, K, slots, columns.width), dtype=dtype)
        scale = ArrayInfo("bk2s", shape=(batch, K, 2, slots), dtype=jnp.bfloat16)
        return KV(values, scale if jnp.dtype(dtype) == jnp.int8 else None, columns)

    tokens = ArrayInfo("bS", shape=(batch, max_len), dtype=jnp.int32)
    length = ArrayInfo("b", shape=(batch,), dtype=jnp.int32)
    return Cache(layers=[layer(kind) for kind in cfg.stage(stages)], tokens=tokens, length=length)


def passed_infos(cfg: Config, rows: dict[int, int]) -> Passed:
    """What stages pass on of `rows[T]` rows that read T tokens each, declared."""
    hidden = {T: ArrayInfo("bTd", shape=(n, T, cfg.D)) for T, n in rows.items()}
    return Passed(hidden=hidden, chosen=ArrayInfo("bT", shape=(rows[1], 1), dtype=jnp.int32))


def init_cache(cfg: Config, mesh: Mesh, batch: int, max_len: int, dtype) -> Cache:
    """An empty cache, see `cache_infos`."""
    return zeros(abstract(cache_infos(cfg, batch, max_len, dtype, mesh.shape[STAGE]), mesh))


def init_weights(
    key: Array, cfg: Config, mesh: Mesh, dtype=jnp.float32, format: Format | None = None
) -> Weights:
    """Random weights, the same on every mesh with as many stages: normal with variance 1 / fan-in, norms
    around 1. format: of what a matmul contracts.
    """
    return random_arrays(key, weight_infos(cfg, mesh.shape[STAGE], format), mesh, dtype)


# --------------------------------------------------------------------------------------------------- layers


@pytree
class Span:
    """Where T consecutive tokens stand in each row: after `start` others; the first `count` of them are real.

    row: [b] int32, the cache's rows that they belong to; None: all, in order. start, count: [b] int32.
    positions: [b,T] int32. cos, sin: [b,T,width/2] float32, their rotations.
    """

    row: Array | None
    start: Array
    count: Array
    positions: Array
    cos: Array
    sin: Array


def normalize(x: Array, weight: Array | None, norm: Norm, bias: Array | None = None) -> Array:
    """x: [...,D] -> the same with unit mean square, times (weight + offset), plus bias.

    Each kind in the precision in which transformers computes it.
    """
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, -1, keepdims=True) if norm.centered else y
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + norm.eps)
    if norm.offset or norm.centered:
        y = y * (norm.offset + weight.astype(jnp.float32))
        return (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)
    y = y.astype(x.dtype)
    return y if weight is None else y * weight


def biased(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias


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
    rope = cfg.rope
    frequencies = rope_frequencies(rope, rope.width or cfg.heads.H) if rope else np.zeros(0, np.float32)
    angle = positions[..., None].astype(jnp.float32) * frequencies
    return Span(
        row=row, start=start, count=count, positions=positions, cos=jnp.cos(angle), sin=jnp.sin(angle)
    )


def rotate(x: Array, span: Span, interleaved: bool) -> Array:
    """Rotary embedding of x: [b,T,...,H], in float32; of its first columns, if the rotations are fewer."""
    width = 2 * span.cos.shape[-1]
    if width < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :width], span, interleaved), x[..., width:]], -1)
    pairs = x.astype(jnp.float32)
    pairs = pairs.reshape(*x.shape[:-1], *((-1, 2) if interleaved else (2, x.shape[-1] // 2)))
    axis = -1 if interleaved else -2
    a, b = pairs.take(0, axis), pairs.take(1, axis)
    per_head = (*span.cos.shape[:2], *(1,) * (x.ndim - 3), -1)
    cos, sin = span.cos.reshape(per_head), span.sin.reshape(per_head)
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis).reshape(x.shape).astype(x.dtype)


def gather_columns(*parts: Array) -> list[Array]:
    """Gather columns that devices with the same key/value head divide: [...,n] each -> [...,slots*n].

    One all-gather for all of them.
    """
    columns = lax.all_gather(jnp.concatenate(parts, -1), SLOTS, axis=parts[0].ndim - 1)  # [...,slots,n+n+..]
    columns = jnp.split(columns, np.cumsum([x.shape[-1] for x in parts])[:-1], -1)
    return [x.reshape(*x.shape[:-2], -1) for x in columns]


def project(x: Array, w: Attention, span: Span, kind: LayerKind) -> tuple[Array, Array]:
    """x: [b,T,D] -> q [b,T,k,G,H], and the keys beside the values [b,T,k,2H]."""
    q = biased(einsum("bTD,kgHD->bTkgH", x, w.q), w.q_bias)
    k = biased(einsum("bTD,khD->bTkh", x, w.k), w.k_bias)
    v = biased(einsum("bTD,khD->bTkh", x, w.v), w.v_bias)
    if lax.axis_size(SLOTS) == 1:
        # Without it XLA applies rotate's reshape to the weights, in every step: a copy of q per layer.
        q, k, v = lax.optimization_barrier((q, k, v))
    else:
        *bTk, g, H = q.shape
        q, k, v = gather_columns(q.reshape(*bTk, g * H), k, v)
        q = q.reshape(*bTk, -1, H)
    heads = kind.attention
    if heads.qk_norm:
        q, k = normalize(q, w.q_norm, heads.qk_norm), normalize(k, w.k_norm, heads.qk_norm)
    if kind.rope:
        q, k = rotate(q, span, kind.rope.interleaved), rotate(k, span, kind.rope.interleaved)
    if heads.query_scale:
        scale, floor = heads.query_scale.scale, heads.query_scale.floor
        growth = 1 + scale * jnp.log1p(jnp.floor((span.positions + 1) / floor))
        q = (q * growth[:, :, None, None, None]).astype(q.dtype)
    return q, jnp.concatenate([k, v], -1)


def project_latent(x: Array, w: LatentAttention, span: Span, kind: LayerKind) -> tuple[Array, Array]:
    """x: [b,T,D] -> q [b,T,k,G,L+R], and the latents beside the rotated keys [b,T,k,L+R]; k is 1.

    Each device has all of q_a: it is small, and so there is one all-gather, not two.
    """
    norm, interleaved = kind.attention.norm, kind.rope.interleaved
    compressed = normalize(einsum("bTD,QD->bTQ", x, w.q_a), w.q_a_norm, norm)
    q = einsum("bTkgN,kgLN->bTkgL", einsum("bTQ,kgNQ->bTkgN", compressed, w.q_b), w.k_b)
    q = jnp.concatenate([q, rotate(einsum("bTQ,kgRQ->bTkgR", compressed, w.q_rope), span, interleaved)], -1)
    latent, k_rope = einsum("bTD,lD->bTl", x, w.kv_a), einsum("bTD,rD->bTr", x, w.k_rope)
    *bTk, g, width = q.shape
    q, latent, k_rope = gather_columns(q.reshape(*bTk, g * width), latent[:, :, None], k_rope[:, :, None])
    latent, k_rope = normalize(latent, w.kv_a_norm, norm), rotate(k_rope, span, interleaved)
    return q.reshape(*bTk, -1, width), jnp.concatenate([latent, k_rope], -1)


def merge_slots(o: Array, lse: Array) -> tuple[Array, Array]:
    """Join the attention of all queries to each device's slots, and keep this device's queries.

    o: [b,T,k,G,H] -> [b,T,k,g,H], lse: [b,T,k,G] -> [b,T,k,g]. One all-to-all of the partial results.
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


def attend_span(q: Array, new: KV, span: Span, mask: Full | Chunked | Window):
    """Attention among the span's own tokens, by this device's queries.

    q: [b,T,k,G,H], new: [b,k,T,C] -> (o [b,T,k,g,H], lse [b,T,k,g]).
    """
    g = q.shape[3] // lax.axis_size(SLOTS)
    own = lax.dynamic_slice_in_dim(q, lax.axis_index(SLOTS) * g, g, 3)
    segment = 0 * span.positions if mask.window else mask.first(span.positions)
    return attend_causal(own, new, segment, mask.window)


def attend_cache(q: Array, new: KV, kv: KV, span: Span, mask: Full | Chunked | Window):
    """Write a span into the cache, and attend to what the cache holds: -> (as `attend_span`, KV).

    One token is written first, so that all it sees, itself included, is in the cache: one kernel does both.
    Of several each sees there what came before the span.
    """
    T, place = q.shape[1], places(span, mask, kv.values.shape[2])
    length, hidden = seen_slots(span, mask, span.start + (T == 1))
    if T == 1:
        part, kv = ragged_decode(q, new, kv, length, place, hidden, span.row)
        return merge_slots(*part), kv
    # A ring is read as it was: the span may overwrite what its first tokens see. Any other cache is read as
    # it will be, which spares XLA a copy of it.
    written = write(kv, new, place, span.row, T // lax.axis_size(SLOTS) + 1, ring=mask.ring is not None)
    past = attend_cached(q, kv if mask.ring else written, length, hidden, span.row)
    return merge_slots(*past), written


def seen_slots(span: Span, mask: Full | Chunked | Window, held: Array):
    """What each query sees of a cache that holds the first `held` [b] tokens, on this device.

    -> (length [b,T], hidden): the slots before `length`, but those from hidden[0] to hidden[1], [b,T] each;
    None hides nothing.
    """
    first, end = mask.first(span.positions), held[:, None]
    any_seen = (first < end) & (span.count > 0)[:, None]
    if mask.ring:
        # What a query sees lies between two places of the ring, or before the one and after the other.
        low, high = first % mask.ring, end % mask.ring
        split = high <= low
        end = jnp.where(split, jnp.minimum(end, mask.ring), high)
    length = jnp.where(any_seen, local_slots(end), 0)
    if not mask.window:  # a window has a ring
        return length, None
    return length, (jnp.where(split, local_slots(high), 0), local_slots(low))


def places(span: Span, mask: Full | Chunked | Window, capacity: int) -> Array:
    """Where each of a span's tokens goes among this device's slots, [b,T]; `capacity` if nowhere."""
    slots = lax.axis_size(SLOTS)
    keep = jnp.arange(span.positions.shape[1]) < span.count[:, None]
    slot = span.positions
    if mask.ring:  # it keeps the last ones; older ones of this span would land in the same slots
        keep &= slot >= (span.start + span.count)[:, None] - mask.ring
        slot = slot % mask.ring
    return jnp.where(keep & (slot % slots == lax.axis_index(SLOTS)), slot // slots, capacity)


def cached_form(new: Array, kv: KV | None, columns: Columns) -> KV:
    """A span's keys and values, [b,T,k,2H] or [b,T,k,L+R], as a cache holds them: [b,k,T,C]."""
    new, scale = new.swapaxes(1, 2), None
    if kv is not None and kv.scale is not None:
        parts = new.reshape(*new.shape[:3], new.shape[3] // columns.key, -1)  # a latent is key and value
        quantized = quantize(parts, (4,), kv.scale.dtype)
        new = quantized.values.reshape(new.shape)
        scale = jnp.broadcast_to(quantized.scale.swapaxes(2, 3), (*new.shape[:2], 2, new.shape[2]))
    new = jnp.pad(new, [(0, 0)] * 3 + [(0, columns.width - new.shape[3])])
    return KV(new if kv is None else new.astype(kv.values.dtype), scale, columns)


@jax.named_scope("attention")
def attention(x: Array, w: Attention | LatentAttention, kv: KV | None, span: Span, kind: LayerKind):
    """x: [b,T,D] -> ([b,T,D], the layer's cache with the span in it; None without one).

    A token attends to what the cache holds and, if its span has several, to those up to itself, as the cache
    will hold them: so it makes no difference in what prefill chunks a text is read.
    """
    latent = isinstance(kind.attention, Latent)
    q, new = (project_latent if latent else project)(x, w, span, kind)
    new, parts = cached_form(new, kv, kind.attention.columns), []
    if kv is not None:
        past, kv = attend_cache(q, new, kv, span, kind.mask)
        parts.append(past)
    if not parts or x.shape[1] > 1:
        parts.append(attend_span(q, new, span, kind.mask))
    o, _ = merge(*parts)
    o = o.astype(x.dtype)
    o = einsum("bTkgL,kgUL->bTkgU", o, w.v_b) if latent else o
    y = lax.psum(einsum("bTkgH,DkgH->bTD", o, w.o), MODEL)  # k, g; H of a latent is U
    return (y if latent else biased(y, w.o_bias)), kv


ACTIVATIONS = dict(silu=jax.nn.silu, gelu_tanh=jax.nn.gelu)


@jax.named_scope("mlp")
def mlp(x: Array, w: MLP, activation: str) -> Array:
    """x: [b,T,D] -> [b,T,D], this device's part of the sum over f."""
    activate = ACTIVATIONS[activation]
    h = biased(einsum("bTD,fD->bTf", x, w.up), w.up_bias)
    h = activate(h) if w.gate is None else activate(einsum("bTD,fD->bTf", x, w.gate)) * h
    return einsum("bTf,Df->bTD", h, w.down)


@jax.named_scope("experts")
def experts(x: Array, w: MoE, span: Span, kind: Experts) -> Array:
    """Each token's A best experts. x: [b,T,D] -> [b,T,D], this device's part of the sum over e and m.

    Every device sees all tokens of its rows and has room for all of them on any expert: none is ever dropped.
    Padding goes to no expert.
    """
    x32, router = x.astype(jnp.float32), w.router.astype(jnp.float32)
    logits = jnp.einsum("bTD,DE->bTE", x32, router, precision="highest")  # a rounded one may choose another
    if w.router_bias is None:
        best, chosen = lax.top_k(logits, kind.A)  # bTA
    else:
        _, chosen = lax.top_k(jax.nn.sigmoid(logits) + w.router_bias, kind.A)
        best = jnp.take_along_axis(logits, chosen, -1)
    if kind.router.score == "sigmoid":
        score = jax.nn.sigmoid(best)
    else:
        score = jnp.exp(best - jax.nn.logsumexp(logits, -1, keepdims=True))
    score = score / jnp.sum(score, -1, keepdims=True) if kind.router.normalized else score
    score = score * kind.router.factor
    n_local = kind.E // lax.axis_size(EXPERT)
    local = chosen - lax.axis_index(EXPERT) * n_local
    real = jnp.arange(x.shape[1]) < span.count[:, None]
    local = jnp.where((local >= 0) & (local < n_local) & real[..., None], local, n_local)
    rows = (array.reshape(-1, array.shape[-1]) for array in (x, local, score))
    y = expert_mlp(*rows, w.gate, w.up, w.down, scales=kind.router.scales)
    return y.astype(x.dtype).reshape(x.shape)


@jax.named_scope("feed_forward")
def feed_forward(x: Array, w: MLP | MoE, span: Span, kind: Gated | Plain | Experts) -> Array:
    """x: [b,T,D] -> [b,T,D]. Routed and shared experts are added before the one sum over devices."""
    if not isinstance(kind, Experts):
        return biased(lax.psum(mlp(x, w, kind.activation), MODEL), w.down_bias)  # f
    y = experts(x, w, span, kind)
    y = y if w.shared is None else mlp(x, w.shared, kind.shared.activation) + y
    return lax.psum(y, MODEL)  # f, e, m


@jax.named_scope("embed")
def embed(tokens: Array, w: Weights, span: Span, cfg: Config) -> Array:
    """tokens: [b,T] -> [b,T,D]. Each device looks up the tokens of its vocabulary shard."""
    table, _ = values_and_scale(w.embed)
    row = tokens - lax.axis_index(MODEL) * table.shape[0]
    here = (row >= 0) & (row < table.shape[0])
    x = take_rows(w.embed, row)
    x = lax.psum(jnp.where(here[..., None], x, 0), MODEL).astype(w.norm.dtype)  # v
    x = x if cfg.embedding_scale is None else x * jnp.asarray(cfg.embedding_scale, x.dtype)
    return x if w.positions is None else x + w.positions.at[span.positions].get(mode="clip")


@jax.named_scope("unembed")
def unembed(x: Array, w: Weights, cfg: Config) -> Array:
    """x: [b,T,D] -> logits [b,T,v] float32 of this device's vocabulary shard; padding has -inf."""
    x = normalize(x, w.norm, cfg.norm, w.norm_bias)
    matrix = w.embed if w.unembed is None else w.unembed
    logits = einsum("bTD,vD->bTv", x, matrix, jnp.float32)
    return jnp.where(vocabulary_shard(logits) < cfg.V, logits, -jnp.inf)


def decoder(tokens: Array, w: Weights, cache: list | None, span: Span, cfg: Config, remat: bool = False):
    """tokens: [b,T] -> (hidden states [b,T,D] before the last norm, the layers' caches)."""
    cache = cache or [None] * len(cfg.layers)
    return decoder_layers(embed(tokens, w, span, cfg), w.layers, cache, span, cfg.layers, cfg.norm, remat)


def decoder_stage(tokens: Array, w: Weights, cache: Cache, span: Span, cfg: Config):
    """`decoder`, or this stage's part of it: -> (hidden states, the layers' caches, what is passed on)."""
    if cache.passed is None:
        return *decoder(tokens, w, cache.layers, span, cfg), None
    T, hidden = tokens.shape[1], cache.passed.hidden
    x = enter(embed(tokens, w, span, cfg), hidden[T])
    layers = jax.tree.map(lambda x: x[0], w.layers)  # p
    kinds = cfg.stage(lax.axis_size(STAGE))
    x, caches = decoder_layers(x, layers, cache.layers, span, kinds, cfg.norm)
    return x, caches, dataclasses.replace(cache.passed, hidden=hidden | {T: pass_on(x)})


def decoder_layers(x: Array, weights: list[Layer], cache: list, span: Span, kinds, norm: Norm, remat=False):
    """x: [b,T,D] -> (the same after these layers, their caches). remat: see `forward`."""
    layer = jax.checkpoint(decoder_layer, static_argnums=(4, 5)) if remat else decoder_layer
    caches = []
    for w, kind, kv in zip(weights, kinds, cache, strict=True):
        x, kv = layer(x, w, kv, span, kind, norm)
        caches.append(kv)
    return x, caches


@partial(jax.jit, static_argnames=("kind", "norm"))  # traced once for all layers of a kind
def decoder_layer(x: Array, w: Layer, kv: KV | None, span: Span, kind: LayerKind, norm: Norm):
    """x: [b,T,D] -> ([b,T,D], the layer's cache with the span in it, or None)."""
    y, kv = attention(
        normalize(x, w.attention_norm, norm, w.attention_norm_bias), w.attention, kv, span, kind
    )
    x = x + y
    y = normalize(x, w.feed_forward_norm, norm, w.feed_forward_norm_bias)
    return x + feed_forward(y, w.feed_forward, span, kind.feed_forward), kv


def row_of(arrays, row: Array):
    """One row of a tree of arrays [b,...], as a batch of one."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, row, 1), arrays)


def with_row(arrays, row: Array, new):
    """The arrays with `new`, a batch of one, in the place of this row."""
    return jax.tree.map(lambda x, new: lax.dynamic_update_slice_in_dim(x, new, row, 0), arrays, new)


# --------------------------------------------------------------------------------- forward, prefill, decode


def on_each_device(mesh: Mesh, T: int, in_specs, out_specs):
    """shard_map, which checks that every psum is there; but not on TPUs if LANES divides T, as the library's
    kernel that attends then does not declare over which axes its result varies.
    """
    check_vma = T % LANES != 0 or not on_tpu(mesh)
    return partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


@partial(jax.jit, static_argnames=("cfg", "mesh", "remat"))
def forward(tokens: Array, weights: Weights, *, cfg: Config, mesh: Mesh, remat: bool = False) -> Array:
    """Logits of every position, without a cache: tokens [B,T] int32 -> [B,T,V] float32.

    For short sequences, and on a CPU for training: the kernels of other devices have no derivative. remat: a
    derivative keeps what enters each layer, and computes the rest of it again (gradient checkpointing).
    """
    if mesh.shape[STAGE] > 1:
        raise ValueError(f"forward runs in one stage, not in {mesh.shape[STAGE]}: make a mesh without stages")
    layouts = P(ROWS), specs(weight_infos(cfg), weights)

    @on_each_device(mesh, tokens.shape[1], layouts, P(ROWS, None, MODEL))
    def on_device(tokens: Array, w: Weights):
        start = jnp.zeros_like(tokens[:, 0])
        span = span_at(start, start + tokens.shape[1], tokens.shape[1], cfg)
        return unembed(decoder(tokens, w, None, span, cfg, remat)[0], w, cfg)

    return on_device(tokens, weights)[..., : cfg.V]


def cache_specs(cfg: Config, cache: Cache, mesh: Mesh) -> Cache:
    passed = cache.passed and passed_infos(cfg, dict.fromkeys(cache.passed.hidden, 0))
    infos = cache_infos(cfg, 0, 0, cache.layers[0].values.dtype, mesh.shape[STAGE])
    return specs(dataclasses.replace(infos, passed=passed), cache)


@partial(jax.jit, static_argnames=("cfg", "mesh"), donate_argnames="cache")
def begin(rows, text, length, source, cache: Cache, *, cfg: Config, mesh: Mesh) -> Cache:
    """Give rows another text, of which some has been read. The cache is donated: the old one is gone.

    rows: [n] int32, as many on each data shard, counted there from 0; -1 for none. text: [n,S] int32.
    length: [n] int32, how many of its tokens count as read: by row source[n] of the same shard, whose layers
    are copied, or, if source is None, by the row itself.
    """
    layout = cache_specs(cfg, cache, mesh)

    @partial(jax.shard_map, mesh=mesh, in_specs=(*(P(ROWS),) * 4, layout), out_specs=layout)
    def on_device(rows: Array, text: Array, length: Array, source: Array | None, cache: Cache):
        layers = cache.layers
        for i in range(0 if source is None else rows.size):
            to = jnp.maximum(rows[i], 0)
            layers = with_row(layers, to, row_of(layers, jnp.where(rows[i] < 0, to, source[i])))
        at = jnp.where(rows < 0, cache.length.size, rows)
        tokens = cache.tokens.at[at].set(text, mode="drop")
        length = cache.length.at[at].set(length, mode="drop")
        return dataclasses.replace(cache, layers=layers, tokens=tokens, length=length)

    return on_device(rows, text, length, source, cache)


def text_at(text: Array, positions: Array) -> Array:
    """The tokens of text [b,S] at positions [b,T]; beyond its end, any."""
    return jnp.take_along_axis(text, positions, 1, mode="clip")


def chunk_at(rows: Array | None, count: Array, width: int, cache: Cache, cfg: Config):
    """The next `width` tokens of these rows, see `prefill`: -> (tokens [b,T], Span)."""
    at = slice(None) if rows is None else rows
    span = span_at(cache.length[at], count, width, cfg, rows)
    return text_at(cache.tokens[at], span.positions), span


def after_chunk(x: Array, span: Span, score: int | None, w: Weights, cache: Cache, cfg: Config):
    """x: [b,T,D], of a chunk that has been read -> (its Scores or None, see `prefill`, all lengths)."""
    at = slice(None) if span.row is None else span.row
    following = text_at(cache.tokens[at], span.positions + 1)

    def score_row(row: tuple[Array, Array]) -> Scores:
        logits = unembed(row[0][None], w, cfg)[0]
        best = likeliest(logits, score) if score else None
        return Scores(logprobs=logprob(logits, row[1]), likeliest=best)

    # Row by row: the logits of a whole batch would not fit.
    scores = None if score is None else lax.map(score_row, (x, following))
    return scores, cache.length.at[at].add(span.count)


@partial(jax.jit, static_argnames=("width", "score", "cfg", "mesh"), donate_argnames="cache")
def prefill(
    rows, count, weights: Weights, cache: Cache, *,
    width: int, score: int | None = None, cfg: Config, mesh: Mesh,
) -> tuple["Scores | None", Cache]:  # fmt: skip
    """Read more of the text of some rows: -> (Scores [n,width], Cache). The cache is donated.

    rows: [n] int32, as in `begin` but each another one, or None: all. count: [n] int32, how many tokens of
    each, at most `width`. score: None for no scores, else how many of the likeliest tokens to report.
    """
    cache_layout = cache_specs(cfg, cache, mesh)
    layouts = P(ROWS), P(ROWS), specs(weight_infos(cfg, mesh.shape[STAGE]), weights), cache_layout

    @on_each_device(mesh, width, layouts, (result_spec(mesh), cache_layout))
    def on_device(rows: Array | None, count: Array, w: Weights, cache: Cache):
        tokens, span = chunk_at(rows, count, width, cache, cfg)
        x, layers, passed = decoder_stage(tokens, w, cache, span, cfg)
        scores, length = after_chunk(x, span, score, w, cache, cfg)
        scores = from_last_stage(scores) if passed else scores
        return scores, Cache(layers=layers, tokens=cache.tokens, length=length, passed=passed)

    return on_device(rows, count, weights, cache)


@pytree
class Scores:
    """How likely a text is. logprobs: of the token after each. likeliest: of what could be in its place."""

    logprobs: Array
    likeliest: Likeliest | None


@pytree
class Output:
    """What a step chose in each row.

    tokens: [B,T], of which row b has the first count[b]. logprobs: [B,T], of each, by the model's own logits.
    drafted: [B], how many draft tokens were looked at; count - 1 of them were accepted. likeliest: [B,T,n],
    what could have been chosen, if a row asks for it.
    """

    tokens: Array
    logprobs: Array
    count: Array
    drafted: Array
    likeliest: Likeliest | None = None


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
    if cache.passed:
        tokens = jnp.where(tokens < 0, cache.passed.chosen, tokens)
    return (tokens if drafts is None else jnp.concatenate([tokens, drafts], 1)), span


def after_step(x: Array, tokens: Array, span: Span, sampling: Sampling, w: Weights, cache: Cache, cfg):
    """x: [b,T,D], of tokens that have been read -> (Output, the rows' texts, their lengths)."""
    T, rows = tokens.shape[1], jnp.arange(tokens.shape[0])[:, None]
    logits = unembed(x, w, cfg)  # bTv
    text = cache.tokens.at[rows, span.positions].set(tokens, mode="drop")
    each_token = jax.tree.map(partial(jnp.repeat, repeats=T, axis=0), (sampling, text))
    after = span.positions.reshape(-1) + 1
    chosen = sample(logits.reshape(-1, logits.shape[-1]), *each_token, after, cfg.V).reshape(tokens.shape)

    kept = accepted(tokens, chosen, span.count)
    at = jnp.where(jnp.arange(T) < kept[:, None], span.positions + 1, text.shape[1])
    known = jnp.where(is_last_stage(), chosen, -1) if cache.passed else chosen
    text = cache.tokens.at[rows, at].set(known, mode="drop")
    drafted = jnp.maximum(span.count - 1, 0)
    best = None if sampling.top_logprobs is None else likeliest(logits, TOP)
    output = Output(
        tokens=chosen, logprobs=logprob(logits, chosen), count=kept, drafted=drafted, likeliest=best
    )
    return output, text, cache.length + kept


@partial(jax.jit, static_argnames=("cfg", "mesh"), donate_argnames="cache")
def decode_step(
    count, drafts, sampling: Sampling, weights: Weights, cache: Cache, *, cfg: Config, mesh: Mesh
) -> tuple[Output, Cache]:
    """Read each row's next token and choose the one after it: -> (Output, Cache). The cache is donated.

    count: [B] int32: 0 leaves a row as it is, 1 reads its next token, 1 + n also the first n drafts.
    drafts: [B,T-1] int32, tokens that may come after the next, or None. The right ones are accepted, so a
    step may choose several, which are what as many steps without drafts would choose. A row must not grow
    beyond the cache's max_len: what does is not kept.
    """
    if drafts is not None and mesh.shape[STAGE] > 1:
        raise ValueError("draft tokens are for one stage: several do not pass on how many were accepted")
    T, cache_layout = 1 if drafts is None else 1 + drafts.shape[1], cache_specs(cfg, cache, mesh)
    layouts = *(P(ROWS),) * 3, specs(weight_infos(cfg, mesh.shape[STAGE]), weights), cache_layout

    @on_each_device(mesh, T, layouts, (result_spec(mesh), cache_layout))
    def on_device(count: Array, drafts: Array | None, sampling: Sampling, w: Weights, cache: Cache):
        tokens, span = step_at(count, drafts, cache, cfg)
        x, layers, passed = decoder_stage(tokens, w, cache, span, cfg)
        output, text, length = after_step(x, tokens, span, sampling, w, cache, cfg)
        if passed:
            output = from_last_stage(output)
            passed = dataclasses.replace(passed, chosen=output.tokens)
        return output, Cache(layers=layers, tokens=text, length=length, passed=passed)

    return on_device(count, drafts, sampling, weights, cache)
