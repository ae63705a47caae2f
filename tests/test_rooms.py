"""The house: which file may import which."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Imports point from a line to those after it, or stay in it; a file in a folder counts as its folder.
ORDER = (
    {"main", "convert_checkpoint", "plan", "benchmarks"},
    {"images"},
    {"planner"},
    {"terminal"},
    {"server"},
    {"generation"},
    {"deployment"},
    {"serving"},
    {"conversation"},
    {"checkpoints"},
    {"distributed"},
    {"families"},
    {"model"},
    {"sharding"},
    {"ragged_attention"},
    {"ops"},
    {"quantize"},
    {"feedback"},
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}


def imports() -> dict[str, set[str]]:
    """The modules of this repository that each of them imports, by name: `serving.engine`."""
    inside = [path for name in RANK for path in (ROOT / name).rglob("*.py")]
    files = [path.relative_to(ROOT) for path in (*ROOT.glob("*.py"), *inside)]
    names = {".".join(path.with_suffix("").parts): path for path in files}
    found = {}
    for name, path in names.items():
        nodes = list(ast.walk(ast.parse((ROOT / path).read_text())))
        wanted = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                wanted |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        found[name] = (wanted & names.keys()) - {name}
    return found


def test_imports_point_one_way():
    for name, imported in imports().items():
        for other in imported:
            ours, theirs = (RANK[module.partition(".")[0]] for module in (name, other))
            assert ours <= theirs, f"{name} imports {other}"


def test_no_circle():
    left = imports()
    while ends := {name for name, imported in left.items() if not imported & left.keys()}:
        left = {name: imported for name, imported in left.items() if name not in ends}
    assert not left, f"these import one another: {sorted(left)}"


def test_six_files_at_the_top():
    expected = {"model", "ragged_attention", "quantize", "convert_checkpoint", "main", "plan"}
    assert {path.stem for path in ROOT.glob("*.py")} == expected


def test_file_names_occur_once():
    """Whoever is told the name of a file finds it."""
    names = [path.name for name in RANK for path in (ROOT / name).rglob("*.py") if path.stem[0] != "_"]
    names += [path.name for path in ROOT.glob("*.py")]
    assert len(names) > 150 and [name for name in names if names.count(name) > 1] == []
