"""What the benchmarks share: lists of numbers as options, facts of the machine, Markdown tables, JSON files.

`python3 benchmarks/speed.py` puts only benchmarks/ on Python's path. Importing this module adds the
repository's own folder, so the benchmarks import it before the project's modules.
"""

import datetime
import importlib.metadata
import json
import pathlib
import platform
import re
import sys
from collections.abc import Callable, Iterable, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def positive_numbers(number: type) -> Callable[[str], list]:
    """An argparse type: numbers above 0, int or float, with commas between them."""

    def parse(text: str) -> list:
        values = [number(part) for part in text.split(",")]
        if not all(value > 0 for value in values):
            raise ValueError
        return values

    parse.__name__ = "list of numbers above 0"  # argparse puts the name into its message
    return parse


def cpu_name() -> str:
    """The CPU's name in /proc/cpuinfo, and its number of cores."""
    file = pathlib.Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", file.read_text()) if file.exists() else []
    return f"{names[0]} ({len(names)} cores)" if names else platform.machine()


def versions_and_date() -> dict:
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    return dict(
        versions=dict(python=platform.python_version(), **versions), date=datetime.date.today().isoformat()
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def check_writable(file: str | None) -> None:
    """Raise OSError before the measuring, not after it, if the file for the result cannot be written."""
    if file:
        open(file, "a").close()


def write(result: dict, file: str | None) -> None:
    """Write the result as JSON, if there is a file for it."""
    if file:
        pathlib.Path(file).write_text(json.dumps(result, indent=1) + "\n")
