"""Guesses of the tokens to come, which a decode step can check all at once.

A guess that the model would have chosen itself is as good as chosen, so the text does not depend on guesses,
only the number of steps does. This holds for sampling too, where a draw depends on its seed and place alone.
Source: arXiv 2211.17192, with one draw in the place of two. model.decode_step checks guesses; here they are
made.

What engine.Engine asks of Lookup and Draft: `start` once; `begin` and `prefill` whenever it calls them of
the model; `guess` before each decode step and `follow` after it.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import model
from checkpoints.errors import UserError
from model import Cache, Config, Output, Sampling
from ops import cpu

NGRAM = 3  # tokens that Lookup compares at most
# Tokens to guess at a time, at most. A longer step is no decode to a CPU, which then rounds int8 products in
# another way: guesses would change the text. Nor would a TPU's decode kernel take it at 8 heads per key head.
MOST = cpu.DECODE - 1


def check_guesses(guesses: int) -> int:
    """The number itself. UserError if a step cannot check so many."""
    if not 1 <= guesses <= MOST:
        raise UserError(f"{str(guesses)[:40]} guesses at a time are not between 1 and {MOST}")
    return guesses


class Lookup:
    """Guesses what followed when the last few tokens were last in the text. Source: arXiv 2304.04487."""

    masks = frozenset()

    def __init__(self, guesses: int):
        self.guesses = check_guesses(guesses)

    def start(self, cfg: Config, mesh: Mesh, rows: int, max_len: int) -> None:
        self.mesh = mesh

    def begin(self, *_) -> None:
        pass

    def prefill(self, *_) -> None:
        pass

    def guess(self, count, sampling: Sampling, cache: Cache) -> tuple[Array, Array]:
        """-> (guesses [B,N], count [B] with those that are to be checked)."""
        return lookup(count, cache.tokens, cache.length, guesses=self.guesses, mesh=self.mesh)

    def follow(self, output: Output) -> None:
        pass


@partial(jax.jit, static_argnames=("guesses", "mesh"))
def lookup(count, text: Array, length: Array, *, guesses: int, mesh: Mesh) -> tuple[Array, Array]:
    """text: [B,S], of which each row's first 1 + length[B] tokens are known. count: [B], see decode_step."""

    @partial(jax.shard_map, mesh=mesh, in_specs=(P("data"),) * 3, out_specs=(P("data"),) * 2)
    def on_device(count: Array, text: Array, length: Array) -> tuple[Array, Array]:
        slots = jnp.arange(text.shape[1])
        same, matches = slots < length[:, None], 0
        for back in range(NGRAM):
            last = jnp.take_along_axis(text, length[:, None] - back, 1, mode="clip")
            same &= (jnp.roll(text, back, 1) == last) & (slots >= back)
            matches += same
        # The longest match, and of these the last; what followed it, again and again if it is shorter.
        best = jnp.argmax(matches * slots.size + jnp.where(matches > 0, slots, 0), 1)[:, None]
        period = length[:, None] - best
        found = jnp.take_along_axis(matches, best, 1)[:, 0] > 0
        at = best + 1 + jnp.arange(guesses) % jnp.maximum(period, 1)
        known = jnp.take_along_axis(text, at, 1, mode="clip")
        return known, jnp.where(found, count, jnp.minimum(count, 1))

    return on_device(count, text, length)


def mesh_for_draft(cfg: Config, mesh: Mesh) -> Mesh:
    """A mesh for this model of the devices of another's, in the same order, as one program needs them.

    Raises ValueError if it cannot be divided so.
    """
    shape = model.mesh_shape(cfg, mesh.shape["data"], 1, mesh.size // mesh.shape["data"])
    devices = mesh.devices.reshape(tuple(shape.values()))
    return Mesh(devices, tuple(shape), axis_types=mesh.axis_types)


class Draft:
    """Guesses what a smaller model of the same vocabulary would say, which draws with the same seeds."""

    def __init__(self, weights: model.Weights, cfg: Config, mesh: Mesh, kv_dtype: str, guesses: int):
        self.weights, self.static, self.kv_dtype = weights, dict(cfg=cfg, mesh=mesh), kv_dtype
        self.guesses, self.masks = check_guesses(guesses), cfg.masks

    def start(self, cfg: Config, mesh: Mesh, rows: int, max_len: int) -> None:
        if cfg.V != self.static["cfg"].V:
            raise UserError(f"the draft has {self.static['cfg'].V} tokens, the model {cfg.V}")
        self.cache = model.init_cache(**self.static, batch=rows, max_len=max_len, dtype=self.kv_dtype)

    def begin(self, *arguments) -> None:
        self.cache = model.begin(*arguments, self.cache, **self.static)

    def prefill(self, rows, count, width: int) -> None:
        _, self.cache = model.prefill(rows, count, self.weights, self.cache, width=width, **self.static)

    def guess(self, count, sampling: Sampling, cache: Cache) -> tuple[Array, Array]:
        guesses, self.count, self.cache = read_ahead(
            count, sampling, self.weights, self.cache, guesses=self.guesses, **self.static
        )
        return guesses, self.count

    def follow(self, output: Output) -> None:
        self.cache = correct(self.cache, self.count, output, mesh=self.static["mesh"])


@partial(jax.jit, static_argnames=("guesses", "cfg", "mesh"), donate_argnames="cache")
def read_ahead(
    count, sampling: Sampling, weights, cache: Cache, *, guesses: int, cfg: Config, mesh: Mesh
) -> tuple[Array, Array, Cache]:
    """Decode as many tokens as may be looked at: -> (guesses [B,N], count [B], the cache that has read them).

    The last guess is read too, for it may be right.
    """
    start = cache.length
    count = jnp.minimum(count, model.room(start, cfg))

    def read_one(i, cache: Cache) -> Cache:
        reads = (i < count).astype(jnp.int32)
        return model.decode_step(reads, None, sampling, weights, cache, cfg=cfg, mesh=mesh)[1]

    cache = lax.fori_loop(0, 1 + guesses, read_one, cache)
    at = start[:, None] + 1 + jnp.arange(guesses)
    return jnp.take_along_axis(cache.tokens, at, 1, mode="clip"), count, cache


@partial(jax.jit, static_argnames="mesh", donate_argnames="cache")
def correct(cache: Cache, ahead: Array, output: Output, *, mesh: Mesh) -> Cache:
    """The draft's cache, `ahead` [B] tokens of which were guesses or led to them, with what was chosen."""

    @partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def on_device(text: Array, length: Array, output: Output) -> tuple[Array, Array]:
        rows, i = jnp.arange(text.shape[0])[:, None], jnp.arange(output.tokens.shape[1])
        at = jnp.where(i < output.count[:, None], length[:, None] + 1 + i, text.shape[1])
        return text.at[rows, at].set(output.tokens, mode="drop"), length + output.count

    tokens, length = on_device(cache.tokens, cache.length - ahead, output)
    return Cache(layers=cache.layers, tokens=tokens, length=length)
