"""The gated delta net: attention whose memory is a state of fixed size, not a cache that grows.

Softmax attention keeps the key and the value of every token. Here each head has one matrix S instead, from
which a key of width X reads a value of width Y. Each token first lets S fade, then changes what S answers to
its own key towards its own value, and then reads what S answers to its query: ops/delta_rule.py. So a row
takes as much memory at a million tokens as at one, and a step reads and writes all of it.

Before that, each channel of queries, keys and values goes through a short convolution: a weighted sum of its
last W inputs. So a layer remembers two things of a row, see `State`: S, and the inputs of the last tokens.

Nothing can be taken out of S again. So that a row can take back drafts that were wrong, S may lag behind: it
does not have the last `spare` tokens (model.Recurrent) of which the state has the inputs and gates beside it.
Each decode step begins with them, and lets S have those that became old enough.

Letters besides those of model.py: J key heads, N value heads, of which N/J read with the same key; X width of
a key, Y width of a value; Q = J·X columns of all keys; W taps of a convolution; R tokens whose inputs are
kept; P spare tokens. n and q are sharded over MODEL: if devices do not divide the key heads, they divide
their columns, and gather them after the convolution.

Sources: transformers, models/qwen3_next; arXiv 2412.06464.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from model import Chunk, Mask, Norm, Recurrent, Rotation
from ops.delta_rule import FEW, delta_chunks, delta_steps
from sharding.arrays import ArrayInfo, declared, declared_norm, infos_of, pytree, sizes_of
from sharding.collective_matmul import einsum, products, psum
from sharding.mesh import MODEL


@pytree
class GatedDeltaNetWeights:
    q: Array = declared("qD", "D", "in_proj_qkv.weight", "[Q+Q+NY]D", 0)
    k: Array = declared("qD", "D", "in_proj_qkv.weight", "[Q+Q+NY]D", 1)
    v: Array = declared("nYD", "D", "in_proj_qkv.weight", "[Q+Q+NY]D", 2)
    z: Array = declared("nYD", "D", "in_proj_z.weight", "(NY)D")
    a: Array = declared("nD", "D", "in_proj_a.weight", "ND", min_bits=8)
    b: Array = declared("nD", "D", "in_proj_b.weight", "ND", min_bits=8)
    q_taps: Array = declared("qW", "", "conv1d.weight", "[Q+Q+NY]1W", 0)
    k_taps: Array = declared("qW", "", "conv1d.weight", "[Q+Q+NY]1W", 1)
    v_taps: Array = declared("nYW", "", "conv1d.weight", "[Q+Q+NY]1W", 2)
    log_decay: Array = declared("n", "", "A_log", "N", initial=-2.0, dtype=jnp.float32)
    decay_bias: Array = declared("n", "", "dt_bias", "N", initial=0.0)
    norm: Array = declared_norm("Y", "norm.weight")
    o: Array = declared("DnY", "nY", "out_proj.weight", "D(NY)")


@pytree
class State:
    """What a layer remembers of each row. Its size does not depend on the text.

    matrix: [b,n,X,Y] float32, the matrices S, which have read all tokens but those whose gates are kept.
    keys: [b,R,2,q] and values: [b,R,n,Y], the inputs of the convolutions of queries and keys, and of values,
    of the last R tokens, zeros before the first token.
    gates: [b,P,2,n] float32, the decay and the strength of the last P tokens, or zeros if S has read the
    token; and end: [b] int32, how many tokens the row had read. A row that has taken tokens back is shorter.
    None if P is 0.
    """

    matrix: Array
    keys: Array
    values: Array
    gates: Array | None
    end: Array | None

    @property
    def dtype(self) -> jnp.dtype:
        return self.keys.dtype


@dataclasses.dataclass(frozen=True)
class GatedDeltaNet:
    """N heads with a state [X,Y] each, which read with J keys. taps: of the convolutions. norm: of outputs."""

    J: int
    N: int
    X: int
    Y: int
    W: int
    norm: Norm
    K = 0  # it has no heads of keys and values in a cache
    sharded_widths = ()

    @property
    def Q(self) -> int:
        return self.J * self.X

    def declare(self, prefix: str, D: int) -> GatedDeltaNetWeights:
        """The declared weights. prefix: precedes their names in a checkpoint."""
        return infos_of(GatedDeltaNetWeights, prefix, dict(D=D, Q=self.Q, R=self.N // self.J) | sizes_of(self))

    def memory_info(self, mask: Mask, batch: int, max_len: int, dtype) -> State:
        """The declared state of `batch` rows. dtype: of the kept inputs; of int8 they are bfloat16."""
        assert isinstance(mask, Recurrent)
        dtype = jnp.bfloat16 if jnp.dtype(dtype) == jnp.int8 else dtype
        spare, inputs = mask.spare, mask.spare + self.W - 1
        matrix: Any = ArrayInfo("bnXY", shape=(batch, self.N, self.X, self.Y), dtype=jnp.float32)
        keys: Any = ArrayInfo("bR2q", shape=(batch, inputs, 2, self.Q), dtype=dtype)
        values: Any = ArrayInfo("bRnY", shape=(batch, inputs, self.N, self.Y), dtype=dtype)
        gates: Any = ArrayInfo("bP2n", shape=(batch, spare, 2, self.N), dtype=jnp.float32)
        end: Any = ArrayInfo("b", shape=(batch,), dtype=jnp.int32)
        lags = spare > 0
        return State(
            matrix=matrix, keys=keys, values=values, gates=gates if lags else None, end=end if lags else None
        )

    @jax.named_scope("attention")
    def __call__(
        self, x: Array, w: GatedDeltaNetWeights, source: State | None, chunk: Chunk,
        rotation: Rotation | None, mask: Mask,
    ) -> tuple[Array, State | None, None]:  # fmt: skip
        """x: [b,T,D] -> ([b,T,D], the state after the chunk, None). source: the state before it, or None."""
        assert isinstance(mask, Recurrent)
        with jax.named_scope("qkv"):
            q, k, v, z, a, b = products(
                x, ("bTD,qD->bTq", w.q), ("bTD,qD->bTq", w.k), ("bTD,nYD->bTnY", w.v),
                ("bTD,nYD->bTnY", w.z), ("bTD,nD->bTn", w.a), ("bTD,nD->bTn", w.b),
            )  # fmt: skip
        new = jnp.stack([q, k], 2), v, jnp.where(chunk.valid[..., None, None], gates_of(a, b, w), 0)
        state = of_chunk(source, chunk) if source else self.empty_state(new)
        keys, values, gates = map(after_one_another, (state.keys, state.values, state.gates), new)
        with jax.named_scope("convolution"):
            q, k = jnp.moveaxis(convolve(keys.astype(x.dtype), jnp.stack([w.q_taps, w.k_taps])), 2, 0)
            v = convolve(values.astype(x.dtype), w.v_taps)
        with jax.named_scope("delta_rule"):
            q, k = self.of_value_heads(q, k)
            tokens = self.X**-0.5 * q, k, v.astype(jnp.float32), gates[:, :, 0], gates[:, :, 1]
            if few := q.shape[1] <= FEW:
                o, matrix = delta_steps(*tokens, state.matrix, chunk.count, chunk.start == 0)
            else:
                o, matrix = delta_chunks(*tokens, state.matrix, chunk.start == 0)
        if source:
            lag = gates if few else jnp.zeros_like(gates)  # chunks have let S read all tokens
            source = put(source, State(matrix=matrix, keys=keys, values=values, gates=lag, end=None), chunk)
        with jax.named_scope("output"):
            o = self.norm(o[:, mask.spare :].astype(x.dtype), w.norm) * jax.nn.silu(z.astype(jnp.float32))
            return psum(einsum("bTnY,DnY->bTD", o.astype(x.dtype), w.o), MODEL), source, None  # n

    def empty_state(self, inputs: tuple[Array, Array, Array]) -> State:
        """The state before a text, without spare tokens. inputs: of the text's convolutions, and its gates."""
        keys, values, gates = (jnp.zeros_like(x, shape=(x.shape[0], self.W - 1, *x.shape[2:])) for x in inputs)
        matrix = jnp.zeros_like(gates, shape=(*gates.shape[:1], gates.shape[-1], self.X, self.Y))
        return State(matrix=matrix, keys=keys, values=values, gates=None, end=None)

    def of_value_heads(self, q: Array, k: Array) -> list[Array]:
        """q, k: [b,T,q] -> [b,T,n,X] float32 each, normalized: with which this device's value heads read."""
        columns, each = jnp.stack([q, k]).astype(jnp.float32), self.N // self.J
        if self.J % lax.axis_size(MODEL) == 0:
            heads = jnp.repeat(columns.reshape(*columns.shape[:3], -1, self.X), each, 3)
        else:
            whole = lax.all_gather(columns, MODEL, axis=3, tiled=True)[..., : self.Q]
            n = -(-self.N // lax.axis_size(MODEL))
            own = (lax.axis_index(MODEL) * n + jnp.arange(n)) // each
            heads = whole.reshape(*whole.shape[:3], self.J, self.X).take(own, 3, mode="clip")
        return list(heads * lax.rsqrt(jnp.sum(heads * heads, -1, keepdims=True) + 1e-6))


def gates_of(a: Array, b: Array, w: GatedDeltaNetWeights) -> Array:
    """a, b: [b,T,n] -> [b,T,2,n] float32: each token's decay g, at most 0, and its strength beta."""
    decay = -jnp.exp(w.log_decay) * jax.nn.softplus((a.astype(jnp.float32) + w.decay_bias.astype(jnp.float32)))
    return jnp.stack([decay, jax.nn.sigmoid(b).astype(jnp.float32)], 2)


def convolve(x: Array, taps: Array) -> Array:
    """Sums of each W tokens that follow one another, by channel, and their silu: [b,W-1+T,...] -> [b,T,...].

    taps: [...,W], of which the last one meets the last of these tokens.
    """
    W = taps.shape[-1]
    T = x.shape[1] - W + 1
    taken = (taps[..., j].astype(jnp.float32) * x[:, j : j + T].astype(jnp.float32) for j in range(W))
    return jax.nn.silu(sum(taken).astype(x.dtype))


def after_one_another(old: Array | None, new: Array) -> Array:
    """[b,R,...] and [b,T,...] -> [b,R+T,...] in the type of the first; without it, the second."""
    return new if old is None else jnp.concatenate([old, new.astype(old.dtype)], 1)


def window(x: Array, first: Array, n: int) -> Array:
    """n tokens of each row, from first[b] on, with zeros in the place of tokens before 0: -> [b,n,...].

    x: [b,T,...].
    """
    at = first[:, None] + jnp.arange(n)
    tail = (1,) * (x.ndim - 2)
    taken = jnp.take_along_axis(x, jnp.maximum(at, 0).reshape(*at.shape, *tail), 1)
    return jnp.where((at >= 0).reshape(*at.shape, *tail), taken, 0)


def of_chunk(state: State, chunk: Chunk) -> State:
    """The state of a chunk's rows, with the inputs and gates of the tokens just before the chunk.

    These are zeros where a row has no such tokens. The matrix is the stored one, even at the start of a text.
    """
    if chunk.row is not None:
        state = jax.tree.map(lambda x: x[chunk.row], state)
    back = 0 * chunk.start if state.end is None else chunk.start - state.end
    first = jnp.where(chunk.start > 0, back, -(1 << 20))  # a text begins after zeros

    def own(x: Array | None) -> Array | None:
        return x if x is None else window(x, first, x.shape[1])

    return dataclasses.replace(state, keys=own(state.keys), values=own(state.values), gates=own(state.gates))


def put(state: State, new: State, chunk: Chunk) -> State:
    """The state with the chunk in it. new: the matrices, and all inputs and gates from `of_chunk`'s on."""

    def last(old: Array | None, x: Array) -> Array | None:
        return old if old is None else window(x, chunk.count, old.shape[1])

    end = state.end if state.end is None else chunk.start + chunk.count
    new = State(
        matrix=new.matrix,
        keys=last(state.keys, new.keys),
        values=last(state.values, new.values),
        gates=last(state.gates, new.gates),
        end=end,
    )
    if chunk.row is None:
        return new
    return jax.tree.map(lambda x, own: x.at[chunk.row].set(own), state, new)
