"""What a server adds to the model: rows of text on the device, and steps that read them and choose tokens.

A row's tokens lie on the device beside its keys and values, so that the next step can be sent off before the
host has seen what the last one chose. A step says which tokens are read and what becomes of the results;
executors.py says how the layers run in between.
"""

import dataclasses
import functools
import math
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import model
from model import Cache, Chunk, Config, LayerKind, Weights
from serving.reuse import places, rollback_limit
from sharding.arrays import ArrayInfo, abstract, pytree, specs, zeros
from sharding.mesh import MODEL, ROWS, STAGE
from sharding.sampling import MAX_TOP_LOGPROBS, Sampling, TopLogprobs, logprob, sample, top_logprobs
from sharding.stages import StageInputs, first_stage

MOST_SCORED = 512  # tokens of a prefill chunk whose logits are computed at a time


@pytree
class Batch:
    """The rows of a batch: their memories and their tokens.

    tokens: [b,S] int32. A row has read its first cache.length[b] tokens and reads the next one next. The
    tokens after it are the unread rest of a prompt, or garbage. -1: a token that the last pipeline stage has
    chosen and this stage does not know.
    kept: one for each layer: the states of each row in so many places, a tree of [b,I,...], see
    Recurrent.kept; None for layers whose states are not kept, and for those that have none.
    stage_inputs: None if there is one stage.
    """

    cache: Cache
    tokens: Array
    kept: list
    stage_inputs: StageInputs | None = None

    def replace(self, **changes) -> "Batch":
        """The batch with other `layers`, `length` or fields of its own."""
        cache = {name: changes.pop(name) for name in ("layers", "length") if name in changes}
        return dataclasses.replace(self, cache=dataclasses.replace(self.cache, **cache), **changes)


def batch_infos(cfg: Config, rows: int, max_len: int, dtype, stages: int = 1) -> Batch:
    """The declared Batch of as many rows of up to `max_len` tokens. dtype: of the cache."""
    tokens: Any = ArrayInfo("bS", shape=(rows, max_len), dtype=jnp.int32)
    own = first_stage(cfg, stages)
    kept = [kept_infos(kind, rows, max_len, dtype) for kind in own.layers]
    return Batch(cache=model.cache_infos(own, rows, max_len, dtype), tokens=tokens, kept=kept)


def kept_infos(kind: LayerKind, rows: int, max_len: int, dtype):
    """The declared places for a layer's states, see Batch.kept."""
    if not (n := places([kind.mask])):
        return None
    return jax.tree.map(lambda info: info.in_places(n), model.memory_info(kind, rows, max_len, dtype))


def init_batch(cfg: Config, mesh: Mesh, rows: int, max_len: int, dtype, allocate=zeros) -> Batch:
    """A Batch of empty rows. allocate: makes the arrays of a tree of shapes."""
    return allocate(abstract(batch_infos(cfg, rows, max_len, dtype, mesh.shape[STAGE]), mesh))


def by_rows(mesh: Mesh, *in_specs, out_specs=P(ROWS)):  # noqa: B008  a PartitionSpec is immutable
    """shard_map for what each data shard does with its own rows. in_specs: P(ROWS) for all by default."""
    return partial(jax.shard_map, mesh=mesh, in_specs=in_specs or P(ROWS), out_specs=out_specs)


@partial(jax.jit, static_argnames=("cfg", "mesh"), donate_argnames="batch")
def assign_rows(rows, tokens, length, source, batch: Batch, place=None, *, cfg: Config, mesh: Mesh) -> Batch:
    """Put new texts into rows. The batch is donated: the old one is gone.

    rows: [n] int32, the same number for each data shard, counted from 0 within the shard; -1 is skipped.
    tokens: [n,S] int32. length: [n] int32: so many first tokens count as read, because their keys and values
    are cached already. source: [n] int32, the row of the same shard whose memory holds them and is copied;
    None: each row's own memory holds them. place: [n] int32, in which place of the source the states of this
    length are; -1: they are its latest. None: as if all were -1.
    """
    memories, of_memories = (batch.cache.layers, batch.kept), memories_specs(batch, cfg, mesh)

    @by_rows(mesh)
    def set_texts(rows: Array, tokens: Array, length: Array, old_tokens: Array, old_length: Array):
        rows = jnp.where(rows < 0, old_length.size, rows)
        return old_tokens.at[rows].set(tokens, mode="drop"), old_length.at[rows].set(length, mode="drop")

    @by_rows(mesh, P(ROWS), P(ROWS), P(ROWS), of_memories, out_specs=of_memories)
    def copy_prefixes(rows: Array, source: Array, place: Array | None, memories: tuple[list, list]):
        layers, kept = memories
        for i in range(rows.size):
            to = jnp.maximum(rows[i], 0)
            prefix = jnp.where(rows[i] < 0, to, source[i])
            layers = jax.tree.map(partial(copy_row, source=prefix, to=to), layers)
            for j, states in enumerate(kept if place is not None else ()):
                if states is not None:
                    from_place = jnp.where(rows[i] < 0, -1, place[i])
                    restore = partial(state_from_place, to=to, source=prefix, place=from_place)
                    layers[j] = jax.tree.map(restore, layers[j], states)
        return layers, kept

    tokens, length = set_texts(rows, tokens, length, batch.tokens, batch.cache.length)
    layers, kept = memories if source is None else copy_prefixes(rows, source, place, memories)
    return batch.replace(layers=layers, kept=kept, length=length, tokens=tokens)


