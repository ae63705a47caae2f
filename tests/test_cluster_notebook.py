"""examples/cluster.ipynb: what is stored in it, and what a clean kernel does, is what one process says."""

import pathlib
import subprocess
import sys

import nbclient
import nbformat
import pytest
from conftest import CHECKPOINTS

import main

NOTEBOOK = pathlib.Path(main.__file__).parent / "examples" / "cluster.ipynb"
ANSWER = (
    "My name is Tiny Llama. I am a small demonstration model, trained in minutes to add numbers below 100."
)


def printed(notebook) -> list[list[str]]:
    """What the engines' cells show, sorted: which engine comes first is chance."""
    cells = [cell for cell in notebook.cells if cell.source.startswith("%%px")]
    return [sorted(output.data["text/plain"] for output in cell.outputs) for cell in cells]


EXPECTED = [
    ["[stdout:0] 2 of 4 devices\n", "[stdout:1] 2 of 4 devices\n"],
    [f"[stdout:{i}] embedding (512, 128) here [(128, 128), (128, 128)]\n" for i in range(2)],
    [],
    [f"[stdout:0] {ANSWER}"],
    [],
]


def test_what_is_stored():
    """All was run, from top to bottom, and nothing tells where."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert printed(notebook) == EXPECTED
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    stored = NOTEBOOK.read_text()
    assert not any(
        folder in stored for folder in (str(NOTEBOOK.parents[1]), "site-packages", "/home/", "/tmp/")
    )


class Watched(nbclient.NotebookClient):
    """Counts the messages that bring or change what a cell shows, by cell."""

    def process_message(self, message, cell, cell_index):
        if message["msg_type"] in ("display_data", "update_display_data"):
            self.messages[cell_index] = self.messages.get(cell_index, 0) + 1
        return super().process_message(message, cell, cell_index)


@pytest.mark.deep
def test_from_a_clean_kernel(tmp_path, monkeypatch):
    """Two engines say what one process does, as the tokens come."""
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = Watched(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    client.messages = {}
    client.execute()
    assert printed(notebook) == EXPECTED
    streamed = next(i for i, cell in enumerate(notebook.cells) if "for text in generate" in cell.source)
    assert client.messages[streamed] > 3
    command = [sys.executable, main.__file__, "--checkpoint", CHECKPOINTS / "tiny-llama4"]
    command += ["--prompt", "Tell me your name"]
    assert ANSWER in subprocess.run(command, capture_output=True, text=True, check=True).stdout
