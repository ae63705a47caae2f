"""The README: its programs run as they stand, and what it and docs/ name is there."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DECODE, SHARD_MAP = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize(
    ("program", "expected"), [(DECODE, "My name is Tiny Llama. I am a small"), (SHARD_MAP, "[64. 64. 64.")]
)
def test_programs(program, expected):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_the_loop_is_a_dozen_lines():
    """After its imports the README's first program has about 12 lines, each with one statement."""
    lines = [line for line in DECODE.splitlines() if line and not line.startswith(("import ", "from "))]
    assert len(lines) <= 13 and not any(";" in line for line in lines)


@pytest.mark.parametrize("file", ["README.md", *(path.name for path in (ROOT / "docs").glob("[!l]*.md"))])
def test_what_is_named_is_there(file):
    """Links, and paths in backticks. (docs/log.md has the names of its days.)"""
    folder = ROOT if file == "README.md" else ROOT / "docs"
    text = (folder / file).read_text()
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]*)\)", text) if "://" not in link]
    rooms = "benchmarks|checkpoints|docs|families|ops|planner|serving|terminal|tests"
    named = re.findall(rf"`((?:{rooms})/[\w./-]*)`", text)
    assert all((folder / link).exists() for link in links), links
    assert all((ROOT / name).exists() for name in named), named
