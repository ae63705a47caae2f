"""docs/models.md: its tables are what the planner computes, and its commands are commands of main.py."""

import functools
import importlib.util
import pathlib
import re
import shlex
import sys

import pytest

from planner import open_models
from planner.published_models import MODELS
from terminal.options import parse_arguments

PAGE = (pathlib.Path(open_models.__file__).parents[1] / "docs" / "models.md").read_text()
deep = functools.partial(pytest.param, marks=pytest.mark.deep)
pytestmark = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")


def test_sizes():
    """Of weights, against what the models' publishers state: 8.03 and 235 billion parameters in 2 bytes."""
    assert open_models.weight_bytes("llama3.1-8b", "none") == pytest.approx(2 * 8.03e9, rel=1e-3)
    assert open_models.weight_bytes("qwen3-235b-a22b", "none") == pytest.approx(2 * 235e9, rel=1e-3)
    names = [model.name for model in open_models.OPEN_MODELS]
    assert len(set(names)) == len(names) >= 25 and set(names) <= MODELS.keys()


@pytest.mark.parametrize("part", [0, *map(deep, range(1, 6))])
def test_models(part):
    """A sixth of the table's rows at a time."""
    for model in open_models.OPEN_MODELS[part::6]:
        assert f"| {' | '.join(open_models.model_cells(model))} |" in PAGE.splitlines()


@pytest.mark.parametrize("part", [0, deep(1), deep(2), deep(3)])
def test_loads(part):
    for name, where in open_models.LOADS[part::4]:
        for positions in (2048, 8192, 32768):
            assert f"| {' | '.join(open_models.load_cells(name, where, positions))} |" in PAGE.splitlines()


def test_the_page_has_each_row_once():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| model |")]
    assert len(rows) == len(set(rows)) == len(open_models.OPEN_MODELS) + 3 * len(open_models.LOADS)


def test_commands(monkeypatch):
    """Each is complete, and asks for a format that the model's row has for some machine."""
    commands = re.findall(r"`(python3 main.py --checkpoint .*?)`", PAGE)
    assert len(commands) == len(open_models.OPEN_MODELS)
    for command, model in zip(commands, open_models.OPEN_MODELS, strict=True):
        monkeypatch.setattr(sys, "argv", shlex.split(command)[1:])
        args = parse_arguments()
        assert args.checkpoint == model.hub and args.serve
        assert args.quantize in (None, *model.formats)


def test_the_other_pages():
    """Where another page names a model of the table, its format is one of that row."""
    root, formats = pathlib.Path(open_models.__file__).parents[1], {}
    for page in {root / "README.md", *(root / "docs").glob("*.md")} - {root / "docs" / "models.md"}:
        text = page.read_text().replace("\\\n", " ").replace("\n", " ")
        named = r"(?:--checkpoint |MODEL=|convert_checkpoint\.py )([\w-]+/[\w.-]+)([^`]*)"
        for hub, rest in re.findall(named, text):
            formats.setdefault(hub, set()).update(re.findall(r"^[^;&]*?--quantize (\w+)", rest))
    named = [model for model in open_models.OPEN_MODELS if model.hub in formats]
    assert len(named) >= 5 and all(formats[model.hub] <= {*model.formats} for model in named)
    assert {x for x in formats if x.startswith("Qwen/")} <= {model.hub for model in named}


def test_a_model_that_fits_nowhere():
    """The largest one, in bfloat16, on a chip; and a machine too small for one row."""
    kimi = open_models.OpenModel("", "kimi-k2", formats=("none",))
    assert open_models.on_machine(kimi, "one H100") is None
    cells = open_models.load_cells("llama3.1-405b", "one H100", 2048)
    assert cells[3:] == ["-"] * 5
