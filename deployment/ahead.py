"""Compile ahead: the programs of a batch, in threads, before there are weights.

    shapes = ProgramsOnShapes(abstract_weights, cfg, mesh, rows, max_len, kv_dtype)
    compile_programs(shapes, needed_programs(shapes, demand))  # computes nothing

jax compiles a program for the shapes, types and shardings of its arguments, so shapes can take the place of
arrays. jax keeps what it has compiled in memory: when the same functions are later called with arrays, they
run at once.
"""

import concurrent.futures
import copy
import os
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from deployment.memory import host_memory
from serving.needed import Program, run_on_no_row
from serving.prefix_cache import SavedPrefix
from serving.programs import Programs, compilation_progress

# Host memory that the TPU's compiler takes for each layer of a program. Six programs of 80 layers, all at the
# same time, took 8.8 GiB, that is 18.8 MiB for each layer.
BYTES_PER_LAYER = 20 * 2**20
MEMORY_SHARE = 0.5  # of the host's memory that compiling may take


class ProgramsOnShapes(Programs):
    """The methods of `Programs`, which here compile jitted functions instead of running them.

    Weights and batch are trees of shapes, and a method returns the shapes of what the same method of
    `Programs` returns.
    """

    def __init__(self, *arguments, **options):
        self.compiled = Compiled()
        super().__init__(*arguments, **options)

    def call(self, function, *arguments, **static):
        return self.compiled.result_of(function, *arguments, **static)

    def allocate(self, tree):
        return tree

    def give_up(self) -> None:
        """Begin to compile no more programs; those that have begun come to their end."""
        self.end(concurrent.futures.CancelledError())

    @property
    def given_up(self) -> bool:
        """Whether `give_up` ended the compilation, and no failure did before."""
        return isinstance(self.compiled.ended_by, concurrent.futures.CancelledError)

    def end(self, reason: BaseException) -> None:
        """End the compilation for the model and the draft model, see `Compiled.end`."""
        for x in self.with_draft:
            x.compiled.end(reason)

    def start_fetching(self, tree):
        return self.in_every_process(tree)

    def save_prefixes(self, rows: np.ndarray, prefixes: list[SavedPrefix | None]) -> None:
        for x in self.with_draft:
            x.read_rows(rows)

    def load_prefixes(self, rows: np.ndarray, prefixes: list[SavedPrefix | None]) -> None:
        for x in self.with_draft:
            x.write_rows(rows, x.read_rows(rows))


def compile_programs(shapes: ProgramsOnShapes, needed: Sequence[Program]) -> None:
    """Compile these programs, several at a time. Raises the first failure, and begins none after it.

    The last ones come first: they are the decode steps, whose programs take longest to compile.
    """
    with (
        compilation_progress(len(needed)) as bar,
        concurrent.futures.ThreadPoolExecutor(programs_at_a_time(len(shapes.cfg.layers))) as pool,
    ):
        # Running a program replaces `batch`, so each gets a copy of the object.
        compiling = [pool.submit(run_on_no_row, copy.copy(shapes), program) for program in reversed(needed)]
        try:
            for done in concurrent.futures.as_completed(compiling):
                done.result()
                bar.update()
        except BaseException as e:
            shapes.end(e)
            raise


class Compiled:
    """The results of functions that were compiled, as shapes. Threads may share it: none compiles twice.

    ended_by: None, or after `end` the exception that every call raises.
    """

    def __init__(self):
        self.lock, self.results = threading.Lock(), {}
        self.ended_by: BaseException | None = None

    def end(self, reason: BaseException) -> None:
        """Begin to compile no more programs: every later call raises the first reason that was given."""
        with self.lock:
            self.ended_by = self.ended_by or reason

    def result_of(self, function, *arguments, **static):
        """Compile a jitted function for these arguments, unless that was done: -> its result, as shapes."""
        leaves, tree = jax.tree.flatten(arguments)
        types = tuple((x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves)
        key = function, types, tree, *static.values()
        with self.lock:
            if self.ended_by:
                raise self.ended_by
            known = key in self.results
            result = self.results.setdefault(key, concurrent.futures.Future())
        if not known:
            try:
                result.set_result(compile_on_shapes(function, *arguments, **static)[1])
            except BaseException as e:
                result.set_exception(e)
        return result.result()


def compile_on_shapes(function, *arguments, **static) -> tuple[jax.stages.Compiled, Any]:
    """Compile a jitted function for these arguments: -> (its program, the shapes of the program's result)."""
    lowered = function.lower(*arguments, **static)
    compiled = lowered.compile()
    return compiled, jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        lowered.out_info,
        compiled.output_shardings,
    )


def programs_at_a_time(layers: int) -> int:
    """How many programs of so many layers this host compiles at a time: one per core, if memory allows."""
    fitting = int(MEMORY_SHARE * host_memory() / (BYTES_PER_LAYER * layers))
    return max(1, min(os.cpu_count() or 1, fitting))
