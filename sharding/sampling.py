"""How the next token is chosen, from logits of which each device has a shard of the vocabulary.

Letters as in model.py. All these functions run inside shard_map; no device ever has all logits of a row.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ops.platform import on_cpu
from sharding.arrays import pytree
from sharding.mesh import MODEL


@pytree
class Bias:
    """What is added to some logits. tokens: [B,N] int32, -1 for none. values: [B,N] float32."""

    tokens: Array
    values: Array


@pytree
class Sampling:
    """How each row chooses its next token: [B] each, or None for what no row asks for. By default greedy.

    In the order in which they apply: repetition_penalty divides the positive logits of tokens that are in the
    text, and multiplies the negative ones. presence_penalty is taken from the logits of tokens that are in
    the answer, frequency_penalty as often as they are. bias is added. allowed: what a grammar leaves.
    temperature divides all logits; 0 takes the likeliest. top_k keeps the likeliest k, 0 all. top_p keeps the
    likeliest that hold this much probability; min_p those at least this much as likely as the likeliest.
    seed: uint32, with the position makes the draw.

    answer_start: where the answer begins in the text. allowed: [B,W] uint32, a bit for each token, the lowest
    first. top_logprobs: how many of the likeliest tokens are to be reported; MAX_TOP_LOGPROBS are.
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


MAX_BIASES = 300  # tokens that a request may have a bias for
MAX_TOP_LOGPROBS = 20  # likeliest tokens that may be reported
NEUTRAL = Sampling(  # what asks for nothing, and the types
    seed=np.uint32(0),
    temperature=np.float32(0),
    top_k=np.int32(0),
    top_p=np.float32(1),
    min_p=np.float32(0),
    repetition_penalty=np.float32(1),
    presence_penalty=np.float32(0),
    frequency_penalty=np.float32(0),
    answer_start=np.int32(0),
    bias=Bias(tokens=np.full(MAX_BIASES, -1, np.int32), values=np.zeros(MAX_BIASES, np.float32)),
    top_logprobs=np.int32(0),
)


@pytree
class TopLogprobs:
    """Tokens in the order of their probability, and its logarithm by the model's own logits: [...,n] each."""

    tokens: Array
    logprobs: Array


def vocabulary_shard(logits: Array) -> Array:
    """The token ids, [v] int32, that this device's logits stand for."""
    return lax.axis_index(MODEL) * logits.shape[-1] + jnp.arange(logits.shape[-1])


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
    search over the 32 bits of a float, in 8 rounds in which devices exchange 15 sums. On a CPU a sum costs
    more than a round: there are 32, of one sum.
    """
    digit_bits = 1 if on_cpu() else 4
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    order = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))  # sorts like the floats
    target = jnp.maximum(target, 1e-30)[:, None]
    least = jnp.zeros((x.shape[0], 1), jnp.uint32)
    for shift in range(32 - digit_bits, -1, -digit_bits):

        def mass_from(digit: int, least=least, shift=shift) -> Array:
            return jnp.sum(jnp.where(order >= least + jnp.uint32(digit << shift), mass, 0), -1)

        masses = lax.psum(jnp.stack([mass_from(digit) for digit in range(1, 1 << digit_bits)], -1), MODEL)
        digit = jnp.sum(masses >= target, -1, keepdims=True, dtype=jnp.uint32)
        least = least + (digit << shift)
    return order >= least


def top_logprobs(logits: Array, n: int) -> TopLogprobs:
    """The n likeliest tokens: logits [...,v] -> [...,n]. They are among the likeliest n of each device."""
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
    """logits [b,v] with values [b,n] added at tokens [b,n]; those of other devices, and -1, are left out."""
    ids = tokens - lax.axis_index(MODEL) * logits.shape[-1]
    ids = jnp.where((tokens >= 0) & (ids >= 0), ids, logits.shape[-1])
    return logits.at[jnp.arange(ids.shape[0])[:, None], ids].add(values, mode="drop")


def count_tokens(logits: Array, text: Array, start, end: Array) -> Array:
    """How often each token of this device's vocabulary shard is in text [b,start[b]:end[b]]: -> [b,v]."""
    at = jnp.arange(text.shape[1])
    inside = (at >= jnp.reshape(start, (-1, 1))) & (at < end[:, None])
    return add_at(jnp.zeros_like(logits), jnp.where(inside, text, -1), 1.0)


def penalize(logits: Array, how: Sampling, text: Array, length: Array) -> Array:
    """The penalties of what text [b,:length[b]] has: logits [b,v] -> [b,v]. Source: arXiv 1909.05858."""
    if how.repetition_penalty is not None:
        present, penalty = count_tokens(logits, text, 0, length) > 0, how.repetition_penalty[:, None]
        logits = jnp.where(present, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    if how.frequency_penalty is not None:  # and what belongs to it
        count = count_tokens(logits, text, how.answer_start, length)
        logits -= how.frequency_penalty[:, None] * count + how.presence_penalty[:, None] * (count > 0)
    return logits


def unpack_bits(allowed: Array, logits: Array) -> Array:
    """[b,W] uint32 -> [b,v] bool: the bits of this device's vocabulary shard."""
    bits = (allowed[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    bits, v = bits.reshape(bits.shape[0], -1), logits.shape[-1]
    missing = max(0, v * lax.axis_size(MODEL) - bits.shape[1])  # of the vocabulary's padding
    bits = jnp.pad(bits == 1, ((0, 0), (0, missing)))
    return lax.dynamic_slice_in_dim(bits, lax.axis_index(MODEL) * v, v, 1)


@jax.named_scope("sample")
def sample(logits: Array, how: Sampling, text: Array, length: Array, V: int) -> Array:
    """Choose a token to follow text [b,:length[b]] in each row: logits [b,v] -> [b] int32.

    A row's draw depends on its seed, its length and its logits alone, not on its neighbours or the mesh.
    """
    logits = penalize(logits, how, text, length)
    if how.bias is not None:
        logits = add_at(logits, how.bias.tokens, how.bias.values)
    if how.allowed is not None:
        logits = jnp.where(unpack_bits(how.allowed, logits), logits, -jnp.inf)
    if how.temperature is None:
        return argmax(logits)
    drawn = how.temperature[:, None] > 0
    # Less may overflow; of more XLA would make 0, by which what is -inf becomes NaN.
    logits = logits / jnp.where(drawn, jnp.clip(how.temperature[:, None], 1e-6, 1e30), 1)
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
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (V,))

    # The likeliest after adding Gumbel noise is a draw. Source: arXiv 1411.0030.
    ids = jnp.minimum(vocabulary_shard(logits), V - 1)
    return argmax(logits + jnp.where(drawn, jax.vmap(noise)(how.seed, length)[:, ids], 0))
