"""The compiled programs of a batch, with a model's weights and cache. They know rows, but no requests."""

import dataclasses
import itertools
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import model
from feedback.errors import UserError
from feedback.progress import progress
from model import Config, Weights
from ops.platform import platform
from serving import steps
from serving.chunks import Shape, chunk_shapes
from serving.executors import executor_for, run
from serving.prefix_cache import SavedPrefix, memory_bytes, on_devices, slot_axes
from serving.reuse import places, with_room
from serving.steps import DecodeStep, Output, PrefillChunk, Scores, Step
from sharding.arrays import abstract, zeros
from sharding.sampling import Sampling
from sharding.stages import stage_input_infos

SHOW_AFTER = 5  # seconds of compiling


def decode_rows(mesh: Mesh, rows: int) -> tuple[int, ...]:
    """The numbers of rows that a decode step may compute, see Programs. rows: of the batch."""
    each = rows // (mesh.shape["stage"] * mesh.shape["data"])
    fewer = (2**i for i in range((each - 1).bit_length()))  # the powers of two below `each`
    return (*(fewer if mesh.size == 1 and platform(mesh) == "cpu" else ()), each)


class Assignment(NamedTuple):
    """A new text for one row of each data shard: see steps.assign_rows.

    source: the row itself where no prefix is copied from another. save: for each data shard, what is to keep
    the memory of the row's old text. load: the saved prefix whose memory the row gets. Either may be None.
    """

    rows: np.ndarray
    tokens: np.ndarray
    length: np.ndarray
    source: np.ndarray
    place: np.ndarray
    save: Sequence[SavedPrefix | None] = ()
    load: Sequence[SavedPrefix | None] = ()


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What a turn does for a microbatch: assign rows, prefill a chunk of prompts, decode a token per row.

    chunk: of equally many rows of each data shard; None if none is read. keep: in which place the states of
    each of these rows are kept after it, -1: in none; None: nowhere. count, sampling, rows: see
    steps.DecodeStep.
    """

    assignments: list[Assignment]
    chunk: PrefillChunk | None
    count: np.ndarray
    sampling: Sampling
    rows: np.ndarray | None = None
    keep: np.ndarray | None = None


class Speculation(Protocol):
    """How to choose several tokens in one step: see speculation.py.

    n_draft: the most draft tokens per step. draft: a second model, which reads every token that the model
    reads; None if drafts come from elsewhere.
    """

    n_draft: int
    draft: "Programs | None"

    def decode(
        self, count: np.ndarray, sampling: Sampling, rows: np.ndarray | None, target: "Programs"
    ) -> Output: ...


class Programs:
    """What runs on the devices for a batch of rows. Each call donates the batch and keeps the new one.

    With several stages there are as many microbatches (see sharding/stages.py), and a call serves all of
    them, each in its stage.

    batch: the Batch of this turn; waiting: those of the next turns. last_read: the result of the last prefill
    chunk. shards: data shards of a microbatch.
    width: the most tokens of a row that a decode step reads. masks: of all layers, a draft model's included.
    places: in which states of each row are kept, see reuse.with_room.
    chunk_shapes: of prefill chunks, see chunks.py.
    decode_rows: the numbers of rows of a data shard that a decode step may compute, ascending. On one CPU
    device these are 1, 2, 4 and so on up to all. Elsewhere a step computes all rows: there it is bound by
    reading the weights, and the kernels skip the caches of idle rows, so that fewer rows save little.
    call, allocate: deployment.ahead.ProgramsOnShapes replaces them.
    """

    call = staticmethod(run)
    allocate = staticmethod(zeros)

    def __init__(
        self,
        weights: Weights,
        cfg: Config,
        mesh: Mesh,
        rows: int,
        max_len: int,
        kv_dtype: str,
        speculation: Speculation | None = None,
    ):
        """rows: rounded up, so that all data shards of all microbatches have as many.

        Raises UserError for a draft model of another vocabulary, and for speculation with several stages.
        """
        self.execute = executor_for(mesh)
        self.stages, self.shards = mesh.shape["stage"], mesh.shape["data"]
        if speculation:  # a decode step is told from a prompt's chunk by how many tokens states can take back
            cfg = with_room(cfg, drafts=speculation.n_draft)
        if self.stages > 1:  # a chunk is in another stage when its states would be kept
            cfg = with_room(cfg, kept=0)
        self.rows, self.max_len = rows + -rows % (self.stages * self.shards), max_len
        self.weights, self.cfg, self.mesh, self.static = weights, cfg, mesh, dict(cfg=cfg, mesh=mesh)
        sizes = self.rows, max_len, kv_dtype
        batches = (steps.init_batch(cfg, mesh, *sizes, self.allocate) for _ in range(self.stages))
        self.batch, *waiting = batches
        self.last_read: Scores | jax.Array | None = None
        self.decode_rows = decode_rows(mesh, self.rows)
        self.chunk_shapes = chunk_shapes(cfg, mesh, self.decode_rows[-1])
        self.waiting = deque(waiting)
        if waiting:
            read = [(self.stages * self.shards * rows, width) for rows, width in self.chunk_shapes]
            inputs = stage_input_infos(cfg.D, self.rows, read)  # before the first turn they are zeros
            inputs = self.allocate(abstract(inputs, mesh, model.float_type(weights)))
            self.batch = self.batch.replace(stage_inputs=inputs)
        self.speculation, self.draft = speculation, speculation and speculation.draft
        self.width, self.masks = 1 + (speculation.n_draft if speculation else 0), cfg.masks
        if self.draft:
            if cfg.V != self.draft.cfg.V:
                raise UserError(f"the draft has {self.draft.cfg.V} tokens, the model {cfg.V}")
            self.masks |= self.draft.masks
        self.places = places(self.masks)
        if speculation and self.stages > 1:
            what = "do not pass on how many guesses were right"
            raise UserError(f"{self.stages} stages of layers {what}: leave out --lookup, --draft or --pp")

    def run(self, plans: Sequence[StepPlan]) -> tuple[Scores | None, Output | None]:
        """A turn of all stages, stage s with plans[s]: -> (Scores, Output) of the last stage's plan.

        Either is None if that plan does not ask for it. Then the next microbatches take their turn.
        """
        scores = output = None
        nothing, last_chunk = np.zeros(self.shards, np.int32), plans[-1].chunk
        no_tokens = np.zeros((self.shards, self.max_len), np.int32)
        no_assignment = Assignment(nothing - 1, no_tokens, nothing, nothing - 1, nothing - 1)
        for assignments in itertools.zip_longest(
            *(plan.assignments for plan in plans), fillvalue=no_assignment
        ):
            arrays = [(x.rows, x.tokens, x.length, x.source, x.place) for x in assignments]
            rows, tokens, length, source, place = map(np.concatenate, zip(*arrays, strict=True))
            save, load = assignments[0].save, assignments[0].load  # none if there are several stages
            if any(save):
                self.save_prefixes(rows, save)
            if any(load):
                self.load_prefixes(np.where([x is not None for x in load], rows, -1), load)
            copies = (source != rows).any() or (place >= 0).any()
            self.assign_rows(rows, tokens, length, source if copies else None, place)
        for shape in sorted({self.shape_of(plan.chunk) for plan in plans if plan.chunk}):
            idle = no_chunk(shape, self.shards)
            chunks = [x.chunk if x.chunk and self.shape_of(x.chunk) == shape else idle for x in plans]
            rows, count = (np.concatenate([getattr(x, name) for x in chunks]) for name in ("rows", "count"))
            score = max((x.score for x in chunks if x.score is not None), default=None)
            found = self.prefill(rows, count, shape.width, score)
            scores = found if chunks[-1] is last_chunk else scores
        if (keep := plans[0].keep) is not None:  # with several stages no states are kept
            self.keep_states(plans[0].chunk.rows, keep)
        if any(plan.count.any() for plan in plans):
            sampling = jax.tree.map(lambda *x: np.concatenate(x), *(plan.sampling for plan in plans))
            count = np.concatenate([plan.count for plan in plans])
            output = self.decode(count, sampling, plans[0].rows)  # with several stages None: all rows
        self.waiting.append(self.batch)
        self.batch = self.waiting.popleft().replace(stage_inputs=self.batch.stage_inputs)
        return scores, output

    def assign_rows(self, rows, tokens, length, source, place) -> None:
        """Give rows new texts, of which a prefix counts as read: see steps.assign_rows."""
        for x in self.with_draft:
            from_place = place if x.places and source is not None else None
            arguments = rows, tokens, length, source, x.batch, from_place
            x.batch = self.call(steps.assign_rows, *arguments, **x.static)

    def keep_states(self, rows, place) -> None:
        """Keep the states of rows in places: see steps.keep_states."""
        for x in self.with_draft:
            if x.places:
                x.batch = self.call(steps.keep_states, rows, place, x.batch, **x.static)

    def shape_of(self, chunk: PrefillChunk) -> Shape:
        """The shape of a microbatch's chunk."""
        return Shape(len(chunk.rows) // self.shards, chunk.width)

    def save_prefixes(self, rows: np.ndarray, prefixes: Sequence[SavedPrefix | None]) -> None:
        """Start to copy the memory of rows[i] of data shard i to prefixes[i], where this is not None."""
        saved = [pair for x in self.with_draft for pair in slot_axes(x.read_rows(rows))]
        for i, prefix in enumerate(prefixes):
            if prefix is not None:
                prefix.start_copying(saved, i)

    def load_prefixes(self, rows: np.ndarray, prefixes: Sequence[SavedPrefix | None]) -> None:
        """Put what prefixes[i] keeps into rows[i] of data shard i; -1 is skipped."""
        arrays = on_devices(prefixes)
        for x in self.with_draft:
            leaves, tree = jax.tree.flatten((x.batch.cache.layers, x.batch.kept))
            x.write_rows(rows, jax.tree.unflatten(tree, arrays[: len(leaves)]))
            arrays = arrays[len(leaves) :]

    def read_rows(self, rows: np.ndarray) -> tuple[list, list]:
        return self.call(steps.read_rows, np.maximum(rows, 0), self.batch, **self.static)

    def write_rows(self, rows: np.ndarray, saved: tuple[list, list]) -> None:
        self.batch = self.call(steps.write_rows, rows, saved, self.batch, **self.static)

    @property
    def with_draft(self) -> list["Programs"]:
        """The programs of the model and, if there is one, of the draft model."""
        return [self, self.draft] if self.draft else [self]

    def row_bytes(self, tokens: int) -> int:
        """Bytes of the memory of a row with so many tokens, on all devices of its data shard."""
        memories = [(x.batch.cache.layers, x.batch.kept) for x in self.with_draft]
        return memory_bytes(slot_axes(memories), tokens)

    def prefill(self, rows, count, width: int, score: int | None = None) -> Scores | None:
        """Read a chunk of prompts in as many rows of each data shard: -> its scores, see steps.PrefillChunk.

        Returns when the device has read the chunk before this one. So one chunk waits on the device, and
        begins as soon as the other ends; a new request need not wait for more of them.
        """
        read = self.step(PrefillChunk(rows=rows, count=count, width=width, score=score))
        if self.draft:
            self.draft.prefill(rows, count, width)
        jax.block_until_ready(self.last_read)
        self.last_read = read
        return None if score is None else self.start_fetching(read)

    def step(self, step: Step) -> Output | Scores | None:
        """Do what a step says: -> its result."""
        result, self.batch = self.execute(step, self.weights, self.batch, **self.static, call=self.call)
        return result

    def decode(self, count, sampling: Sampling, rows=None) -> Output:
        """Choose up to count [B] tokens in each of these rows, with speculation if there is one."""
        if self.speculation:
            output = self.speculation.decode(count, sampling, rows, self)
        else:
            output = self.step(DecodeStep(count=count, sampling=sampling, rows=rows))
        return self.start_fetching(output)

    def start_fetching(self, tree):
        """Arrays that every process will look at, on their way; later computations do not delay them."""
        tree = self.in_every_process(tree)
        for x in jax.tree.leaves(tree):
            x.copy_to_host_async()
        return tree

    def in_every_process(self, tree):
        return self.call(_replicated, tree, mesh=self.mesh) if jax.process_count() > 1 else tree


def no_chunk(shape: Shape, shards: int, score: int | None = None) -> PrefillChunk:
    """A chunk of this shape, in so many data shards, that reads nothing."""
    rows = np.tile(np.arange(shape.rows, dtype=np.int32), shards)
    return PrefillChunk(rows=rows, count=0 * rows, width=shape.width, score=score)


def compilation_progress(programs: int):
    """A bar for the compilation of so many programs, in the first process."""
    show = jax.process_index() == 0
    return progress("compiling", programs, show=show, unit="program", delay=SHOW_AFTER)


@partial(jax.jit, static_argnames="mesh")
def _replicated(tree, *, mesh: Mesh):
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, P()))
