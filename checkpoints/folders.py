"""What is in a model's folder: the small files, the index, and the files of tensors, opened."""

import contextlib
import os
import pathlib
import resource

from checkpoints.errors import UserError
from checkpoints.tensor_files import StoredTensor, TensorFile, parse_json

FORMAT = 1  # of converted folders
INDEX = "weights.safetensors.index.json"  # its presence tells our folders from Hugging Face's
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
    """Where this program keeps what it would else make again."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(caches) / "llama-jax"


def read_json(file: pathlib.Path) -> dict:
    """The object in a JSON file. Raises UserError naming the file."""
    return parse_json(file.read_bytes(), file)


def companions(folder: pathlib.Path) -> list[pathlib.Path]:
    """The model's small files."""
    return sorted(path for pattern in COMPANIONS for path in folder.glob(pattern) if path.is_file())


def object_in(around: dict, name: str, file: pathlib.Path) -> dict:
    """A JSON object in another. Raises UserError naming the file if it is not there, or empty."""
    value = around.get(name)
    if not isinstance(value, dict) or not value:
        raise UserError(f"{file}: no {name} in it; download or convert it again")
    return value


def weight_map_in(content: dict, index: pathlib.Path) -> dict[str, str]:
    """The file of each tensor, by an index. Raises UserError naming what is no file of the same folder."""
    weight_map = object_in(content, "weight_map", index)
    for name, file in weight_map.items():
        if not isinstance(file, str) or pathlib.PurePath(file).name != file or file in ("", ".", ".."):
            raise UserError(
                f"{index}: tensor {name} is said to be in {file!r}, which is not a file of this folder"
            )
    return weight_map


def read_index(folder: pathlib.Path) -> dict:
    """The index of a converted folder, whose files must have the sizes that it says. Raises UserError."""
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
    """The tensors of these files, of which only the headers are read; `weight_map` may not know them all."""
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
    """Let this process hold as many open files as it may: a mapped one is open, there may be thousands."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a system may have a limit that it does not tell
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2**16 if hard < 0 else hard), hard))
