"""The gated delta rule: a layer's memory as a matrix that each token decays, corrects and reads.

The state S of a head, [X,Y], answers a key of width X with a value of width Y. For each token with a query q,
a key k, a value v, a decay exp(g) and a strength beta:

    S = exp(g) S                what is remembered fades: g <= 0
    S = S + k beta (v - k S)    what S answers to k moves towards v, at beta = 1 all the way
    o = q S                     the token reads S after it has written

Keys have the length 1. A token with beta = g = 0 leaves S as it is: that is how padding is marked.
Sources: arXiv 2412.06464; the form by chunks: arXiv 2406.06484.

The rule is here twice: `delta_steps` reads a few tokens one after the other, `delta_chunks` many tokens by
matrix products. Both change the states of some rows: row[b] of S [R,N,X,Y] is row b of the other arrays;
None: all rows, in order. On TPUs the kernels of ops/delta_kernels.py take their place.

Letters: B rows, T tokens, J heads of keys, N heads of values, of which N/J read with the same key, X width of
a key, Y width of a value, R rows of states; here sizes are those on this device, though uppercase. All arrays
are float32, but v has the type of the activations.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

CHUNK = 64  # tokens that `delta_chunks` reads at a time, as matrix products


def delta_steps(
    q: Array, k: Array, v: Array, g: Array, beta: Array, S: Array, empty: Array, keep: Array,
    row: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Token by token: -> (o [B,T,N,Y], S with the state after the first keep[b] tokens of each row).

    q, k: [B,T,J,X]. v: [B,T,N,Y]. g, beta: [B,T,N]. empty: [B] bool, whether a row begins with S = 0,
    whatever S is. keep: [B] int32, up to T. Where it is 0 the state stays as it is, and o is not defined.

    All tokens are read for their outputs, while `kept` is the state that a row ends with.
    """
    stored, each = of_rows(S, row), v.shape[2] // q.shape[2]
    q, k, v = *(jnp.repeat(x, each, 2) for x in (q, k)), v.astype(jnp.float32)

    def step(carry: tuple[Array, Array], token: tuple) -> tuple[tuple[Array, Array], Array]:
        (S, kept), (t, q, k, v, g, beta) = carry, token
        S = jnp.exp(g)[..., None, None] * S
        change = beta[..., None] * (v - jnp.einsum("bnX,bnXY->bnY", k, S, precision="highest"))
        S = S + k[..., None] * change[..., None, :]
        o = jnp.einsum("bnX,bnXY->bnY", q, S, precision="highest")
        return (S, jnp.where((t < keep)[:, None, None, None], S, kept)), o

    tokens = jax.tree.map(lambda x: x.swapaxes(0, 1), (q, k, v, g, beta))
    before = jnp.where(empty[:, None, None, None], 0, stored)
    (_, kept), o = lax.scan(step, (before, stored), (jnp.arange(q.shape[1]), *tokens))
    return o.swapaxes(0, 1), with_rows(S, row, kept)


def of_rows(S: Array, row: Array | None) -> Array:
    return S if row is None else S[row]


def with_rows(S: Array, row: Array | None, new: Array) -> Array:
    return new if row is None else S.at[row].set(new)


def delta_chunks(
    q: Array, k: Array, v: Array, g: Array, beta: Array, S: Array, empty: Array, row: Array | None = None
) -> tuple[Array, Array]:
    """CHUNK tokens at a time: -> (o [B,T,N,Y], S with the rows' states after all tokens).

    Arguments: see `delta_steps`.

    Within a chunk token i changes S by k_i c_i, where G_i is the sum of g up to token i, and

        c_i = beta_i (v_i - exp(G_i) k_i S - sum_{j<i} exp(G_i - G_j) (k_i k_j) c_j)

    That is a triangular system (I + L) c = beta (v - exp(G) k S), whose matrix does not depend on S. So its
    inverse is computed for all chunks at once, and what is left to do in turn are four products per chunk:
    with `values` and `reads`, which are that inverse times beta v and beta exp(G) k, c = values - reads S. No
    exponent is positive: exp(-G) alone would overflow.
    """
    before = jnp.where(empty[:, None, None, None], 0, of_rows(S, row))
    T, dot = q.shape[1], lambda spec, *x: jnp.einsum(spec, *x, precision="highest")
    of_value_heads = partial(jnp.repeat, repeats=v.shape[2] // q.shape[2], axis=2)

    def in_chunks(x: Array) -> Array:
        """[B,T,N,...] -> [chunks,B,N,CHUNK,...], the last one filled up with zeros."""
        x = jnp.pad(x, [(0, 0), (0, -T % CHUNK)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:]), (1, 3), (0, 2))

    q, k, v, g, beta = map(in_chunks, (q, k, v.astype(jnp.float32), g, beta))
    # between[i,j]: the sum of g of the tokens after j, up to i. A difference of two running sums would be
    # rounded as they are. fading: of what token j has written, until i reads it. faded: of the state before.
    earlier = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    between = jnp.cumsum(jnp.where(earlier & ~jnp.eye(CHUNK, dtype=bool), g[..., None], 0), -2)
    fading = jnp.exp(jnp.where(earlier, between, -jnp.inf))
    faded = jnp.exp(jnp.cumsum(g, -1))
    similar = of_value_heads(dot("cbniX,cbnjX->cbnij", k, k))
    L = jnp.tril(beta[..., None] * similar * fading, -1)
    inverse = inverse_of_unit_triangle(L)
    scores = of_value_heads(dot("cbniX,cbnjX->cbnij", q, k)) * fading
    q, k = of_value_heads(q), of_value_heads(k)
    values = dot("cbnij,cbnjY->cbniY", inverse, beta[..., None] * v)
    reads = dot("cbnij,cbnjX->cbniX", inverse, (beta * faded)[..., None] * k)
    q, k = faded[..., None] * q, fading[..., -1, :, None] * k

    def step(S: Array, chunk: tuple) -> tuple[Array, Array]:
        values, reads, scores, q, k, faded = chunk
        change = values - dot("bniX,bnXY->bniY", reads, S)
        o = dot("bniX,bnXY->bniY", q, S) + dot("bnij,bnjY->bniY", scores, change)
        return faded[..., None, None] * S + dot("bniX,bniY->bnXY", k, change), o

    after, o = lax.scan(step, before, (values, reads, scores, q, k, faded[..., -1]))
    o = jnp.moveaxis(o, (0, 2), (1, 3))
    return o.reshape(o.shape[0], -1, *o.shape[3:])[:, :T], with_rows(S, row, after)


def inverse_of_unit_triangle(L: Array) -> Array:
    """(I + L)^-1, where L [...,n,n] is 0 on and above the diagonal; n is a power of two.

    Blocks of the inverse's diagonal are joined two by two, as forward substitution would:
    the inverse of [[A, 0], [B, C]] is [[A^-1, 0], [-C^-1 B A^-1, C^-1]].
    """
    n = L.shape[-1]
    i, j = jnp.arange(n)[:, None], jnp.arange(n)
    inverse, size = jnp.broadcast_to(jnp.eye(n), L.shape), 1
    while size < n:
        between = (i // (2 * size) == j // (2 * size)) & (i // size != j // size)
        below = jnp.where(between, L, 0)
        inverse = inverse - jnp.matmul(
            jnp.matmul(inverse, below, precision="highest"), inverse, precision="highest"
        )
        size *= 2
    return inverse
