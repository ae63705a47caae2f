"""A model's folder in object storage or on a web server: its small files are copied into the cache.

They are a few MB. Weights are not copied to the disk, see fetching.py.
"""

import fnmatch
import hashlib
import pathlib

from checkpoints.folders import (
    COMPANIONS,
    INDEX,
    THEIR_INDEX,
    ModelFolder,
    cache_folder,
    made_once,
    refuse_unfinished,
)
from checkpoints.remote.object_storage import NoSuchObject, RemoteFolder
from checkpoints.tensor_files import parse_json
from checkpoints.threads import together
from feedback.errors import UserError

# What a web server, which cannot list a folder, is asked for.
KNOWN = """config.json generation_config.json tokenizer.json tokenizer_config.json tokenizer.model vocab.json
    merges.txt added_tokens.json special_tokens_map.json chat_template.jinja chat_template.json""".split()


def open_remote(url: str) -> ModelFolder:
    """The folder at a URL. Raises UserError."""
    remote = RemoteFolder(url)
    if url.rstrip("/").endswith(".gguf"):
        raise UserError(f"{remote.url}: GGUF files are read from a disk only; download it and give its path")
    files = _small_files(remote)
    if "config.json" not in files:
        raise UserError(f"{remote.url}: no config.json in it; is it a model's folder, and whole?")
    digest = hashlib.sha256(remote.url.encode())
    for name, content in sorted(files.items()):
        digest.update(hashlib.sha256(name.encode() + b"\0" + content).digest())
    # Named after their content, as files that have changed need another folder.
    name = f"{remote.url.rpartition('/')[2]}-{digest.hexdigest()[:16]}"

    def write(folder: pathlib.Path) -> None:
        for name, content in files.items():
            (folder / name).write_bytes(content)

    return ModelFolder(made_once(cache_folder() / "remote" / name, write), remote)


def _small_files(remote: RemoteFolder) -> dict[str, bytes]:
    """The contents of the small files that are there, by name."""
    patterns = (*COMPANIONS, INDEX, THEIR_INDEX)
    if remote.scheme in ("gs", "s3"):
        there = remote.list()
        refuse_unfinished(remote.url, there)
        names = [x for x in there if any(fnmatch.fnmatch(x, pattern) for pattern in patterns)]
        return _contents(remote, names)
    indices = _contents(remote, [INDEX, THEIR_INDEX])
    if INDEX not in indices:
        return indices | _contents(remote, KNOWN)
    index = parse_json(indices[INDEX], f"{remote.url}/{INDEX}")
    listed = index.get("files") if isinstance(index.get("files"), dict) else {}
    names = [x for x in listed if any(fnmatch.fnmatch(x, pattern) for pattern in COMPANIONS)]
    return indices | _contents(remote, names)


def _contents(remote: RemoteFolder, names: list[str]) -> dict[str, bytes]:
    def content(name: str) -> bytes | None:
        try:
            return remote.read(name)
        except NoSuchObject:
            return None

    found = together(lambda name=name: content(name) for name in names)
    return {name: x for name, x in zip(names, found, strict=True) if x is not None}
