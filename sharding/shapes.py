"""Docstrings that check: the letters in which functions describe their arrays, compared with the arrays.

`check_shapes(model)` replaces the functions of a module by ones that compare what they are given, and what
they return, with the shapes in their docstrings. In one call a letter has one size: of all arguments, of the
result, and of the weights, whose letters are declared. Shapes are compared while a program is traced, so a
compiled program is as fast as without. The tests have it on. To find out why a change does not fit, call it
before anything is traced.

A docstring gives the shape of an argument as `x: [b,T,D]` or `x [b,T,D]`, of several as `q, k: [b,T]`, and
the shapes of the result after `->`. An entry may be a letter, a number, a sum such as L+R, a product such as
2H, or `...` for any dimensions. Words, as in [b,T,width/2], are not compared.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from types import FunctionType, ModuleType

import jax
from jax import Array

from sharding.arrays import ArrayInfo

SHAPE = r"\[((?:[\w+/*.]+(?:,[\w+/*.]+)*)?)\]"
TERM = re.compile(r"(\d*)([A-Za-z]?)")


def check_shapes(*modules: ModuleType) -> list[str]:
    """Check the functions of modules, and the methods of their classes: -> the names of those checked."""
    checked = []
    for module in modules:
        owners = [module, *(x for x in vars(module).values() if isinstance(x, type))]
        for owner in owners:
            if getattr(owner, "__module__", module.__name__) != module.__name__:
                continue
            for name, function in list(vars(owner).items()):
                ours = isinstance(function, FunctionType) and function.__module__ == module.__name__
                if ours and (shapes := documented(function)) and not hasattr(function, "checks_shapes"):
                    setattr(owner, name, checking(function, *shapes))
                    checked.append(function.__qualname__)
    return checked


def documented(function: Callable) -> tuple[dict[str, str], list[str]] | None:
    """The shapes of arguments by name, and those of the result, in a docstring; None if it has none."""
    text = inspect.getdoc(function) or ""
    parameters = inspect.signature(function).parameters
    named = re.findall(rf"(\w+(?:, \w+)*):? {SHAPE}", text.partition("->")[0])
    later = re.findall(rf"(?m)(\w+(?:, \w+)*): {SHAPE}", text)
    arguments = {
        name: shape for names, shape in named + later for name in names.split(", ") if name in parameters
    }
    result = re.search(r"->((?:[^.\n]|\.\.\.|\n(?!\n))*)", text)
    results = re.findall(SHAPE, result[1]) if result else []
    return (arguments, results) if arguments or results else None


def checking(function: Callable, arguments: dict[str, str], results: list[str]) -> Callable:
    """The function with a check of the shapes of its arguments and results."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def check(*positional, **named):
        given = signature.bind(*positional, **named).arguments
        sizes: dict[str, tuple[int, str]] = {}
        for name, value in given.items():
            for field, letters, array in declared_arrays(value):
                compare(function, f"{name}.{field}", array, ",".join(letters), sizes)
        for name, shape in arguments.items():
            if isinstance(given.get(name), Array):
                compare(function, name, given[name], shape, sizes)
        result = function(*positional, **named)
        arrays = [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, Array)]
        for array, shape in zip(arrays, results, strict=False):
            compare(function, "the result", array, shape, sizes)
        return result

    check.__dict__["checks_shapes"] = True
    return check


def declared_arrays(weights) -> list[tuple[str, str, Array]]:
    """(field, letters, array) of the arrays of a record of weights that are neither quantized nor wrapped."""
    fields = dataclasses.fields(weights) if dataclasses.is_dataclass(weights) else ()
    infos = {field.name: field.metadata.get("info") for field in fields}
    pairs = [
        (name, info, getattr(weights, name)) for name, info in infos.items() if isinstance(info, ArrayInfo)
    ]
    return [(name, info.letters, x) for name, info, x in pairs if isinstance(x, jax.Array)]


def compare(
    function: Callable, name: str, array: Array, shape: str, sizes: dict[str, tuple[int, str]]
) -> None:
    """Compare an array with a shape such as "b,T,D"; new letters get their sizes from it.

    sizes: the size of each letter, and the array and axis that it comes from. Raises ValueError.
    """
    entries, found = shape.split(",") if shape else [], array.shape
    what = f"{function.__module__}.{function.__qualname__}: {name} {list(found)} is not [{shape}]"
    if "..." in entries:
        i = entries.index("...")
        missing = len(entries) - 1 - i
        found = (*found[:i], *found[len(found) - missing :]) if len(found) >= i + missing else found
        entries = [entry for entry in entries if entry != "..."]
    if len(entries) != len(found):
        raise ValueError(f"{what}: it has {array.ndim} axes")
    for axis, (entry, size) in enumerate(zip(entries, found, strict=True)):
        if re.fullmatch("[A-Za-z]", entry) and entry not in sizes:
            sizes[entry] = size, f"axis {axis} of {name}"
        expected = size_of(entry, sizes)
        if expected is not None and expected != size:
            source = (
                sizes[entry][1] if entry in sizes else ", ".join(f"{x} = {n}" for x, (n, _) in sizes.items())
            )
            raise ValueError(f"{what}: axis {axis} is {size}, {entry} is {expected} ({source})")


def size_of(entry: str, sizes: dict[str, tuple[int, str]]) -> int | None:
    """The size of an entry such as D, 2H, L+R or 4; None if it has words, or letters without a size."""
    total = 0
    for term in entry.split("+"):
        found = TERM.fullmatch(term)
        if not term or not found or (found[2] and found[2] not in sizes):
            return None
        total += int(found[1] or 1) * (sizes[found[2]][0] if found[2] else 1)
    return total
