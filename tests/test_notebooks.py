"""examples/*.ipynb: what is stored in the notebooks is what a clean kernel computes.

The outputs of cells that are tagged "varies" depend on the machine or the day, such as times and rounding
errors. They are not compared. cluster.ipynb drives two engines, whose cells are compared with EXPECTED.
"""

import pathlib
import re
import subprocess
import sys

import nbclient
import nbformat
import pytest
from conftest import CHECKPOINTS, FAST

import main

EXAMPLES = pathlib.Path(main.__file__).parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
CLUSTER = EXAMPLES / "cluster.ipynb"
ANSWER = (
    "My name is Tiny Llama. I am a small demonstration model, trained in minutes to add numbers below 100."
)
# What the cells of cluster.ipynb show that run on its two engines.
EXPECTED = [
    ["[stdout:0] 2 of 4 devices\n", "[stdout:1] 2 of 4 devices\n"],
    [f"[stdout:{i}] embedding (512, 128) here [(128, 128), (128, 128)]\n" for i in range(2)],
    [],
    [f"[stdout:0] {ANSWER}"],
    [],
]
by_name = pytest.mark.parametrize("file", NOTEBOOKS, ids=[file.stem for file in NOTEBOOKS])


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell) -> str:
    """All that a cell shows as text. A kernel may send one text in several pieces."""
    texts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            texts.append(output.text)
        elif output.output_type != "error":
            texts.append(output.data.get("text/plain", ""))
    return "".join(texts)


def printed_by_engines(notebook) -> list[list[str]]:
    """What the engines' cells show, sorted: which engine comes first is chance."""
    cells = [cell for cell in notebook.cells if cell.source.startswith("%%px")]
    return [sorted(output.data["text/plain"] for output in cell.outputs) for cell in cells]


@by_name
def test_what_is_stored(file):
    """All cells were run once, from top to bottom, without an error, a warning or the path of a machine."""
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs and not [x for x in outputs if x.output_type == "error" or x.get("name") == "stderr"]
    shown = "\n".join([printed(cell) for cell in cells] + [cell.source for cell in notebook.cells])
    assert not re.findall(r"(?<![\w./])/(?:home|root|tmp|usr|opt|work|Users)/\S*|site-packages", shown)
    assert str(EXAMPLES.parent) not in file.read_text()
    if file == CLUSTER:
        assert printed_by_engines(notebook) == EXPECTED


@by_name
def test_links(file):
    """What the text links to is in the repository, and examples/README.md links to the notebook."""
    notebook = nbformat.read(file, as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]*)\)", text) if "://" not in link]
    assert [link for link in links if link and not (EXAMPLES / link).exists()] == []
    assert f"({file.name})" in (EXAMPLES / "README.md").read_text()


def test_format():
    """ruff reads notebooks as it reads modules."""
    for command in ("check",), ("format", "--check"):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", *NOTEBOOKS]
        done = subprocess.run(ruff, cwd=EXAMPLES.parent, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


class Watched(nbclient.NotebookClient):
    """Counts the messages that bring or change what a cell shows, by cell."""

    def process_message(self, message, cell, cell_index):
        if message["msg_type"] in ("display_data", "update_display_data"):
            self.messages[cell_index] = self.messages.get(cell_index, 0) + 1
        return super().process_message(message, cell, cell_index)


def run_again(file: pathlib.Path, folder: pathlib.Path, monkeypatch):
    """The notebook, computed by a clean kernel, and the number of messages of each cell."""
    monkeypatch.setenv("XLA_FLAGS", FAST)  # no virtual devices: a notebook asks for them itself
    monkeypatch.setenv("IPYTHONDIR", str(folder))
    notebook = nbformat.read(file, as_version=4)
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    client = Watched(notebook, timeout=600, resources={"metadata": {"path": str(EXAMPLES)}})
    client.messages = {}
    client.execute()
    return notebook, client.messages


@pytest.mark.deep
@pytest.mark.parametrize("file", [x for x in NOTEBOOKS if x != CLUSTER], ids=lambda file: file.stem)
def test_from_a_clean_kernel(file, tmp_path, monkeypatch):
    """Every output is computed again, and is the stored one, except those that vary."""
    stored, (notebook, _) = nbformat.read(file, as_version=4), run_again(file, tmp_path, monkeypatch)
    for before, now in zip(code_cells(stored), code_cells(notebook), strict=True):
        assert not [output for output in now.outputs if output.get("name") == "stderr"], printed(now)
        if "varies" in before.metadata.get("tags", ()):
            assert bool(printed(now)) == bool(printed(before)), now.source
        else:
            assert printed(now) == printed(before), now.source


@pytest.mark.deep
def test_cluster_from_a_clean_kernel(tmp_path, monkeypatch):
    """Two engines say what one process does, as the tokens come."""
    notebook, messages = run_again(CLUSTER, tmp_path, monkeypatch)
    assert printed_by_engines(notebook) == EXPECTED
    streamed = next(i for i, cell in enumerate(notebook.cells) if "for text in generate" in cell.source)
    assert messages[streamed] > 3
    command = [sys.executable, main.__file__, "--checkpoint", CHECKPOINTS / "tiny-llama4"]
    command += ["--prompt", "Tell me your name"]
    assert ANSWER in subprocess.run(command, capture_output=True, text=True, check=True).stdout
