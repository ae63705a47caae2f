"""The files in a model's folder: small files, the index, and the files of tensors."""

import contextlib
import os
import pathlib
import resource

from checkpoints.tensor_files import StoredTensor, TensorFile, parse_json
from feedback.errors import UserError

FORMAT = 1  # version of converted folders
INDEX = "weights.safetensors.index.json"  # a folder that has it is a converted one
STATE = "conversion.json"  # in the folder of an unfinished conversion: its identity
THEIR_INDEX, THEIR_FILE = "model.safetensors.index.json", "model.safetensors"
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
)


def cache_folder() -> pathlib.Path:
    """The folder of files that this program would otherwise make again."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(caches) / "llama-jax"


def read_json(file: pathlib.Path) -> dict:
    """The object in a JSON file. Raises UserError naming the file."""
    return parse_json(file.read_bytes(), file)


def companions(folder: pathlib.Path) -> list[pathlib.Path]:
    """The model's small files: config.json, the tokenizer's and others."""
    return sorted(path for pattern in COMPANIONS for path in folder.glob(pattern) if path.is_file())


def object_in(around: dict, name: str, file: pathlib.Path) -> dict:
    """The JSON object in a field of another. Raises UserError naming the file if it is missing or empty."""
    value = around.get(name)
    if not isinstance(value, dict) or not value:
        raise UserError(f"{file}: no {name} in it; download or convert it again")
    return value


def weight_map_in(content: dict, index: pathlib.Path) -> dict[str, str]:
    """The file name of each tensor. Raises UserError if an index names a file that is not in its folder."""
    weight_map = object_in(content, "weight_map", index)
    for name, file in weight_map.items():
        if not isinstance(file, str) or pathlib.PurePath(file).name != file or file in ("", ".", ".."):
            raise UserError(
                f"{index}: tensor {name} is said to be in {file!r}, which is not a file of this folder"
            )
    return weight_map


def read_index(folder: pathlib.Path) -> dict:
    """The index of a converted folder. Raises UserError, also if a file has not the size in the index."""
    path = folder / INDEX
    index = read_json(path)
    weight_map = weight_map_in(index, path)
    metadata, checksums, files = (object_in(index, name, path) for name in ("metadata", "checksums", "files"))
    if metadata.get("format") != FORMAT:
        raise UserError(
            f"{path}: has format {metadata.get('format')}, not {FORMAT}, this program's; convert it again"
        )
    if set(checksums) != set(weight_map):
        raise UserError(f"{path}: its checksums are not of its weight_map's tensors; convert the model again")
    for name in files:
        object_in(files, name, path)
    for name in set(weight_map.values()):
        expected, file = object_in(files, name, path).get("bytes"), folder / name
        if file.is_file() and file.stat().st_size != expected:
            raise UserError(f"{file}: has {file.stat().st_size} bytes, not {expected} as {INDEX} says")
    return index


def open_tensors(folder: pathlib.Path, weight_map: dict[str, str]) -> dict[str, StoredTensor]:
    """The tensors of the files in a weight map, which may lack some of the tensors. Only headers are read."""
    allow_open_files()
    tensors = {}
    for path in (folder / name for name in sorted(set(weight_map.values()))):
        if not path.is_file():
            raise UserError(f"{path}: no such file; is the download complete?")
        for name, tensor in TensorFile(path).tensors.items():
            if name in tensors:
                raise UserError(f"{path}: tensor {name} is also in {tensors[name].file.path.name}")
            tensors[name] = tensor
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.path.name != file:
            raise UserError(f"{folder / file}: tensor {name} is not in it, though the index says so")
    return tensors


def allow_open_files() -> None:
    """Raise the limit of open files: every mapped file is an open one, and there may be thousands."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems have a lower limit than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2**16 if hard < 0 else hard), hard))
