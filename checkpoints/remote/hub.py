"""Find a model: a folder or file on this machine, a URL, or a repository of the Hugging Face hub.

What is needed of a repository is downloaded, or read over the network where that is better.
"""

import os
import pathlib
import re
import shutil
import sys
import urllib.parse

import huggingface_hub as hub
from huggingface_hub import constants

from checkpoints.folders import (
    COMPANIONS,
    INDEX,
    PICKLED,
    THEIR_FILE,
    THEIR_INDEX,
    ModelFolder,
    read_json,
    refuse_pickled,
    weight_map_in,
)
from checkpoints.remote.object_storage import RemoteFolder, is_url
from checkpoints.remote.remote_models import open_remote
from distributed.exchange import from_first, gather, process_count, process_index
from feedback.errors import UserError, did_you_mean

HUB_ID = r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:/((?:\w[\w.-]*/)*\w[\w.-]*\.gguf))?(?:@([\w./-]+))?"


def find_model(path_or_id: str, alone: bool = False) -> ModelFolder | pathlib.Path:
    """The folder of a model, or the path of a GGUF file; of a hub id, perhaps in the hub's cache.

    A hub id is OWNER/NAME or OWNER/NAME/FILE.gguf, with or without @REVISION. alone: whether this
    process alone calls this; otherwise all processes must call it. Raises UserError.
    """
    path_or_id = str(path_or_id)
    if is_url(path_or_id):
        return open_remote(path_or_id)
    path = pathlib.Path(os.path.expanduser(path_or_id))
    if path.is_dir():
        return ModelFolder(path)
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_file():
        raise UserError(f"{path_or_id}: neither a model's folder nor a GGUF file")
    suggestion = did_you_mean(path.name, [x.name for x in path.parent.glob("*")])
    hub_id = re.fullmatch(HUB_ID, path_or_id)
    if path.suffix == ".gguf" and (path.parent.is_dir() or not hub_id or not hub_id[2]):
        raise UserError(f"{path_or_id}: no such file{suggestion}")
    if not hub_id:
        raise UserError(f"{path_or_id}: no such folder{suggestion or ' (and a hub id would be OWNER/NAME)'}")
    try:
        return _in_hub(*hub_id.groups(), alone)
    except UserError:
        raise
    except Exception as e:  # huggingface_hub's own, and those of the HTTP and Xet libraries
        from huggingface_hub.errors import LocalEntryNotFoundError

        # LocalEntryNotFoundError says that the cache lacks a file, its cause why the download failed.
        cause = e.__cause__ if type(e) is LocalEntryNotFoundError else None
        reason = " ".join(str(cause or e).split())
        what_to_do = suggestion or _what_to_do(e, hub_id[1])
        message = f"{path_or_id}: no such folder, and the hub did not give it: {reason}{what_to_do}"
        raise UserError(message) from None


def _what_to_do(error: Exception, name: str) -> str:
    """'; ' and what lets the user download the repository, as far as the hub's error says what is wrong."""
    from huggingface_hub import errors  # the import takes long

    match error:
        case errors.LocalEntryNotFoundError():
            return "; if there is no network, give a local folder or a GGUF file"
        case errors.GatedRepoError():
            return f"; accept its license on https://huggingface.co/{name}, and set HF_TOKEN to your token"
        case errors.RevisionNotFoundError():
            return "; check what follows the @"
        case errors.RepositoryNotFoundError():
            check = "; check the name, and set HF_TOKEN if the repository is private"
            return did_you_mean(name, _similar_repositories(name)) or check
    return ""


def _similar_repositories(name: str) -> list[str]:
    """Repositories on the hub that have the same owner, or that a search for the name finds."""
    owner, _, model = name.partition("/")
    try:
        api = hub.HfApi()
        found = [*api.list_models(author=owner, limit=500), *api.list_models(search=model, limit=100)]
    except Exception:  # the hub's first answer is what matters
        return []
    return [repository.id for repository in found]


