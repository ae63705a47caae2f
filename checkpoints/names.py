"""What weights and their types are called in our files, and how published names become those of model.py.

Llama's name of each weight stands with its declaration in model.py, what a family calls otherwise in its file
in families/.
"""

import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp

import model
from checkpoints.tensor_files import DTYPES, StoredTensor
from families.family import Family
from feedback.errors import UserError
from model import Config
from quantize import Format
from sharding.arrays import ArrayInfo
from sharding.stages import in_stages

FLOATS = ("bfloat16", "float32")  # that a model may have
TYPES = {dtype.name: name for name, dtype in DTYPES.items()}  # safetensors' names


def named_infos(
    config: Config, stages: int = 1, format: Format | None = None
) -> Iterator[tuple[str, ArrayInfo]]:
    """Every declared weight with its name in our files, like `layers.0.attention.q`.

    Of layers in several stages: those of the first. format: of the weights.
    """
    infos = in_stages(model.weight_infos(config, format), stages)
    for path, info in jax.tree_util.tree_leaves_with_path(infos):
        yield jax.tree_util.keystr(path, simple=True, separator="."), info


def in_each_stage(name: str, config: Config, stages: int) -> list[str]:
    """The names of what has the same place in each stage, by the first one's; what is no layer's has one."""
    if not (found := re.fullmatch(r"layers\.(\d+)\.(.*)", name)):
        return [name]
    depth = len(config.layers) // stages
    return [f"layers.{int(found[1]) + stage * depth}.{found[2]}" for stage in range(stages)]


def stored_infos(name: str, info: ArrayInfo) -> dict[str, ArrayInfo]:
    """The arrays of a weight in our files: itself, or its components as its format stores them."""
    if info.quantization is None:
        return {name: info}
    stored = info.quantization.stored_components(info)
    return {name + ".values": stored.values, name + ".scale": stored.scale}


def type_name(info: ArrayInfo, dtype: str) -> str:
    """safetensors' name of an array's type in a model of `dtype`."""
    return TYPES[dtype if info.dtype is None else jnp.dtype(info.dtype).name]


def renamed(tensors: dict[str, StoredTensor], family: Family) -> dict[str, StoredTensor]:
    """Published tensors under Llama's names. Raises UserError if two of them have the same one."""
    found = {}
    for name, tensor in tensors.items():
        name = family.llama_name(name)
        if name in found:
            raise UserError(f"{tensor.file}: tensors {tensor.name} and {found[name].name} are the same one")
        found[name] = tensor
    return found
