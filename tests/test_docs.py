"""README.md and docs/: their programs run as they stand, and what they name is there.

The conventions for blocks of code:

    ```python          all blocks of a document run in order in one process; one that sets the number of CPU
                       devices starts a new process. A ```text block right after it is what it prints.
    ```python client   runs against a server that the test starts
    ```bash run        runs
    ```, ```console    commands, whose programs, options and files must exist; of console those after "$ "
"""

import ast
import functools
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib
from typing import NamedTuple

import jax
import pytest
from conftest import FAST
from processes import serving

from planner.topologies import WITHOUT_TPUS

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCUMENTS = ["README.md", *sorted(str(x.relative_to(ROOT)) for x in (ROOT / "docs").rglob("*.md"))]
LOG = "docs/development/log.md"  # which has the names of its days
SECONDS = 600  # until a program is given up
FENCED = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A block of code: the word after its fence, its text, its first line, and what follows the block."""

    kind: str
    text: str
    line: int
    then: str


@functools.cache
def read(document: str) -> str:
    return (ROOT / document).read_text()


@functools.cache
def blocks(document: str) -> list[Block]:
    text, found = read(document), FENCED.finditer(read(document))
    return [Block(x[2].strip(), x[3], text[: x.start(3)].count("\n") + 1, text[x.end() :]) for x in found]


def prose(document: str) -> str:
    """The text without its blocks of code, line by line where it was."""
    return FENCED.sub(lambda x: "\n" * x[0].count("\n"), read(document))


def of_today(document: str) -> str:
    """The prose without the names of programs of an earlier commit, and of files that a reader is to make."""
    text = re.sub(r"`[^`]+`,?\s+(\(commit|(of|which)\s+commit)\s+\w+", "", prose(document))
    return re.sub(r"\bnew\s+file\s+`[^`]+`", "", text)


def code_spans(text: str) -> list[str]:
    """What stands in backticks, in one line each."""
    return [" ".join(x.split()) for x in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]


def run(command: list[str], stdin: str = "", **variables) -> subprocess.CompletedProcess:
    """Run a command in the repository's root, on a CPU, as a user would; python3 is this Python."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith(("XLA_FLAGS", "JAX_"))}
    path = f"{pathlib.Path(sys.executable).parent}:{environment['PATH']}"
    environment |= dict(PATH=path, JAX_PLATFORMS="cpu", XLA_FLAGS=FAST, PYTHONPATH=str(ROOT)) | variables
    environment = {name: x for name, x in environment.items() if x is not None}
    return subprocess.run(
        command, input=stdin, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS
    )


# ------------------------------------------------------------------------------------------------- programs