def memories_specs(batch: Batch, cfg: Config, mesh: Mesh) -> tuple[list, list]:
    """The PartitionSpecs of `batch.cache.layers` and of `batch.kept`."""
    kinds, layers = first_stage(cfg, mesh.shape[STAGE]).layers, batch.cache.layers
    kept = [x and kept_infos(kind, 0, 0, x.dtype) for kind, x in zip(kinds, layers, strict=True)]
    return model.memory_specs(kinds, layers), specs(kept, batch.kept)


def copy_row(x: Array, source: Array, to: Array) -> Array:
    """x: [b,...], with row `source` copied over row `to`."""
    return lax.dynamic_update_slice_in_dim(x, lax.dynamic_slice_in_dim(x, source, 1), to, 0)


def state_from_place(x: Array, kept: Array, to: Array, source: Array, place: Array) -> Array:
    """x: [b,...], with what a place of row `source` in `kept` [b,I,...] has in row `to`; place -1: as is."""
    own = lax.dynamic_slice_in_dim(x, to, 1)
    places = lax.dynamic_slice_in_dim(kept, source, 1)
    state = lax.dynamic_index_in_dim(places, jnp.maximum(place, 0), 1, keepdims=False)
    return lax.dynamic_update_slice_in_dim(x, jnp.where(place < 0, own, state), to, 0)


@partial(jax.jit, static_argnames=("cfg", "mesh"), donate_argnames="batch")
def keep_states(rows, place, batch: Batch, *, cfg: Config, mesh: Mesh) -> Batch:
    """Keep the states of rows, as they are now. The batch is donated: the old one is gone.

    rows, place: [n] int32, as in `assign_rows`; a row whose place is -1 is skipped.
    """
    memories, of_memories = (batch.cache.layers, batch.kept), memories_specs(batch, cfg, mesh)

    @by_rows(mesh, P(ROWS), P(ROWS), of_memories, out_specs=of_memories)
    def on_device(rows: Array, place: Array, memories: tuple[list, list]):
        layers, kept = memories

        def keep(x: Array, places: Array) -> Array:
            for row, at in zip(rows, place, strict=True):
                begin = (row, jnp.maximum(at, 0), *(0 for _ in x.shape[1:]))
                old = lax.dynamic_slice(places, begin, (1, 1, *x.shape[1:]))
                new = lax.dynamic_slice_in_dim(x, row, 1)[:, None]
                places = lax.dynamic_update_slice(places, jnp.where(at < 0, old, new), begin)
            return places

        return layers, [x and jax.tree.map(keep, layers[i], x) for i, x in enumerate(kept)]

    layers, kept = on_device(rows, place, memories)
    return batch.replace(layers=layers, kept=kept)


@partial(jax.jit, static_argnames=("cfg", "mesh"))
def read_rows(rows, batch: Batch, *, cfg: Config, mesh: Mesh) -> tuple[list, list]:
    """The memories of one row of each data shard, and its kept states: -> (layers, kept), see Batch.

    rows: [n] int32, as in `assign_rows`, none of them -1.
    """
    memories, of_memories = (batch.cache.layers, batch.kept), memories_specs(batch, cfg, mesh)

    @by_rows(mesh, P(ROWS), of_memories, out_specs=of_memories)
    def on_device(rows: Array, memories: tuple[list, list]):
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, rows[0], 1), memories)

    return on_device(rows, memories)


@partial(jax.jit, static_argnames=("cfg", "mesh"), donate_argnames="batch")
def write_rows(rows, saved: tuple[list, list], batch: Batch, *, cfg: Config, mesh: Mesh) -> Batch:
    """Replace the memories of one row of each data shard. The batch is donated: the old one is gone.

    rows: [n] int32, as in `assign_rows`; -1 is skipped. saved: what `read_rows` returns.
    """
    memories, of_memories = (batch.cache.layers, batch.kept), memories_specs(batch, cfg, mesh)

    @by_rows(mesh, P(ROWS), of_memories, of_memories, out_specs=of_memories)
    def on_device(rows: Array, saved: tuple[list, list], memories: tuple[list, list]):
        row, skip = jnp.maximum(rows[0], 0), rows[0] < 0

        def replace(x: Array, new: Array) -> Array:
            new = jnp.where(skip, lax.dynamic_slice_in_dim(x, row, 1), new)
            return lax.dynamic_update_slice_in_dim(x, new, row, 0)

        return jax.tree.map(replace, memories, saved)

    layers, kept = on_device(rows, saved, memories)
    return batch.replace(layers=layers, kept=kept)


