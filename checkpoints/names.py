"""What weights and their types are called in our files, and how published names become those of model.py.

Llama's name of each weight stands with its declaration in model.py, what a family calls otherwise in its file
in families/.
"""

import dataclasses
import re
from collections.abc import Iterator

import jax
import numpy as np

import model
from checkpoints.errors import UserError
from checkpoints.tensor_files import StoredTensor
from families.family import Family
from model import Config
from quantize import Format
from sharding.arrays import ArrayInfo
from sharding.stages import in_stages

FLOATS = ("bfloat16", "float32")  # that a model may have
TYPES = {"bfloat16": "BF16", "float32": "F32", "int8": "I8", "uint8": "U8"}  # safetensors' names


def named_infos(
    config: Config, stages: int = 1, format: Format | None = None
) -> Iterator[tuple[str, ArrayInfo]]:
    """Every declared weight with its name in our files, like `layers.0.attention.q`.

    Of layers in several stages: those of the first. format: of the weights.
    """
    for path, info in jax.tree_util.tree_leaves_with_path(
        in_stages(model.weight_infos(config, format), stages)
    ):
        yield jax.tree_util.keystr(path, simple=True, separator="."), info


def in_each_stage(name: str, config: Config, stages: int) -> list[str]:
    """The names of what has the same place in each stage, by the first one's; what is no layer's has one."""
    if not (found := re.fullmatch(r"layers\.(\d+)\.(.*)", name)):
        return [name]
    depth = len(config.layers) // stages
    return [f"layers.{int(found[1]) + stage * depth}.{found[2]}" for stage in range(stages)]


def stored_infos(name: str, info: ArrayInfo) -> dict[str, ArrayInfo]:
    """The arrays that stand for a weight: itself, or the values of its form and their scale.

    int4 values are there two by two, see quantize.pack.
    """
    if info.form is None:
        return {name: info}
    held = info.held
    values = packed(held.values) if info.form.bits == 4 else held.values
    return {name + ".values": values, name + ".scale": held.scale}


def packed(values: ArrayInfo) -> ArrayInfo:
    """The declaration of the bytes of int4 values."""
    shape = [n // 2 if letter == "I" else n for letter, n in zip(values.letters, values.shape, strict=True)]
    return dataclasses.replace(values, shape=tuple(shape), dtype=np.uint8)


def type_name(info: ArrayInfo, dtype: str) -> str:
    """safetensors' name of an array's type in a model of `dtype`."""
    return TYPES[dtype if info.dtype is None else np.dtype(info.dtype).name]


def renamed(tensors: dict[str, StoredTensor], family: Family) -> dict[str, StoredTensor]:
    """Published tensors under Llama's names. Raises UserError if two of them have the same one."""
    found = {}
    for name, tensor in tensors.items():
        name = family.llama_name(name)
        if name in found:
            raise UserError(
                f"{tensor.file.path}: tensors {tensor.name} and {found[name].name} are the same one"
            )
        found[name] = tensor
    return found
