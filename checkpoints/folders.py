"""The files in a model's folder: small files, the index, and the files of tensors."""

import atexit
import contextlib
import dataclasses
import fnmatch
import json
import os
import pathlib
import resource
import shutil
import tempfile
from collections.abc import Callable, Collection

from checkpoints.remote.fetching import FetchedFile
from checkpoints.remote.object_storage import NoSuchObject, RemoteFolder
from checkpoints.tensor_files import MappedFile, StoredTensor, TensorFile, file_checksum, parse_json
from checkpoints.threads import WAITING, in_order
from feedback.errors import UserError

FORMAT = 1  # version of converted folders
INDEX = "weights.safetensors.index.json"  # a folder that has it is a converted one
STATE = "conversion.json"  # in the folder of an unfinished conversion: its identity
THEIR_INDEX, THEIR_FILE = "model.safetensors.index.json", "model.safetensors"
COMPANIONS = """config.json generation_config.json tokenizer* vocab.json merges.txt added_tokens.json
    special_tokens_map.json chat_template*""".split()
CHECKSUMS = "checksums.json"  # of the other files in a folder of the cache
PICKLED = "pytorch_model*.bin", "consolidated*.pth", "*.pth", "*.pt", "*.ckpt", "*.bin"  # weights of PyTorch


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A model's folder. `str` of it, and `where`, name it and its files in messages.

    small: the local folder of the small files. remote: of the weights, if they are not beside them.
    """

    small: pathlib.Path
    remote: RemoteFolder | None = None

    def __str__(self) -> str:
        return self.remote.url if self.remote else str(self.small)

    def where(self, name: str) -> str:
        return f"{self.remote.url}/{name}" if self.remote else str(self.small / name)

    def read_json(self, name: str) -> dict:
        """The object in a small file. Raises UserError."""
        return parse_json((self.small / name).read_bytes(), self.where(name))

    def open(self, name: str, size: int | None = None) -> TensorFile | None:
        """A weights file; None if it is not there. Raises UserError, also if its size is not this one."""
        if self.remote:
            try:
                content = FetchedFile(self.remote, name)
            except NoSuchObject:
                return None
        elif (self.small / name).is_file():
            content = MappedFile(self.small / name)
        else:
            return None
        if size not in (None, content.size):
            raise UserError(f"{content}: has {content.size} bytes, not {size} as {INDEX} says")
        return TensorFile(content)


def cache_folder() -> pathlib.Path:
    """The folder of files that this program would otherwise make again."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(caches) / "llama-jax"