class Step(Protocol):
    """What is done with the rows of a batch before and after the layers.

    Neither function uses the layers' weights or caches: an executor may replace both by empty lists.
    reads_output: whether `finish` reads x; if not, all that counts are the caches.
    """

    @property
    def reads_output(self) -> bool: ...

    def read_inputs(self, batch: Batch, cfg: Config, mesh: Mesh) -> tuple[Array, Chunk]:
        """-> (tokens [B,T] to be read, the Chunk that they are)."""

    def finish(
        self, x: Array, tokens: Array, chunk: Chunk, w: Weights, batch: Batch, cfg: Config, mesh: Mesh
    ):
        """x: [B,T,D] after the layers -> (what the host is told, the Batch after the step)."""


@pytree
class Scores:
    """The natural log of each next token's probability, [n,T], and the likeliest tokens in its place."""

    logprobs: Array
    top_logprobs: TopLogprobs | None


@pytree
class PrefillChunk:
    """Read more of the prompts of some rows: -> Scores [n,T], or without scores the rows' new lengths [n].

    rows: [n] int32, different ones, as in `assign_rows`; None: all rows. count: [n] int32, how many tokens of
    each. width: T, the most that `count` may be. score: how many of the likeliest tokens to report at each
    position; None computes no scores.
    """

    rows: Array | None
    count: Array
    width: int = dataclasses.field(metadata=dict(static=True))
    score: int | None = dataclasses.field(default=None, metadata=dict(static=True))

    @property
    def reads_output(self) -> bool:
        return self.score is not None

    def read_inputs(self, batch: Batch, cfg: Config, mesh: Mesh) -> tuple[Array, Chunk]:
        @by_rows(mesh)
        def on_device(rows: Array | None, count: Array, tokens: Array, length: Array):
            tokens, length = of_rows(rows, (tokens, length))
            chunk = model.chunk_at(length, count, self.width, rows)
            return tokens_at(tokens, chunk.positions), chunk

        return on_device(self.rows, self.count, batch.tokens, batch.cache.length)

    def finish(
        self, x: Array, tokens: Array, chunk: Chunk, w: Weights, batch: Batch, cfg: Config, mesh: Mesh
    ):
        lengths = chunk.start + chunk.count
        result = lengths if self.score is None else self.scores(x, chunk, w, batch, cfg, mesh)
        return result, batch.replace(length=longer(batch.cache.length, chunk.row, chunk.count, mesh))

    def scores(self, x: Array, chunk: Chunk, w: Weights, batch: Batch, cfg: Config, mesh: Mesh) -> Scores:
        @by_rows(mesh, P(ROWS), P(ROWS), P(ROWS), model.outer_specs(cfg, w))
        def on_device(x: Array, chunk: Chunk, tokens: Array, w: Weights):
            def score_part(part: tuple[Array, Array]) -> Scores:
                logits = model.local_logits(part[0][None], w, cfg)[0]
                best = top_logprobs(logits, self.score) if self.score else None
                return Scores(logprobs=logprob(logits, part[1]), top_logprobs=best)

            following = tokens_at(of_rows(chunk.row, tokens), chunk.positions + 1)
            parts = -1, math.gcd(self.width, MOST_SCORED)  # because all logits at once may not fit
            scores = lax.map(score_part, (x.reshape(*parts, x.shape[2]), following.reshape(parts)))
            return jax.tree.map(lambda x: x.reshape(*following.shape, *x.shape[2:]), scores)

        return on_device(x, chunk, batch.tokens, model.without_layers(w))


@pytree
class Output:
    """What a decode step chose in each row.

    tokens: [B,T], of which row b has the first count[b]. logprobs: [B,T], of each token by the model's own
    logits. drafted: [B], how many draft tokens were checked; count - 1 of them were accepted. top_logprobs:
    [B,T,n], the tokens with the highest probabilities; None if no row asks for them.
    """

    tokens: Array
    logprobs: Array
    count: Array
    drafted: Array
    top_logprobs: TopLogprobs | None = None


