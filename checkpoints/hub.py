"""Find a model's folder on this machine, or download the files that are needed from the Hugging Face hub."""

import os
import pathlib
import re

from checkpoints.folders import COMPANIONS, INDEX, THEIR_FILE, THEIR_INDEX, read_json, weight_map_in
from feedback.errors import UserError


def find_folder(path_or_id: str) -> pathlib.Path:
    """A folder's path, or the path of the hub's snapshot of OWNER/NAME or OWNER/NAME@REVISION."""
    folder = pathlib.Path(os.path.expanduser(path_or_id))
    if folder.is_dir():
        return folder
    if folder.suffix == ".gguf":
        raise UserError(f"{path_or_id}: no such file")
    hub_id = re.fullmatch(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w./-]+))?", path_or_id)
    if not hub_id:
        raise UserError(f"{path_or_id}: no such folder (and a hub id would be OWNER/NAME)")
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return _download(*hub_id.groups())
    except Exception as e:  # huggingface_hub's own, and those of the HTTP and Xet libraries
        # LocalEntryNotFoundError says that the cache lacks a file, its cause why the download failed.
        cause = e.__cause__ if type(e) is LocalEntryNotFoundError else None
        reason = " ".join(str(cause or e).split())
        raise UserError(f"{path_or_id}: no such folder, and the hub did not give it: {reason}") from None


def _download(name: str, revision: str | None) -> pathlib.Path:
    """Download the small files and the weights files that the index names, unless the cache has them."""
    from huggingface_hub import snapshot_download

    few = [*COMPANIONS, INDEX, THEIR_INDEX]
    folder = pathlib.Path(snapshot_download(name, revision=revision, allow_patterns=few))
    index = next((folder / name for name in (INDEX, THEIR_INDEX) if (folder / name).exists()), None)
    files = set(weight_map_in(read_json(index), index).values()) if index else {THEIR_FILE}
    # The snapshot's folder is named after its commit; the branch may have moved on since.
    return pathlib.Path(snapshot_download(name, revision=folder.name, allow_patterns=sorted(files)))
