"""The programs of a step, compiled as the engine would compile them."""

import dataclasses
import inspect
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from deployment.ahead import compile_on_shapes
from deployment.job import Job
from deployment.memory import shard_bytes
from deployment.step_bytes import named_leaves
from serving.executors import executor_for


@dataclasses.dataclass
class CompiledProgram:
    """A program that runs `count` times.

    names: the caller's name of each argument by the program's own name of it; arguments that another program
    computes are not among them. used: the program's own names of the arguments that it uses, in order.
    received_bytes: of one device, arguments that another program computes.
    """

    name: str
    compiled: jax.stages.Compiled
    names: dict[str, str]
    used: tuple[str, ...]
    received_bytes: int
    count: int = 1


class Compiler:
    """What executors call in the place of jitted functions, to compile each program once.

    arguments: named trees without data, from which programs may get theirs.
    """

    def __init__(self, **arguments):
        self.arguments = arguments
        self.known = {id(x): name for name, x in named_leaves(**arguments)}
        self.programs: dict[tuple, CompiledProgram] = {}
        self.results, self.computed = {}, set()  # what programs return, and the ids of the arrays in it

    def __call__(self, function: Callable, *arguments, **static):
        """What the program would return, without data. Raises JaxRuntimeError if it does not fit."""
        shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(arguments))
        key = function, shapes, jax.tree.structure(arguments), *static.items()
        if key in self.programs:
            self.programs[key].count += 1
            return self.results[key]
        compiled, self.results[key] = compile_on_shapes(function, *arguments, **static)
        self.computed |= {id(x) for x in jax.tree.leaves(self.results[key])}
        parameters = list(inspect.signature(function).parameters)[: len(arguments)]
        own = dict(named_leaves(**dict(zip(parameters, arguments, strict=True))))
        used = dict(zip(parameters, compiled.input_shardings[0], strict=True))
        self.programs[key] = CompiledProgram(
            name=function.__name__,
            compiled=compiled,
            names={name: self.known[id(x)] for name, x in own.items() if id(x) in self.known},
            used=tuple(name for name, _ in named_leaves(**used)),
            received_bytes=shard_bytes([x for x in own.values() if id(x) in self.computed]),
        )
        return self.results[key]


def compile_programs(job: Job, mesh: Mesh) -> list[CompiledProgram]:
    """The programs that the executor of the mesh calls. Raises JaxRuntimeError if one does not fit."""
    compiler = Compiler(**job.arguments(mesh))
    executor_for(mesh)(**compiler.arguments, cfg=job.cfg, mesh=mesh, call=compiler)
    return list(compiler.programs.values())


def memory_of(programs: list[CompiledProgram]) -> tuple[int, int, int, int]:
    """Bytes of one device, as the compiler says: (arguments, temporaries, code, all that a step needs).

    arguments: what the step is given. temporaries: the most of any program, with what other programs pass to
    it. The last one adds the results that are not updated in place.
    """
    sizes = [(x, x.compiled.memory_analysis()) for x in programs]
    arguments = sum((m.argument_size_in_bytes - x.received_bytes) * x.count for x, m in sizes)
    code = sum(m.generated_code_size_in_bytes for _, m in sizes)
    temporaries = [m.temp_size_in_bytes + x.received_bytes for x, m in sizes]
    results = [m.output_size_in_bytes - m.alias_size_in_bytes for _, m in sizes]
    needed = max(map(sum, zip(temporaries, results, strict=True)))
    return arguments, max(temporaries), code, arguments + needed + code
