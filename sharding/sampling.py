"""Sampling from logits that are sharded over the vocabulary.

Letters as in model.py. These functions run inside shard_map; no device ever has all logits of a row.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ops.platform import on_cpu
from sharding.arrays import pytree
from sharding.mesh import MODEL, vocabulary_shard


@pytree
class Bias:
    """Values added to the logits of some tokens. tokens: [B,N] int32, -1 for none. values: [B,N] float32."""

    tokens: Array
    values: Array


@pytree
class Sampling:
    """The sampling options of each row: arrays [B], or None for an option that no row uses. Default: greedy.

    In the order in which they apply: repetition_penalty divides the positive logits of tokens in the text and
    multiplies the negative ones. presence_penalty is subtracted from the logits of tokens in the answer,
    frequency_penalty once for each time that they occur in it. bias is added. allowed masks the tokens that a
    grammar forbids. temperature divides the logits; with 0 the most probable token is chosen. top_k keeps the
    k most probable tokens, 0 keeps all. top_p keeps the fewest most probable tokens whose probabilities reach
    it. min_p keeps the tokens whose probability is at least this fraction of the highest. seed, uint32, and
    the position determine the draw.

    answer_start: position of the answer's first token. allowed: [B,W] uint32, one bit per token, the lowest
    bit first. top_logprobs: how many of the most probable tokens to report; MAX_TOP_LOGPROBS are computed.
    """

    seed: Array | None = None
    temperature: Array | None = None
    top_k: Array | None = None
    top_p: Array | None = None
    min_p: Array | None = None
    repetition_penalty: Array | None = None
    presence_penalty: Array | None = None
    frequency_penalty: Array | None = None
    answer_start: Array | None = None
    bias: Bias | None = None
    allowed: Array | None = None
    top_logprobs: Array | None = None


MAX_BIASES = 300  # tokens with a bias in one request
MAX_TOP_LOGPROBS = 20
_NO_BIAS: dict[str, Any] = dict(tokens=np.full(MAX_BIASES, -1, np.int32))
_NO_BIAS |= dict(values=np.zeros(MAX_BIASES, np.float32))
_NEUTRAL: dict[str, Any] = dict(  # the values without an effect, in the type of each option
    seed=np.uint32(0),
    temperature=np.float32(0),
    top_k=np.int32(0),
    top_p=np.float32(1),
    min_p=np.float32(0),
    repetition_penalty=np.float32(1),
    presence_penalty=np.float32(0),
    frequency_penalty=np.float32(0),
    answer_start=np.int32(0),
    bias=Bias(**_NO_BIAS),
    top_logprobs=np.int32(0),
)
NEUTRAL = Sampling(**_NEUTRAL)


@pytree
class TopLogprobs:
    """The n most probable tokens in descending order, and their log-probabilities: [...,n] each."""

    tokens: Array
    logprobs: Array


def argmax(logits: Array) -> Array:
    """The token with the highest logit, of equal ones the smallest id: logits [...,v] -> [...]."""
    best = lax.pmax(jnp.max(logits, -1, keepdims=True), MODEL)
    ids = jnp.where(logits == best, vocabulary_shard(logits), jnp.iinfo(jnp.int32).max)
    return lax.pmin(jnp.min(ids, -1), MODEL)


def log_normalizer(logits: Array) -> Array:
    """log(sum(exp(logits))) over the whole vocabulary: logits [...,v] -> [...,1]."""
    peak = lax.pmax(jnp.max(logits, -1, keepdims=True), MODEL)
    return peak + jnp.log(lax.psum(jnp.sum(jnp.exp(logits - peak), -1, keepdims=True), MODEL))


def logprob(logits: Array, tokens: Array) -> Array:
    """The natural log of each token's probability: logits [...,v], tokens [...] -> [...]."""
    chosen = jnp.where(vocabulary_shard(logits) == tokens[..., None], logits, 0)
    return lax.psum(jnp.sum(chosen, -1), MODEL) - log_normalizer(logits)[..., 0]


def select_top(x: Array, mass: Array, target: Array) -> Array:
    """The fewest largest entries of each row of x whose masses sum to at least `target`: [b,v] bool.

    x, mass: [b,v]. target: [b]. Equal entries are selected together. The threshold is found exactly, without
    moving or sorting the vocabulary, by a search for the 32 bits of a float. It takes 8 rounds of 4 bits, in
    each of which the devices exchange 15 sums; on a CPU, where a sum costs more than a round, 32 of one bit.
    """
    digit_bits = 1 if on_cpu() else 4
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    order = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))  # these sort like the floats
    target = jnp.maximum(target, 1e-30)[:, None]
    least = jnp.zeros((x.shape[0], 1), jnp.uint32)
    for shift in range(32 - digit_bits, -1, -digit_bits):

        def mass_from(digit: int, least=least, shift=shift) -> Array:
            return jnp.sum(jnp.where(order >= least + jnp.uint32(digit << shift), mass, 0), -1)

        masses = lax.psum(jnp.stack([mass_from(digit) for digit in range(1, 1 << digit_bits)], -1), MODEL)
        digit = jnp.sum(masses >= target, -1, keepdims=True, dtype=jnp.uint32)
        least = least + (digit << shift)
    return order >= least


