"""examples/0*.ipynb: what is stored in the notebooks is what a clean kernel computes.

The outputs of cells that are tagged "varies" depend on the machine or the day, such as times and rounding
errors. They are not compared. (examples/cluster.ipynb has its own test.)
"""

import pathlib
import re
import subprocess
import sys

import nbclient
import nbformat
import pytest
from conftest import FAST

import main

EXAMPLES = pathlib.Path(main.__file__).parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("0*.ipynb"))
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


@by_name
def test_what_is_stored(file):
    """All cells were run once, from top to bottom, without an error, a warning or the path of a machine."""
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]
    shown = "\n".join([printed(cell) for cell in cells] + [cell.source for cell in notebook.cells])
    assert not re.findall(r"(?<![\w./])/(?:home|root|tmp|usr|opt|work|Users)/\S*|site-packages", shown)
    assert str(EXAMPLES.parent) not in file.read_text()


@by_name
def test_links(file):
    """What the text links to is in the repository."""
    notebook = nbformat.read(file, as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]*)\)", text) if "://" not in link]
    assert [link for link in links if link and not (EXAMPLES / link).exists()] == []


def test_format():
    """ruff reads notebooks as it reads modules."""
    for command in ("check",), ("format", "--check"):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", *NOTEBOOKS]
        done = subprocess.run(ruff, cwd=EXAMPLES.parent, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_index():
    """examples/README.md links to every notebook."""
    index = (EXAMPLES / "README.md").read_text()
    assert [file.name for file in EXAMPLES.glob("*.ipynb") if f"({file.name})" not in index] == []


@pytest.mark.deep
@by_name
def test_from_a_clean_kernel(file, tmp_path, monkeypatch):
    """Every output is computed again, and is the stored one, except those that vary."""
    monkeypatch.setenv("XLA_FLAGS", FAST)  # no virtual devices: a notebook asks for them itself
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    stored, notebook = (nbformat.read(file, as_version=4) for _ in range(2))
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    for before, now in zip(code_cells(stored), code_cells(notebook), strict=True):
        assert not [output for output in now.outputs if output.get("name") == "stderr"], printed(now)
        if "varies" in before.metadata.get("tags", ()):
            assert bool(printed(now)) == bool(printed(before)), now.source
        else:
            assert printed(now) == printed(before), now.source