def _in_hub(name: str, gguf: str | None, revision: str | None, alone: bool) -> ModelFolder | pathlib.Path:
    """Download the small files, and the weights files that the index names, unless the cache has them.

    Weights are read over the network instead if there are several processes, each of which needs its part, or
    if the disk cannot hold them.
    gguf: the name of a GGUF file, whose path is returned; of a model in several files all are downloaded.
    """
    few = [] if gguf else [*COMPANIONS, INDEX, THEIR_INDEX]

    def small_files(revision: str | None) -> pathlib.Path:
        return pathlib.Path(hub.snapshot_download(name, revision=revision, allow_patterns=few))

    if process_count() > 1 and not alone:  # the same commit for all, though the branch may move on
        revision = from_first(lambda: small_files(revision).name)
    folder = small_files(revision)
    index = next((folder / name for name in (INDEX, THEIR_INDEX) if (folder / name).exists()), None)
    files = sorted(set(weight_map_in(read_json(index), str(index)).values())) if index else [THEIR_FILE]
    if gguf:
        files = [re.sub(r"-\d{5}-of-(\d{5}\.gguf)$", r"-?????-of-\1", gguf)]
    # The snapshot's folder is named after its commit; the branch may have moved on since.
    commit = folder.name
    there = [] if constants.HF_HUB_OFFLINE else _in_repository(name, commit, files)
    if _is_streamed(name, there, folder, gguf, alone):
        return ModelFolder(folder, _streamed(name, commit))
    folder = pathlib.Path(hub.snapshot_download(name, revision=commit, allow_patterns=files))
    found = folder / (gguf or files[0])
    if not found.exists():
        patterns = ["*.gguf", "*.safetensors", *PICKLED]
        everything = [] if constants.HF_HUB_OFFLINE else _in_repository(name, commit, patterns)
        names = [file.filename for file in everything]
        others = [file for file in names if file.endswith(".gguf")]
        if gguf or others:
            suggestion = did_you_mean(gguf, others) if gguf else ""
            example = f"; give one of its GGUF files, such as {name}/{others[0]}" if others else ""
            raise UserError(f"{name}: has no {gguf or THEIR_FILE}{suggestion or example}")
        refuse_pickled(name, names)
    return found if gguf else ModelFolder(folder)


def _is_streamed(name: str, files: list, folder: pathlib.Path, gguf: str | None, alone: bool) -> bool:
    """Whether to read weights files over the network instead of downloading them, as stderr is told.

    files: as of `_in_repository`. folder: of the snapshot in the hub's cache. All processes, unless this is
    alone, get the same answer. Raises UserError if GGUF files, which are always downloaded, have no room.
    """
    missing = [file.file_size for file in files if file.will_download]
    if not (alone or gguf) and any(gather(bool(missing))) and process_count() > 1:
        if process_index() == 0:
            total = sum(file.file_size for file in files) / 1e9
            what = f"{process_count()} processes read their parts of {total:,.2f} GB over the network"
            print(f"streaming {name}: {what}; nothing is downloaded", file=sys.stderr, flush=True)
        return True
    if not missing:
        return False
    cache = next(x for x in folder.parents[2:] if x.is_dir())
    begun = sum(file.stat().st_size for file in (folder.parents[1] / "blobs").glob("*.incomplete"))
    needed, free = sum(missing) - begun, shutil.disk_usage(cache).free
    size, room = f"{needed / 1e9:,.2f} GB", f"the disk of {cache} has {free / 1e9:,.2f} GB free"
    if needed > free and gguf:
        raise UserError(f"{name}: {size} to download, but {room}; set HF_HOME to a folder on a larger disk")
    if needed > free:
        total = sum(file.file_size for file in files) / 1e9
        what = f"{total:,.2f} GB are read over the network, each time; {room}"
        print(f"streaming {name}: {what}", file=sys.stderr, flush=True)
        return True
    print(f"downloading {name}: {size}; {room}", file=sys.stderr, flush=True)
    return False


def _streamed(name: str, commit: str) -> RemoteFolder:
    """The files of a commit, which are read from where the hub says that they are.

    The hub counts requests, and the storage that it redirects to does not: a file is asked for once, and
    again when its URL has expired. The token is for the hub alone.
    """

    def locate(file: str) -> tuple[str, dict[str, str]]:
        asked, token = hub.hf_hub_url(name, file, revision=commit), hub.get_token()
        try:
            url = hub.get_hf_file_metadata(asked, token=token, retry_on_errors=True).location
        except Exception as e:  # huggingface_hub's own
            reason = " ".join(str(e).split())
            raise UserError(f"{name}: the hub did not give {file}: {reason}{_what_to_do(e, name)}") from None
        at_hub = urllib.parse.urlsplit(url)[:2] == urllib.parse.urlsplit(asked)[:2]
        return url, {"Authorization": f"Bearer {token}"} if token and at_hub else {}

    return RemoteFolder(f"{constants.ENDPOINT}/{name}/resolve/{commit}", locate)


def _in_repository(name: str, commit: str, patterns: list[str]) -> list:
    """The repository's files whose names match: their filename, file_size, and whether they will_download."""
    from huggingface_hub.utils import tqdm  # the import takes long

    class Hidden(tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs | dict(disable=True))

    options = {"dry_run": True, "tqdm_class": Hidden}
    return hub.snapshot_download(name, revision=commit, allow_patterns=patterns, **options)