# Runs [name, code] after [name, code] of stdin in one namespace, and prints what each has printed.
RUNNER = """
import contextlib, io, json, sys
namespace, printed = {"__name__": "__main__"}, []
for name, code in json.load(sys.stdin):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, name, "exec"), namespace)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def printed_by(programs: list[tuple[str, str]]) -> list[str]:
    """What each of these pieces of one program prints. A piece: a name for tracebacks, and its code."""
    done = run([sys.executable, "-c", RUNNER], json.dumps(programs))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("document", ["README.md", "docs/sharding.md", "docs/layer.md"])
def test_without_a_tpu(document):
    """libtpu, which `.[test]` installs, prints no errors on a machine that has no TPU."""
    first = next(x.text for x in blocks(document) if x.kind == "python")
    alone = dict.fromkeys(WITHOUT_TPUS) | dict(JAX_PLATFORMS=None)  # which would hide the errors
    alone["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # else a lock could
    done = run([sys.executable, "-c", first + "\nimport jax\njax.devices()"], **alone)
    assert done.returncode == 0 and "TPU" not in done.stderr, done.stderr


def with_blocks(kind: str) -> list[str]:
    return [x for x in DOCUMENTS if any(block.kind == kind for block in blocks(x))]


@pytest.mark.parametrize(
    "document",
    [x if x == "README.md" else pytest.param(x, marks=pytest.mark.deep) for x in with_blocks("python")],
)
def test_python(document):
    processes: list[list[Block]] = [[]]
    for block in blocks(document):
        if block.kind == "python":
            if "jax_num_cpu_devices" in block.text and processes[-1]:
                processes.append([])
            processes[-1].append(block)
    for process in processes:
        found = printed_by([(f"{document}:{x.line}", x.text) for x in process])
        for block, output in zip(process, found, strict=True):
            if expected := re.match(r"\n+```text\n(.*?)^```$", block.then, re.DOTALL | re.MULTILINE):
                assert output.strip() == expected[1].strip(), f"{document}:{block.line}"


def test_the_loop_is_a_dozen_lines():
    """From a checkpoint to a text: after its imports about 12 lines, each with one statement."""
    (loop,) = [x.text for x in blocks("docs/python-api.md") if "= decode_step(" in x.text]
    lines = [line for line in loop.splitlines() if line and not line.startswith(("import ", "from "))]
    assert len(lines) <= 13 and not any(";" in line for line in lines)
    assert "My name is Tiny Llama. I am a small" in printed_by([("the loop", loop)])[0]


@pytest.mark.deep
@pytest.mark.parametrize("document", with_blocks("bash run"))
def test_bash(document, tmp_path):
    """Commands that write, write below ~. (tests/test_clusters.py runs those of docs/clusters.md.)"""
    for block in blocks(document):
        if block.kind == "bash run" and document != "docs/clusters.md":
            done = run(["bash", "-euo", "pipefail", "-c", block.text], HOME=str(tmp_path))
            assert done.returncode == 0, f"{document}:{block.line}: {done.stderr}"


@pytest.mark.deep
def test_client(tmp_path):
    """The programs of clients, against a server of the tiny model."""
    programs = [x.text for document in DOCUMENTS for x in blocks(document) if x.kind == "python client"]
    assert programs
    with serving(tmp_path / "log") as address:
        for program in programs:
            (out,) = printed_by([("client", program.replace("http://127.0.0.1:8000", address))])
            assert re.search(r"My name is|^weather (Bern|Oslo)$", out, re.MULTILINE)


# ------------------------------------------------------------------------------------------------- commands


def command_lines(document: str) -> list[str]:
    """The commands of a document: those in blocks, line by line, and those in backticks."""
    lines = []
    for block in blocks(document):
        text = block.text.replace("\\\n", " ")
        if block.kind == "console":
            lines += [line[2:] for line in text.splitlines() if line.startswith("$ ")]
        elif not block.kind or block.kind.startswith("bash"):
            lines += [line.partition(" # ")[0] for line in text.splitlines()]
    if document != LOG:
        lines += [x for x in code_spans(of_today(document)) if x.startswith(("python3 ", "pip "))]
    return lines


def programs_in(line: str) -> list[tuple[str, str]]:
    """The Python programs that a command runs, each with its arguments."""
    found = []
    for part in re.split(r"&&|\|\||[;<>]|&$| \| ", line):
        if match := re.search(r"\bpython3? (-m \S+|\S+\.py)(.*)", part):
            found.append((match[1], match[2]))
    return found


@functools.cache
def options_of(program: str) -> set[str]:
    done = run([sys.executable, program, "--help"])
    assert done.returncode == 0, f"{program} --help: {done.stderr}"
    return set(re.findall(r"--[a-z][a-z0-9-]*", done.stdout))


def wrong_options(line: str) -> list[str]:
    """The options of a command that its program does not have, and programs that do not exist."""
    wrong = []
    for program, arguments in programs_in(line):
        if program.startswith("-m "):
            name = program.removeprefix("-m ")
            if "NAME" not in name and importlib.util.find_spec(name) is None:
                wrong.append(program)
        elif not (ROOT / program).exists():
            wrong.append(program)
        else:
            asked = re.findall(r"(?<![\w=-])--[a-z][a-z0-9-]*", re.sub(r"\"[^\"]*\"|'[^']*'", "", arguments))
            wrong += [f"{program} {option}" for option in asked if option not in options_of(program)]
    return wrong


# Names of files that a user has, or that a command of the document makes.
USERS_FILES = {
    "prompts.txt", "prompts.jsonl", "answers.jsonl", "job.sh", "ipcontroller-engine.json",
}  # fmt: skip


def missing_files(lines: list[str]) -> list[str]:
    """Files that these commands name in folders of the repository, or in its root, and that are not there."""
    missing, made = [], set()
    rooms = {path.name for path in ROOT.iterdir()}
    for line in lines:
        if not re.search(r"\b(python3?|pip) ", line):
            continue
        made |= set(re.findall(r"--(?:output|json|dump-hlo) (\S+)", line))
        for word in re.findall(r"[^\s'\"=]+", line):
            path = word.strip("[](),").partition("::")[0]
            stem = path.partition(".")[0]
            if stem.isupper() or path.startswith(("~", "/", "$", "-", "http")) or path in made | USERS_FILES:
                continue
            named = "/" in path and path.partition("/")[0] in rooms
            if named or re.fullmatch(r"[\w.-]+\.(py|txt|jsonl?|md|toml|ipynb)", path):
                if not any(c in path for c in "*?<{") and not (ROOT / path).exists():
                    missing.append(path)
    return missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands(document):
    """Programs, options, files, and the extras of pip install -e '.[NAME]'."""
    lines = command_lines(document)
    assert not [x for line in lines for x in wrong_options(line)]
    assert not missing_files(lines)
    known = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    named = [x for extras in re.findall(r"(?<!\w)\.\[([\w,]+)\]", read(document)) for x in extras.split(",")]
    assert set(named) <= set(known)


# ---------------------------------------------------------------------------------------- links and names


@functools.cache
def anchors(document: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ +(.*?) *$", prose(document), re.MULTILINE):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {slug if not i else f"{slug}-{i}" for slug, n in found.items() for i in range(n + 1)}


def broken_links(document: str) -> list[str]:
    """Links to files that do not exist, and to headings that their document does not have."""
    text = re.sub(r"(?<!`)`[^`\n]+`(?!`)", lambda x: "x" * len(x[0]), prose(document))
    links = re.findall(r"\]\(([^)\s]*)\)", text) + re.findall(r"\b(?:src|href)=\"([^\"]*)\"", text)
    broken = []
    for link in links:
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        file = (ROOT / document).parent / path if path else ROOT / document
        if not file.exists():
            broken.append(link)
        elif anchor and file.suffix == ".md":
            if anchor not in anchors(str(file.resolve().relative_to(ROOT))):
                broken.append(link)
    return broken


@functools.cache
def defined_in(file: str) -> set[str]:
    """The names that a Python file defines: functions, classes, variables, fields, and Class.member."""
    found = set()

    def visit(node: ast.AST, owner: str) -> None:
        for child in ast.iter_child_nodes(node):
            names = []
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names = [child.name]
            elif isinstance(child, (ast.Assign, ast.AnnAssign)):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                names = [x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)]
            found.update(names, [f"{owner}.{name}" for name in names if owner])
            visit(child, child.name if isinstance(child, ast.ClassDef) else owner)

    visit(ast.parse((ROOT / file).read_text()), "")
    return found


@functools.cache
def python_files() -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True)
    files = listed.stdout.decode().splitlines() if listed.returncode == 0 else []
    files = files or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")]
    return {file for file in files if (ROOT / file).is_file()}


# `f`, `g` (what it does) and `h` in [`file.py`](file.py), or in `file.py`
NAMES_IN_A_FILE = re.compile(
    r"((?:`[\w.]+(?:\(\))?`(?:\s\([^()]*\))?(?:,\s+and|,|\s+and)?\s+)+)in\s+"
    r"(?:\[`[^`]*`\]\([^)]*?([\w/.-]+\.py)[^)]*\)|`([\w/.-]+\.py)`)"
)


def missing_names(document: str) -> list[str]:
    """What stands in backticks as a path, a test or a name in a file, and is not there."""
    text, missing, files = of_today(document), [], python_files()
    names = {pathlib.Path(file).name for file in files}
    rooms = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
    test_file = ""
    for span in code_spans(text):
        if match := re.fullmatch(r"([\w/]*\.py)?::(\w+)(\[.*\])?", span):
            test_file = match[1] or test_file
            if not (ROOT / test_file).is_file() or match[2] not in defined_in(test_file):
                missing.append(span)
        elif re.fullmatch(rf"(?:{rooms})/[\w./-]*", span):
            if not (ROOT / span).exists():
                missing.append(span)
        elif re.fullmatch(r"[\w-]+\.(py|md|ipynb|svg)", span) and span not in names:
            missing.append(span)
    for match in NAMES_IN_A_FILE.finditer(re.sub(r"^> ?", "", text, flags=re.MULTILINE)):
        file = str(pathlib.PurePosixPath(match[2] or match[3])).replace("../", "")
        if file in files:
            known = defined_in(file) | set(dir(jax)) | set(dir(jax.lax))
            named = re.findall(r"`([\w.]+)(?:\(\))?`", match[1])
            missing += [f"{name} in {file}" for name in named if name not in known]
    return missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_names_and_lines(document):
    """Links and names lead to something, and lines have at most 120 columns, except for tables and for what
    has no space to break at.
    """
    assert not broken_links(document)
    assert document == LOG or not missing_names(document)
    long = [line for line in prose(document).splitlines() if len(line) > 120 and not line.startswith("|")]
    assert not [line for line in long if " " in line.strip()]


def test_each_picture_is_shown():
    text = "".join(map(read, DOCUMENTS))
    pictures = [path.name for path in (ROOT / "images").iterdir() if path.suffix in (".svg", ".png")]
    assert not [name for name in pictures if f"images/{name}" not in text]


def test_glossary():
    """Names in the first column of its tables exist here, those under "Hugging Face" in transformers."""
    import transformers

    root = pathlib.Path(transformers.__file__).parent
    models = """llama llama4 mixtral mistral qwen3_moe gemma3 gemma4 glm4_moe_lite gpt_oss muse_glimmer
        muse_spark qwen3_next""".split()
    files = [path for model in models for path in (root / "models" / model).glob("*.py")]
    files += [root / "configuration_utils.py", root / "modeling_rope_utils.py", *root.glob("generation/*.py")]
    theirs = set(re.findall(r"\w+", "".join(path.read_text() for path in files)))
    ours = set().union(*(defined_in(file) for file in python_files() if file.endswith(".py")))
    ours |= options_of("main.py") | set(dir(jax.lax)) | {"Df", "cfg", "len", "None", "py"}
    ours |= set(re.findall(r'"(\w+)"', (ROOT / "sharding" / "mesh.py").read_text()))  # the axes
    unknown, column = [], None
    for line in read("docs/glossary.md").splitlines():
        cells = line.split("|")[1:-1]
        if not cells:
            column = None
        elif column is None:
            column = next((i for i, cell in enumerate(cells) if "Hugging Face" in cell), -1)
        else:
            names = re.findall(r"--[\w-]+|\w+", " ".join(code_spans(cells[0])))
            unknown += [name for name in names if name not in ours]
            marked = [cells[column]] if column >= 0 else re.findall(r"Hugging Face: ([^;]*)", line)
            names = re.findall(r"\w+", " ".join(code_spans(" ".join(marked))))
            unknown += [name for name in names if name not in theirs]
    assert not unknown


# ------------------------------------------------------------------------------------- spelling and figures

# British spellings, of which this project has the American ones. ("cancelled" stays: it is a value of
# finish_reason, and Python's own spelling.)
OUR = "behavi|col|neighb|fav|hon|lab|flav|rum|vap|harb|endeav|hum|arm|rig|vig"
ISE = (
    "quanti|normali|initiali|seriali|optimi|recogni|organi|generali|speciali|synchroni|paralleli|memori"
    "|minimi|maximi|summari|utili|vectori|tokeni|reali|materiali|finali|emphasi|visuali|randomi|categori"
    "|authori|customi|standardi|factori|discreti|locali|priviti|characteri|penali|equali|amorti|regulari"
)
BRITISH = re.compile(
    rf"\b(\w*({OUR})our(s|ed|ing|ite|ites|able|al|ly|hood)?|\w*({ISE})s(e|es|ed|er|ers|ing|able|ation|ations)"
    r"|\w*(cent|met|lit|fib)re(s|d)?|grey(s|ed|ish)?|licence(s|d)?|defence|offence|artefact(s)?|programme(s)?"
    r"|(label|model|travel|signal|channel|tunnel|level|total)l(ed|ing|er)|fulfil(s)?|analys(e|ed|ing)|whilst"
    r"|amongst|catalogue(s)?|dialogue(s)?|judgement(s)?|maths|ageing|sceptical|skilful)\b",
    re.IGNORECASE,
)


WRONG_ON_PURPOSE = {"tests/test_docs.py", "tests/test_command_line.py"}  # these words, and a wrong option


def test_american_spelling():
    files = {*DOCUMENTS, *(file for file in python_files() if file.endswith(".py"))} - WRONG_ON_PURPOSE
    found = {file: {match[0] for match in BRITISH.finditer(read(file))} for file in sorted(files)}
    assert not {file: words for file, words in found.items() if words}


MEASURED = ("docs/cpu.md", "docs/server.md", "docs/checkpoints.md", "docs/tpu.md")
FIGURES = re.compile(
    r"tokens/s|\bms\b|GB/s|CPU s\b|\bs \(|\| s \||HBM|first token|streams|\bmeasured\b", re.I
)
NEAR = 15  # lines


def unexplained_tables(text: str) -> list[str]:
    """Headers of tables with figures around which no program, no version of jax or no date stands."""
    lines, found = text.splitlines(), []
    for i, line in enumerate(lines):
        if line.startswith("|") and not (i and lines[i - 1].startswith("|")) and FIGURES.search(line):
            end = next((j for j in range(i, len(lines)) if not lines[j].startswith("|")), len(lines))
            if not re.search(r"\d", "".join(lines[i + 2 : end])):
                continue
            around = "\n".join(lines[max(i - NEAR, 0) : i] + lines[end : end + NEAR])
            missing = [
                what
                for what, pattern in dict(
                    program=r"\w\.py\b|pytest", jax=r"jax 0\.\d+", date=r"\b20\d\d-\d\d-\d\d\b"
                ).items()
                if not re.search(pattern, around)
            ]
            if missing:
                found.append(f"{line}: no {', '.join(missing)}")
    return found


@pytest.mark.parametrize("document", MEASURED)
def test_tables_say_how_they_were_measured(document):
    assert not unexplained_tables(read(document))


def test_ci_runs_the_readmes_commands():
    """The two commands of a fresh machine stand in the README as `.ci/run` runs them."""
    commands = read(".ci/run").splitlines()
    for command in ("pip install -e . && python3 main.py", "pip install -e '.[test]' && python3 -m pytest"):
        assert command in read("README.md").splitlines()
        assert any(line.lstrip().startswith(command) for line in commands), command
