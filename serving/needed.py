"""Which programs a batch needs: a list of records, made before any program is compiled.

    needed = needed_programs(programs, demand_of(requests))
    warm_up(programs, needed)  # compiles them: each does its work, to no row
    engine = Engine(programs, needed)  # computes nothing, and compiles nothing

A record says what a program does, and in which shape. jax compiles a program when it is first called, which
`warm_up` does. deployment/ahead.py compiles the same list several at a time, before there are weights.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from serving.chunks import Shape, useful_shapes
from serving.prefix_cache import SavedPrefix
from serving.programs import Programs, compilation_progress, no_chunk
from serving.requests import OPTION_SETS, Request, options_in_use
from serving.scheduler import PrefillLimits, neutral_sampling


@dataclasses.dataclass(frozen=True)
class AssignRows:
    """Gives rows new texts. copies: whether a row may get a prefix of another row's cache."""

    copies: bool


@dataclasses.dataclass(frozen=True)
class CopyPrefixes:
    """Copies prefixes of rows to the host's memory, and back."""


@dataclasses.dataclass(frozen=True)
class KeepStates:
    """Keeps the states of so many rows of each data shard."""

    rows: int


@dataclasses.dataclass(frozen=True)
class ReadChunk:
    """Reads a prefill chunk. score: see steps.PrefillChunk."""

    shape: Shape
    score: int | None


@dataclasses.dataclass(frozen=True)
class ChooseTokens:
    """A decode step of so many rows of each data shard, with these options of sampling and no others."""

    rows: int
    options: frozenset[str]


Program = AssignRows | CopyPrefixes | KeepStates | ReadChunk | ChooseTokens


@dataclasses.dataclass(frozen=True)
class Demand:
    """What requests may ask for.

    longest: tokens of the longest prompt. scores: see Request.scoring. option_sets: sets of sampling options,
    each with decode programs of its own; a step takes the smallest set that has all that its rows ask for.
    """

    longest: int
    scores: frozenset[int | None]
    option_sets: tuple[frozenset[str], ...]

    def __or__(self, other: "Demand") -> "Demand":
        sets = dict.fromkeys(self.option_sets + other.option_sets)
        return Demand(
            max(self.longest, other.longest), self.scores | other.scores, tuple(sorted(sets, key=len))
        )


def demand_of(
    requests: Sequence[Request], longest: int = 0, option_sets: Sequence[frozenset[str]] = ()
) -> Demand:
    """What such requests ask for, with prompts of up to `longest` tokens.

    option_sets: by default one set, of the options that these requests use.
    """
    longest = max([longest, *(len(request.prompt) for request in requests)])
    sets = tuple(option_sets) or (options_in_use(requests),)
    return Demand(longest, frozenset(request.scoring for request in requests) or frozenset([None]), sets)


def demand_of_kinds(programs: Programs, requests: Sequence[Request]) -> Demand:
    """What requests of the same kinds may ask for: of each, the smallest of OPTION_SETS that suffices.

    Several stages, which decode in one program, have the largest set for all requests.
    """
    used = [options_in_use([request]) for request in requests]
    needed = {next(options for options in OPTION_SETS if own <= options) for own in used}
    sets = OPTION_SETS[-1:] if programs.stages > 1 else [x for x in OPTION_SETS if x in needed]
    return demand_of(requests, option_sets=sets)


def needed_programs(
    programs: Programs,
    demand: Demand,
    active: int | None = None,
    limits: PrefillLimits = PrefillLimits(),  # noqa: B008  immutable
    prefix_cache: bool = False,
) -> list[Program]:
    """All programs that such requests need. The decode programs come last.

    active: the most answers of a data shard at a time; None: one for each row. prefix_cache: whether prefixes
    of rows are saved in host memory.
    """
    rows = next((n for n in programs.decode_rows if n >= (active or programs.rows)), programs.decode_rows[-1])
    alone = programs.rows == programs.stages * programs.shards  # no row has another to copy a prefix from
    copies = not alone or programs.places > 0  # a state is copied from a place
    needed: list[Program] = [AssignRows(copies) for copies in (False, True)[: 1 + copies]]
    needed += [CopyPrefixes()] if prefix_cache and programs.stages == 1 else []
    shapes = [shape for shape in programs.chunk_shapes if shape.rows <= rows]
    shapes = useful_shapes(shapes, demand.longest - 1, max(limits.alone, limits.beside_decoding))
    needed += [KeepStates(n) for n in sorted({shape.rows for shape in shapes})] if programs.places else []
    scores = sorted(demand.scores, key=str)  # None among them
    needed += itertools.starmap(ReadChunk, itertools.product(shapes, scores))
    return [*needed, *(ChooseTokens(rows, options) for options in decode_sets(programs, demand))]


def decode_sets(programs: Programs, demand: Demand) -> tuple[frozenset[str], ...]:
    """The sets of options that have decode programs: of several stages, which share a program, the last."""
    return demand.option_sets[-1:] if programs.stages > 1 else demand.option_sets


def faster_programs(programs: Programs, demand: Demand) -> list[Program]:
    """The decode programs that a batch can do without, in the order in which they are worth compiling.

    They have fewer options, or compute fewer rows, than the one of all rows with the last set of options,
    which must have the options of all other sets.
    """
    *fewer, all_rows = programs.decode_rows
    sets = decode_sets(programs, demand)
    found = [ChooseTokens(rows, options) for rows in (all_rows, *fewer) for options in sets]
    return [program for program in found if program != ChooseTokens(all_rows, sets[-1])]


def warm_up(programs: Programs, needed: Iterable[Program]) -> None:
    """Run each program on no row, which compiles it; else the first turn that needs the program would.

    Work of more than a few seconds shows its progress.
    """
    needed = list(needed)
    with compilation_progress(len(needed)) as bar:
        for program in needed:
            jax.block_until_ready(run_on_no_row(programs, program))
            bar.update()


def run_on_no_row(programs: Programs, program: Program) -> Any:
    """Do what the program does, to no row: -> its result."""
    shards = programs.stages * programs.shards
    nothing = np.zeros(shards, np.int32)
    match program:
        case AssignRows(copies):
            texts = np.zeros((shards, programs.max_len), np.int32)
            source = nothing if copies else None
            return programs.assign_rows(nothing - 1, texts, nothing, source, nothing - 1)
        case KeepStates(rows):
            chunk = no_chunk(Shape(rows, 1), shards)
            return programs.keep_states(chunk.rows, chunk.rows * 0 - 1)
        case CopyPrefixes():
            saved = [SavedPrefix(np.zeros(programs.rows, np.int32), 0, 0) for _ in range(shards)]
            programs.save_prefixes(nothing, saved)
            return programs.load_prefixes(nothing - 1, saved)
        case ReadChunk(shape, score):
            chunk = no_chunk(shape, shards)
            return programs.prefill(chunk.rows, chunk.count, chunk.width, score)
        case ChooseTokens(rows, options):
            sampling = neutral_sampling(options, rows * shards, programs.cfg.V)
            some = None
            if rows < programs.decode_rows[-1]:
                some = np.tile(np.arange(rows, dtype=np.int32), programs.shards)
            return programs.decode(np.zeros(rows * shards, np.int32), sampling, some)