def made_once(folder: pathlib.Path, write: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """A folder of the cache that `write` has filled, now or in an earlier run.

    If the cache cannot be written, a folder that is removed at the end. Raises UserError.
    """
    if _is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = pathlib.Path(tempfile.mkdtemp(dir=folder.parent))
    except OSError:  # the cache cannot be written
        folder = new = pathlib.Path(tempfile.mkdtemp())
        atexit.register(shutil.rmtree, new, ignore_errors=True)
    try:
        write(new)
        checksums = {path.name: file_checksum(path) for path in sorted(new.iterdir())}
        (new / CHECKSUMS).write_text(json.dumps(checksums))
    except (OSError, UserError) as e:
        shutil.rmtree(new)
        if isinstance(e, UserError):
            raise
        raise UserError(f"{new}: {e.strerror or e}; make room there, or set XDG_CACHE_HOME") from None
    if new != folder:
        try:
            if folder.is_dir() and not _is_whole(folder):
                shutil.rmtree(folder)
            new.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(new)
    return folder


def _is_whole(folder: pathlib.Path) -> bool:
    """Whether all files of a folder are there and have their checksums."""
    try:
        checksums = json.loads((folder / CHECKSUMS).read_text())
        return all(file_checksum(folder / name) == x for name, x in checksums.items())
    except (OSError, ValueError):
        return False


def refuse_unfinished(folder: str, names: Collection[str]) -> None:
    """Raises UserError if a folder with files of these names is one that convert_checkpoint.py has begun."""
    if STATE in names and INDEX not in names:
        raise UserError(f"{folder}: is an unfinished conversion; run its command again to complete it")


def refuse_pickled(name: str, files: Collection[str]) -> None:
    """Raises UserError if a folder or repository has pickled files of PyTorch, but no safetensors files."""
    found = [file for pattern in PICKLED for file in sorted(fnmatch.filter(files, pattern))]
    if not found or fnmatch.filter(files, "*.safetensors"):
        return
    what_to_do = "take a version of the model in safetensors, which the hub may have"
    if fnmatch.fnmatch(found[0], "pytorch_model*.bin"):  # transformers reads no other pickles
        call = f"AutoModelForCausalLM.from_pretrained({name!r}).save_pretrained('NEW_DIR')"
        what_to_do += f", or let transformers write it: {call}, and copy the tokenizer's files to NEW_DIR"
    raise UserError(f"{name}: has no safetensors files; {found[0]} is pickled, and not read; {what_to_do}")


def read_json(file: pathlib.Path) -> dict:
    """The object in a JSON file. Raises UserError naming the file."""
    return parse_json(file.read_bytes(), file)


def companions(folder: pathlib.Path) -> list[pathlib.Path]:
    """The model's small files: config.json, the tokenizer's and others."""
    return sorted(path for pattern in COMPANIONS for path in folder.glob(pattern) if path.is_file())


def object_in(around: dict, name: str, file: str) -> dict:
    """The JSON object in a field of another. Raises UserError naming the file if it is missing or empty."""
    value = around.get(name)
    if not isinstance(value, dict) or not value:
        raise UserError(f"{file}: no {name} in it; download or convert it again")
    return value


def weight_map_in(content: dict, index: str) -> dict[str, str]:
    """The file name of each tensor. Raises UserError if an index names a file that is not in its folder."""
    weight_map = object_in(content, "weight_map", index)
    for name, file in weight_map.items():
        if not isinstance(file, str) or pathlib.PurePath(file).name != file or file in ("", ".", ".."):
            raise UserError(
                f"{index}: tensor {name} is said to be in {file!r}, which is not a file of this folder"
            )
    return weight_map


def read_index(folder: ModelFolder) -> dict:
    """The index of a converted folder. Raises UserError."""
    path = folder.where(INDEX)
    index = folder.read_json(INDEX)
    weight_map = weight_map_in(index, path)
    metadata, checksums, files = (object_in(index, name, path) for name in ("metadata", "checksums", "files"))
    if metadata.get("format") != FORMAT:
        raise UserError(
            f"{path}: has format {metadata.get('format')}, not {FORMAT}, this program's; convert it again"
        )
    if set(checksums) != set(weight_map):
        raise UserError(f"{path}: its checksums are not of its weight_map's tensors; convert the model again")
    for name in {*files, *weight_map.values()}:
        object_in(files, name, path)
    return index


def open_tensors(
    folder: ModelFolder,
    weight_map: dict[str, str],
    sizes: dict[str, int] | None = None,
    is_unused: Callable[[str], bool] = lambda name: False,
) -> dict[str, StoredTensor]:
    """The tensors of the files in a weight map, which may lack some of the tensors. Only headers are read.

    sizes: of the files, if they are known. is_unused: whether the file of this tensor may lack it.
    Raises UserError.
    """
    allow_open_files()
    tensors, names = {}, sorted(set(weight_map.values()))

    def opened(name: str) -> TensorFile | None:
        return folder.open(name, (sizes or {}).get(name))

    pool = in_order(opened, names, ahead=WAITING, workers=WAITING)
    for name, file in zip(names, pool if folder.remote else map(opened, names), strict=True):
        if file is None:
            load = "upload" if folder.remote else "download"
            raise UserError(f"{folder.where(name)}: no such file; is the {load} complete?")
        for tensor in file.tensors:
            if tensor in tensors:
                raise UserError(f"{file}: tensor {tensor} is also in {tensors[tensor].file.name}")
        tensors |= file.tensors
    for name, file in weight_map.items():
        if (name not in tensors or tensors[name].file.name != file) and not is_unused(name):
            raise UserError(f"{folder.where(file)}: tensor {name} is not in it, though the index says so")
    return tensors


def allow_open_files() -> None:
    """Raise the limit of open files: every mapped file is an open one, and there may be thousands."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems have a lower limit than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2**16 if hard < 0 else hard), hard))
