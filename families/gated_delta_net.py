"""The gated delta net: attention whose memory is a state of fixed size, not a cache that grows.

Softmax attention keeps the key and the value of every token. Here each head has one matrix S instead, [X,Y],
which answers a key of width X with a value of width Y. Each token changes it, and then reads it:

    S = exp(g) S                what is remembered fades: g <= 0
    S = S + k beta (v - k S)    what S answers to k moves towards v, at beta = 1 all the way
    o = q S                     the token's output is what S answers to its query

So a row takes as much memory at a million tokens as at one, and a step reads and writes all of it.

Before that, each channel of queries, keys and values goes through a short convolution: a weighted sum of its
last W inputs. So a layer remembers two things of a row, see `State`: S, and the inputs of the last tokens.

Nothing can be taken out of S again. So that a row can take back drafts that were wrong, the stored S lags
behind the row: it lacks the last P tokens (`Recurrent.spare`), whose inputs and gates are in `State.latest`.
A decode step has S read these P tokens and then the T new ones, for the outputs. It stores S as it was after
the oldest of them, as many as there are new ones, so that the stored S lags by P tokens again.

Letters besides those of model.py: J key heads, N value heads, of which G = N/J read with the same key; X
width of a key, Y width of a value; Q = J·X columns of all keys; W taps of a convolution; P spare tokens, and
R = W - 1 + P tokens whose inputs are kept. n and q are sharded over MODEL. q counts columns, not heads: if
devices do not divide J, a device has a part of a head, and gathers the columns of all after the convolution.

Sources: transformers, models/qwen3_next; arXiv 2412.06464.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from model import Chunk, Norm, Recurrent, Rotation
from ops.delta_kernels import delta_chunks, delta_steps
from sharding.arrays import ArrayInfo, declared, infos_of, pytree, sizes_of
from sharding.collective_matmul import einsum, products, psum
from sharding.mesh import MODEL


@pytree
class GatedDeltaNetWeights:
    """a, log_rate and step_bias make g, b makes beta, see `project`. z: the gate of the outputs.

    Published files of Qwen 3.5 have log_rate and the norm in float32, all others in bfloat16.
    """

    q: Array = declared("qD", "D", "in_proj_qkv.weight", "[Q+Q+NY]D", 0)
    k: Array = declared("qD", "D", "in_proj_qkv.weight", "[Q+Q+NY]D", 1)
    v: Array = declared("nYD", "D", "in_proj_qkv.weight", "[Q+Q+NY]D", 2)
    z: Array = declared("nYD", "D", "in_proj_z.weight", "(NY)D")
    a: Array = declared("nD", "D", "in_proj_a.weight", "ND", min_bits=8)
    b: Array = declared("nD", "D", "in_proj_b.weight", "ND", min_bits=8)
    q_taps: Array = declared("qW", "", "conv1d.weight", "[Q+Q+NY]1W", 0)
    k_taps: Array = declared("qW", "", "conv1d.weight", "[Q+Q+NY]1W", 1)
    v_taps: Array = declared("nYW", "", "conv1d.weight", "[Q+Q+NY]1W", 2)
    log_rate: Array = declared("n", "", "A_log", "N", initial=-2.0, dtype=jnp.float32)
    step_bias: Array = declared("n", "", "dt_bias", "N", initial=0.0)
    norm: Array = declared("Y", "", "norm.weight", "Y", initial=1.0, dtype=jnp.float32)
    o: Array = declared("DnY", "nY", "out_proj.weight", "D(NY)")


@pytree
class Tokens:
    """What a layer keeps of tokens that follow one another.

    queries, keys: [b,T,q] and values: [b,T,n,Y], the inputs of their convolutions.
    gates: [b,T,2,n] float32, g and beta. Padding has g = beta = 0, so it leaves S as it is.
    """

    queries: Array
    keys: Array
    values: Array
    gates: Array


@pytree
class State:
    """What a layer remembers of each row. Its size does not depend on the text.

    matrix: [b,n,X,Y] float32, the matrices S.
    latest: the inputs of the last R tokens, zeros before the first token, and the gates of the last P ones:
    zeros for a token that S has read, so that to read it again changes nothing.
    end: [b] int32, how many tokens the row had read. A chunk that starts earlier takes the rest back.
    """

    matrix: Array
    latest: Tokens
    end: Array

    @property
    def dtype(self) -> jnp.dtype:
        """That of the kept inputs."""
        return self.latest.keys.dtype


@dataclasses.dataclass(frozen=True)
class GatedDeltaNet:
    """N heads with a state [X,Y] each, of which G read with the same key. norm: of each head's output."""

    J: int
    N: int
    X: int
    Y: int
    W: int
    norm: Norm
    K = 0  # there is no cache whose heads a mesh must divide
    sharded_widths = ()
    operations = dict(matrix=6.0)  # in three products: the key reads S and changes it, the query reads it

    def declare(self, prefix: str, D: int) -> GatedDeltaNetWeights:
        """The declared weights. prefix: precedes their names in a checkpoint."""
        sizes = dict(D=D, Q=self.J * self.X, G=self.N // self.J) | sizes_of(self)
        return infos_of(GatedDeltaNetWeights, prefix, sizes)

    def memory_info(self, mask: Recurrent, batch: int, max_len: int, dtype) -> State:
        """The declared state of `batch` rows. dtype: of the kept inputs; bfloat16 in the place of int8."""
        dtype = jnp.bfloat16 if jnp.dtype(dtype) == jnp.int8 else dtype
        Q, P, R = self.J * self.X, mask.spare, mask.spare + self.W - 1
        keys: Any = ArrayInfo("bRq", shape=(batch, R, Q), dtype=dtype)
        values: Any = ArrayInfo("bRnY", shape=(batch, R, self.N, self.Y), dtype=dtype)
        gates: Any = ArrayInfo("bP2n", shape=(batch, P, 2, self.N), dtype=jnp.float32)
        matrix: Any = ArrayInfo("bnXY", shape=(batch, self.N, self.X, self.Y), dtype=jnp.float32)
        end: Any = ArrayInfo("b", shape=(batch,), dtype=jnp.int32)
        latest = Tokens(queries=keys, keys=keys, values=values, gates=gates)
        return State(matrix=matrix, latest=latest, end=end)

    @jax.named_scope("attention")
    def __call__(
        self, x: Array, w: GatedDeltaNetWeights, source: State | None, chunk: Chunk,
        rotation: Rotation | None, mask: Recurrent,
    ) -> tuple[Array, State | None, None]:  # fmt: skip
        """x: [b,T,D] -> ([b,T,D], the state after the chunk, None). source: the state before it, or None.

        The third result is None because no later layer can share what this one has attended to. The chunk's
        inputs are rounded to the state's type before anything reads them, so that the result does not depend
        on where chunks begin.
        """
        # Of R + T inputs the convolutions make P + T tokens, as many as there are gates. Without a
        # source P is 0.
        T = x.shape[1]
        new, z = self.project(x, w, chunk)
        state = self.before_text(new) if source is None else of_rows(source, chunk)
        tokens = jax.tree.map(
            lambda kept, following: jnp.concatenate([kept, following.astype(kept.dtype)], 1),
            state.latest,
            new,
        )
        with jax.named_scope("convolution"):
            pairs = (tokens.queries, w.q_taps), (tokens.keys, w.k_taps), (tokens.values, w.v_taps)
            q, k, v = (convolve(inputs.astype(x.dtype), taps) for inputs, taps in pairs)
            q, k = self.key_heads(q, k)
        with jax.named_scope("delta_rule"):
            read = q * self.X**-0.5, k, v, tokens.gates[:, :, 0], tokens.gates[:, :, 1]
            empty = chunk.start == 0
            if T <= 1 + mask.spare:  # a decode step, or as short: the stored S reads the oldest count[b]
                o, matrix = delta_steps(*read, state.matrix, empty, chunk.count, chunk.row)
            else:  # a prompt, of which nothing is taken back: S reads all, and the gates 0 mark them as read
                o, matrix = delta_chunks(*read, state.matrix, empty, chunk.row)
                tokens = dataclasses.replace(tokens, gates=jnp.zeros_like(tokens.gates))
        with jax.named_scope("output"):
            o = self.norm(o[:, -T:].astype(x.dtype), w.norm) * jax.nn.silu(z.astype(jnp.float32))
            y = psum(einsum("bTnY,DnY->bTD", o.astype(x.dtype), w.o), MODEL)  # n
        after = None if source is None else with_chunk(source, chunk, matrix, tokens)
        return y, after, None

    @jax.named_scope("qkv")
    def project(self, x: Array, w: GatedDeltaNetWeights, chunk: Chunk) -> tuple[Tokens, Array]:
        """x: [b,T,D] -> (Tokens, z [b,T,n,Y], by whose silu the output is multiplied).

        g = -exp(log_rate) softplus(a + step_bias), and beta = sigmoid(b).
        """
        q, k, v, z, a, b = products(
            x, ("bTD,qD->bTq", w.q), ("bTD,qD->bTq", w.k), ("bTD,nYD->bTnY", w.v), ("bTD,nYD->bTnY", w.z),
            ("bTD,nD->bTn", w.a), ("bTD,nD->bTn", w.b),
        )  # fmt: skip
        g = -jnp.exp(w.log_rate) * jax.nn.softplus(a.astype(jnp.float32) + w.step_bias.astype(jnp.float32))
        gates = jnp.stack([g, jax.nn.sigmoid(b).astype(jnp.float32)], 2)
        gates = jnp.where(chunk.valid[..., None, None], gates, 0)
        return Tokens(queries=q, keys=k, values=v, gates=gates), z

    def before_text(self, new: Tokens) -> State:
        """The empty state before a text, without spare tokens. new: gives sizes and types."""

        def zeros(x: Array, tokens: int) -> Array:
            return jnp.zeros_like(x, shape=(x.shape[0], tokens, *x.shape[2:]))

        b, n = new.values.shape[0], new.values.shape[2]
        inputs = jax.tree.map(lambda x: zeros(x, self.W - 1), new)
        latest = dataclasses.replace(inputs, gates=zeros(new.gates, 0))
        matrix = jnp.zeros_like(new.gates, shape=(b, n, self.X, self.Y))
        return State(matrix=matrix, latest=latest, end=jnp.zeros_like(new.gates, jnp.int32, (b,)))

    def key_heads(self, *columns: Array) -> list[Array]:
        """Queries, and keys: [b,T,q] each -> [b,T,j,X] float32 each, divided by their lengths.

        Of this device's n value heads, head i reads with head i·j // n of the result.
        """
        devices, shape = lax.axis_size(MODEL), (*columns[0].shape[:2], -1, self.X)
        if self.J % devices == 0:
            heads = jnp.stack([x.reshape(shape) for x in columns])
        else:  # gather the columns, without those of padding, and take a head for each value head
            whole = lax.all_gather(jnp.stack(columns), MODEL, axis=3, tiled=True)[..., : self.J * self.X]
            n = -(-self.N // devices)  # with zeros that fill N up
            own = (lax.axis_index(MODEL) * n + jnp.arange(n)) * self.J // self.N
            heads = whole.reshape(len(columns), *shape).take(own, 3, mode="clip")
        heads = heads.astype(jnp.float32)
        return list(heads * lax.rsqrt(jnp.sum(heads * heads, -1, keepdims=True) + 1e-6))


def convolve(x: Array, taps: Array) -> Array:
    """silu of the weighted sums of each W tokens that follow one another: [b,W-1+T,...] -> [b,T,...].

    taps: [...,W], one for each of these tokens and each channel.
    """
    W = taps.shape[-1]
    T = x.shape[1] - W + 1
    parts = [taps[..., j].astype(jnp.float32) * x[:, j : j + T].astype(jnp.float32) for j in range(W)]
    return jax.nn.silu(sum(parts[1:], parts[0]).astype(x.dtype))


def consecutive(x: Array, first: Array, n: int) -> Array:
    """n tokens of each row of x [b,T,...], from first[b] on, with zeros before token 0: -> [b,n,...]."""
    at = first[:, None] + jnp.arange(n)
    at = at.reshape(*at.shape, *(1,) * (x.ndim - 2))
    return jnp.where(at < 0, 0, jnp.take_along_axis(x, jnp.maximum(at, 0), 1))


def of_rows(state: State, chunk: Chunk) -> State:
    """The state, with the latest tokens before a chunk, of its rows: those taken back are left out.

    At the start of a text all of them are zeros. The matrices are those of all rows, as they are stored: at
    the start of a text still those of an earlier one, in whose place the delta rule begins with zeros.
    """
    latest, end = state.latest, state.end
    if chunk.row is not None:
        latest, end = jax.tree.map(lambda x: x[chunk.row], (latest, end))
    # -2: two tokens were taken back. They are left out at the end, and zeros come in at the beginning.
    first = jnp.where(chunk.start == 0, -latest.keys.shape[1], chunk.start - end)
    latest = jax.tree.map(lambda x: consecutive(x, first, x.shape[1]), latest)
    return State(matrix=state.matrix, latest=latest, end=end)


def with_chunk(state: State, chunk: Chunk, matrix: Array, tokens: Tokens) -> State:
    """The state after a chunk. matrix: of all rows. tokens: those that `of_rows` left, and the chunk's."""
    latest = jax.tree.map(lambda old, x: consecutive(x, chunk.count, old.shape[1]), state.latest, tokens)
    new = latest, chunk.start + chunk.count
    if chunk.row is not None:
        old = state.latest, state.end
        new = jax.tree.map(lambda x, of_row: x.at[chunk.row].set(of_row), old, new)
    return State(matrix=matrix, latest=new[0], end=new[1])
