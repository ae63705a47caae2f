"""convert_checkpoint.py --verify: a converted folder, compared with its own checksums and with its source."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.errors import UserError
from checkpoints.folders import INDEX, companions, read_index
from checkpoints.layouts import same_bits
from checkpoints.loading import stored_form
from checkpoints.names import named_infos, stored_infos
from checkpoints.progress import progress
from checkpoints.tensor_files import file_checksum
from checkpoints.threads import in_order
from quantize import INT4_MAX, INT4_MIN, dequantize_groups, group_errors, in_groups, quantize_groups
from sharding.arrays import ArrayInfo


def verify(folder: str, source: str | None = None) -> list[str]:
    """Compute the checksums of a converted folder again, and compare its weights with those of `source`.

    Returns what was found, in sentences. Raises UserError naming the first tensor or file that is wrong.
    """
    ours = open_checkpoint(folder)
    if not ours.converted:
        raise UserError(f"{ours.folder}: is not a converted folder; there are no checksums in it")
    index = read_index(ours.folder)
    known = {name: facts.get("sha256") for name, facts in index["files"].items()}
    weights = set(index["weight_map"].values())
    for path in {ours.folder / name for name in known.keys() - weights} | set(companions(ours.folder)):
        if not path.is_file() or file_checksum(path) != known.get(path.name):
            raise UserError(f"{path}: is not the file that {INDEX} knows")
    tensors = ours.tensors
    with progress("checksums", sum(tensor.nbytes for tensor in tensors)) as bar:
        checksums = in_order(lambda tensor: tensor.checksum(), tensors, ahead=32)
        for tensor, checksum in zip(tensors, checksums, strict=True):
            if checksum != index["checksums"][tensor.name]:
                raise UserError(f"{tensor} is damaged; convert the model again")
            bar.update(tensor.nbytes)
    found = [f"{folder}: the checksums of {len(tensors)} tensors and of the model's other files are right"]
    if source is not None:
        found.append(f"{folder}: {_compare(ours, open_checkpoint(source))}")
    return found


def _compare(ours: Checkpoint, theirs: Checkpoint) -> str:
    """Compare every weight of a converted folder with the one in its source. Raises UserError."""
    if theirs.format:
        raise UserError(
            f"{theirs.folder}: is {theirs.format}; give the float model that {ours.folder} was made of"
        )
    if theirs.config != ours.config:
        raise UserError(f"{theirs.folder}: is another model than {ours.folder}")

    def largest_error(weight: tuple[str, ArrayInfo]) -> tuple[str, float]:
        name, info = weight
        exact = [theirs.sources[x] for x in theirs.stored(name, info)]
        converted = [ours.sources[x] for x in stored_infos(name, info)]
        layouts, largest = [source.layout for source in converted], 0.0
        for _, _, slices in theirs.sources[name].read_slices(exact + converted, layouts):
            x, y = slices[: len(exact)], slices[len(exact) :]
            if len(x) == len(y):
                errors = [
                    0.0 if same_bits(a.astype(b.dtype, copy=False), b) else math.inf
                    for a, b in zip(x, y, strict=True)
                ]
            else:
                errors = [{8: int8_error, 4: int4_error}[info.form.bits](info, *x, *y)]
            largest = max(largest, *errors)
        return name, largest

    total = sum(theirs.sources[name].nbytes for name, _ in named_infos(ours.config))
    infos = named_infos(ours.config, format=ours.format)
    with progress("comparing", total) as bar:
        for name, error in in_order(largest_error, infos, ahead=32):
            if error > 1:
                raise UserError(f"{ours.folder}: {name} is not what {theirs.folder} has")
            bar.update(theirs.sources[name].nbytes)
    kind = f"within half a step of {ours.format} of" if ours.format else f"in {ours.dtype} exactly"
    return f"the weights are {kind} those of {theirs.folder}"


def int8_error(info: ArrayInfo, x: np.ndarray, values: np.ndarray, scale: np.ndarray) -> float:
    """The largest error, in half steps; infinite if a scale is not that of the largest element."""
    x = x.astype(np.float32)
    step = np.expand_dims(scale, info.contracted_axes)
    largest = np.abs(x).max(info.contracted_axes, keepdims=True) / np.float32(127)
    largest = np.where(np.isnan(largest), np.inf, largest)
    if not np.allclose(step, largest, rtol=1e-6, atol=np.finfo(np.float32).tiny):
        return math.inf
    step, known = np.where(np.isfinite(step), step, 1), np.isfinite(largest)
    error = np.max(np.abs(x - values * step) / np.where(step > 0, step, 1), initial=0, where=known)
    # Rounding of x / step and of values * step: at most 127 steps times 2^-23 each.
    return float(error) / (0.5 + 2**-15)


def int4_error(info: ArrayInfo, x: np.ndarray, packed: np.ndarray, scale: np.ndarray) -> float:
    """The largest error, in half steps, of x clipped to what 4 bits hold; infinite if a group is, by the sum
    of squares, further from x than without a search for its scale.
    """
    return float(_int4_errors(x, packed, scale, dataclasses.replace(info, stored=())))


@functools.partial(jax.jit, static_argnames="info")
def _int4_errors(x: jax.Array, packed: jax.Array, scale: jax.Array, info: ArrayInfo) -> jax.Array:
    at = info.held.values.letters.index("I")
    ours, nearest = stored_form(packed, scale, info), quantize_groups(x, *info.groups, searched=False)
    x = in_groups(x, *info.groups)
    known = jnp.all(jnp.isfinite(x), at)

    errors, nearest_errors = (group_errors(x, dequantize_groups(q, at), at) for q in (ours, nearest))
    worse = errors > nearest_errors * (1 + 2**-15)  # for they are summed in another order
    step = jnp.expand_dims(jnp.where(scale == 0, 1, scale), at).astype(jnp.float32)
    error = jnp.abs(jnp.clip(x / step, INT4_MIN, INT4_MAX) - ours.values.astype(jnp.float32))
    error = jnp.max(jnp.where(jnp.expand_dims(known, at), error, 0)) / (0.5 + 2**-15)
    right = jnp.all(known == jnp.isfinite(scale)) & ~jnp.any(worse & known)
    return jnp.where(right, error, jnp.inf)