def keep_top(logits: Array, mass: Callable[[Array], Array], target: Array) -> Array:
    """The logits that `select_top` selects, -inf in the place of the others: [b,v] -> [b,v].

    mass: of logits. target: [b], inf in rows that keep all. If all rows do, a CPU does not search: for 8 rows
    of 49,152 logits the searches of top-k and top-p take it longer than a third of a step of SmolLM2-135M.
    """

    def search(logits: Array) -> Array:
        return jnp.where(select_top(logits, mass(logits), target), logits, -jnp.inf)

    return lax.cond(jnp.any(target < jnp.inf), search, lambda x: x, logits) if on_cpu() else search(logits)


def top_logprobs(logits: Array, n: int) -> TopLogprobs:
    """The n most probable tokens, which are among the n most probable of each device: logits [...,v]."""
    devices = lax.axis_size(MODEL)

    def gather(x: Array) -> Array:
        """[...,m] -> [...,devices*m]."""
        own = jax.nn.one_hot(lax.axis_index(MODEL), devices, dtype=bool)[:, None]
        return lax.psum(jnp.where(own, x[..., None, :], 0), MODEL).reshape(*x.shape[:-1], -1)

    best, at = lax.top_k(logits, min(n, logits.shape[-1]))
    best, tokens = gather(best), gather(vocabulary_shard(logits)[at])
    best, at = lax.top_k(best, min(n, best.shape[-1]))
    return TopLogprobs(tokens=jnp.take_along_axis(tokens, at, -1), logprobs=best - log_normalizer(logits))


def add_at(logits: Array, tokens: Array, values) -> Array:
    """Add values [b,n] to the logits [b,v] of tokens [b,n]; -1 and tokens of other devices are left out."""
    ids = tokens - lax.axis_index(MODEL) * logits.shape[-1]
    ids = jnp.where((tokens >= 0) & (ids >= 0), ids, logits.shape[-1])
    return logits.at[jnp.arange(ids.shape[0])[:, None], ids].add(values, mode="drop")


def count_tokens(logits: Array, text: Array, start, end: Array) -> Array:
    """How often each token of this device's vocabulary shard occurs in text[b,start[b]:end[b]]: -> [b,v]."""
    at = jnp.arange(text.shape[1])
    inside = (at >= jnp.reshape(start, (-1, 1))) & (at < end[:, None])
    return add_at(jnp.zeros_like(logits), jnp.where(inside, text, -1), 1.0)


def penalize(logits: Array, sampling: Sampling, text: Array, length: Array) -> Array:
    """Penalize tokens that text[b,:length[b]] has: logits [b,v] -> [b,v]. Source: arXiv 1909.05858."""
    if sampling.repetition_penalty is not None:
        present, penalty = count_tokens(logits, text, 0, length) > 0, sampling.repetition_penalty[:, None]
        logits = jnp.where(present, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.frequency_penalty is not None:  # see serving.requests.ANSWER_PENALTIES
        assert sampling.presence_penalty is not None and sampling.answer_start is not None
        count = count_tokens(logits, text, sampling.answer_start, length)
        frequency, presence = sampling.frequency_penalty[:, None], sampling.presence_penalty[:, None]
        logits -= frequency * count + presence * (count > 0)
    return logits


def unpack_bits(allowed: Array, logits: Array) -> Array:
    """The bits of this device's vocabulary shard: allowed [b,W] uint32 -> [b,v] bool."""
    bits = (allowed[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    bits, v = bits.reshape(bits.shape[0], -1), logits.shape[-1]
    missing = max(0, v * lax.axis_size(MODEL) - bits.shape[1])  # for the padding of the vocabulary
    bits = jnp.pad(bits == 1, ((0, 0), (0, missing)))
    return lax.dynamic_slice_in_dim(bits, lax.axis_index(MODEL) * v, v, 1)


@jax.named_scope("sample")
def sample(logits: Array, sampling: Sampling, text: Array, length: Array, V: int) -> Array:
    """Choose the token after text[b,:length[b]] in each row: logits [b,v] -> [b] int32.

    A row's draw depends only on its seed, length and logits, not on other rows or the mesh.
    """
    logits = penalize(logits, sampling, text, length)
    if sampling.bias is not None:
        logits = add_at(logits, sampling.bias.tokens, sampling.bias.values)
    if sampling.allowed is not None:
        logits = jnp.where(unpack_bits(sampling.allowed, logits), logits, -jnp.inf)
    if sampling.temperature is None:
        return argmax(logits)
    drawn = sampling.temperature[:, None] > 0
    # A lower temperature may overflow. XLA would flush the inverse of a higher one to 0, and -inf * 0 is NaN.
    logits = logits / jnp.where(drawn, jnp.clip(sampling.temperature[:, None], 1e-6, 1e30), 1)
    if sampling.top_k is not None:
        logits = keep_top(logits, jnp.ones_like, jnp.where(sampling.top_k > 0, sampling.top_k, jnp.inf))
    if sampling.top_p is not None:
        target = jnp.where(sampling.top_p < 1, sampling.top_p, jnp.inf)
        logits = keep_top(logits, lambda x: jnp.exp(x - log_normalizer(x)), target)
    if sampling.min_p is not None:
        peak = lax.pmax(jnp.max(logits, -1, keepdims=True), MODEL)
        logits = jnp.where(logits < peak + jnp.log(sampling.min_p)[:, None], -jnp.inf, logits)

    def noise(seed: Array, position: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (V,))

    # The Gumbel-max trick: the argmax of logits plus Gumbel noise is a sample. Source: arXiv 1411.0030.
    assert sampling.seed is not None  # where there is a temperature
    ids = jnp.minimum(vocabulary_shard(logits), V - 1)
    return argmax(logits + jnp.where(drawn, jax.vmap(noise)(sampling.seed, length)[:, ids], 0))
