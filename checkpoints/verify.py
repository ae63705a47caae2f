"""convert_checkpoint.py --verify: a converted folder, compared with its own checksums and with its source."""

import dataclasses
import math

from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.folders import INDEX, companions, read_json
from checkpoints.layouts import same_bits
from checkpoints.names import named_infos, stored_infos
from checkpoints.tensor_files import file_checksum
from checkpoints.threads import in_order
from feedback.errors import UserError
from feedback.progress import progress
from sharding.arrays import ArrayInfo


def verify(folder: str, source: str | None = None) -> list[str]:
    """Compute the checksums of a converted folder again, and compare its weights with those of `source`.

    Returns what was found, in sentences. Raises UserError naming the first tensor or file that is wrong.
    """
    ours = open_checkpoint(folder, alone=True)
    if not ours.converted:
        raise UserError(f"{ours.name}: is not a converted folder; there are no checksums in it")
    index = read_json(ours.folder / INDEX)
    known = {name: facts.get("sha256") for name, facts in index["files"].items()}
    weights = set(index["weight_map"].values())
    for path in {ours.folder / name for name in known.keys() - weights} | set(companions(ours.folder)):
        if not path.is_file() or file_checksum(path) != known.get(path.name):
            raise UserError(f"{ours.name}/{path.name}: is not the file that {INDEX} knows")
    tensors = ours.tensors
    with progress("checksums", sum(tensor.nbytes for tensor in tensors)) as bar:
        checksums = in_order(lambda tensor: tensor.checksum(), tensors, ahead=32)
        for tensor, checksum in zip(tensors, checksums, strict=True):
            if checksum != index["checksums"][tensor.name]:
                raise UserError(f"{tensor} is damaged; convert the model again")
            bar.update(tensor.nbytes)
    found = [f"{folder}: the checksums of {len(tensors)} tensors and of the model's other files are right"]
    if source is not None:
        found.append(f"{folder}: {_compare(ours, open_checkpoint(source, alone=True))}")
    return found


def _compare(ours: Checkpoint, theirs: Checkpoint) -> str:
    """Compare every weight of a converted folder with the one in its source. Raises UserError."""
    if theirs.format:
        raise UserError(
            f"{theirs.name}: is {theirs.format}; give the float model that {ours.name} was made of"
        )
    if theirs.config != ours.config:
        raise UserError(f"{theirs.name}: is another model than {ours.name}")

    def largest_error(weight: tuple[str, ArrayInfo]) -> tuple[str, float]:
        name, info = weight
        nameless = dataclasses.replace(info, stored=None)  # weights of one shape share a program
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
                errors = [float(info.quantization.error(*x, *y, nameless))]
            largest = max(largest, *errors)
        return name, largest

    total = sum(theirs.sources[name].stored_bytes for name, _ in named_infos(ours.config))
    infos = named_infos(ours.config, format=ours.format)
    with progress("comparing", total) as bar:
        for name, error in in_order(largest_error, infos, ahead=32):
            if error > 1:
                raise UserError(f"{ours.name}: {name} is not what {theirs.name} has")
            bar.update(theirs.sources[name].stored_bytes)
    kind = f"within half a step of {ours.format} of" if ours.format else f"in {ours.dtype} exactly"
    return f"the weights are {kind} those of {theirs.name}"