@pytree
class DecodeStep:
    """Read the next token of some rows and choose the one after it: -> Output.

    count: [B] int32: 0 leaves a row as it is, 1 reads its next token, 1 + n reads also n drafts after it.
    drafts: [B,T-1] int32, guesses of the tokens after the next, or None. A draft that equals what is chosen
    in its place is accepted, so that one step can choose several tokens: the same ones that as many steps
    without drafts would choose. A row must not grow beyond max_len: tokens beyond it are dropped.
    rows: [B] int32, different ones, as in `assign_rows`; None: all rows. The other arguments and the Output
    are of these rows, in this order.
    """

    count: Array
    drafts: Array | None = None
    sampling: Sampling = Sampling()
    rows: Array | None = None
    reads_output = True

    def read_inputs(self, batch: Batch, cfg: Config, mesh: Mesh) -> tuple[Array, Chunk]:
        T = 1 if self.drafts is None else 1 + self.drafts.shape[1]

        @by_rows(mesh)
        def on_device(rows: Array | None, count: Array, drafts: Array | None, tokens: Array, length: Array):
            tokens, length = of_rows(rows, (tokens, length))
            chunk = model.chunk_at(length, jnp.minimum(count, most_readable(length, cfg)), T, rows)
            tokens = tokens_at(tokens, chunk.positions[:, :1])
            return tokens if drafts is None else jnp.concatenate([tokens, drafts], 1), chunk

        return on_device(self.rows, self.count, self.drafts, batch.tokens, batch.cache.length)

    def finish(
        self, x: Array, tokens: Array, chunk: Chunk, w: Weights, batch: Batch, cfg: Config, mesh: Mesh
    ):
        @by_rows(mesh, P(ROWS, None, MODEL), *[P(ROWS)] * 4)
        def choose(logits: Array, read: Array, chunk: Chunk, sampling: Sampling, tokens: Array):
            T, rows = read.shape[1], jnp.arange(read.shape[0])[:, None]
            own = of_rows(chunk.row, tokens)
            # `sample` gets the text with the drafts in it, so that the penalties at a position count the
            # drafts before it. The stored tokens do not get them.
            with_drafts = own.at[rows, chunk.positions].set(read, mode="drop")
            per_token = jax.tree.map(partial(jnp.repeat, repeats=T, axis=0), (sampling, with_drafts))
            length = chunk.positions.reshape(-1) + 1
            chosen = sample(logits.reshape(-1, logits.shape[-1]), *per_token, length, cfg.V)
            chosen = chosen.reshape(read.shape)
            count = accepted(read, chosen, chunk.count)
            to = jnp.where(jnp.arange(T) < count[:, None], chunk.positions + 1, tokens.shape[1])
            best = None if sampling.top_logprobs is None else top_logprobs(logits, MAX_TOP_LOGPROBS)
            output = Output(
                tokens=chosen,
                logprobs=logprob(logits, chosen),
                count=count,
                drafted=jnp.maximum(chunk.count - 1, 0),
                top_logprobs=best,
            )
            stored_in = rows if chunk.row is None else chunk.row[:, None]
            return output, tokens.at[stored_in, to].set(chosen, mode="drop")

        logits = model.unembed(x, w, cfg=cfg, mesh=mesh)
        output, all_tokens = choose(logits, tokens, chunk, self.sampling, batch.tokens)
        length = longer(batch.cache.length, chunk.row, output.count, mesh)
        return output, batch.replace(tokens=all_tokens, length=length)


def of_rows(rows: Array | None, tree):
    """These rows of each array [b,...], without a copy if `rows` is None: all rows."""
    return tree if rows is None else jax.tree.map(lambda x: x[rows], tree)


def longer(length: Array, rows: Array | None, count: Array, mesh: Mesh) -> Array:
    """The lengths [B] of all rows, after `count` more tokens of each of these rows."""

    @by_rows(mesh)
    def on_device(length: Array, rows: Array | None, count: Array) -> Array:
        return length.at[slice(None) if rows is None else rows].add(count)

    return on_device(length, rows, count)


def tokens_at(tokens: Array, positions: Array) -> Array:
    """The tokens [b,S] of each row at positions [b,T]; at positions beyond the end, any token."""
    return jnp.take_along_axis(tokens, positions, 1, mode="clip")


def most_readable(length: Array, cfg: Config) -> Array:
    """The most tokens that rows of these lengths can read so that all could be rolled back: [b] -> [b] int32.

    These are the next token and its drafts. It is the least over the layers.
    """
    return functools.reduce(jnp.minimum, [rollback_limit(mask, length) for mask in cfg.masks])


def accepted(read: Array, chosen: Array, count: Array) -> Array:
    """How many tokens a step has chosen: the first, and one more for each draft that was right. -> [b] int32.

    read: [b,T], the next token and the drafts, of which the first count[b] were read. chosen: [b,T], the
    token chosen after each.
    """
    right = (read[:, 1:] == chosen[:, :-1]) & (jnp.arange(1, read.shape[1]) < count[:, None])
    return jnp.minimum(count, 1 + jnp.sum(jnp.cumprod(right, 1, dtype=jnp.int32), 1))
