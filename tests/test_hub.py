"""What a hub is asked for, and what is said when it does not give it; the hub is a small one of our own."""

import collections
import hashlib
import http.server
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.parse

import numpy as np
import pytest
from conftest import CHECKPOINTS
from processes import Own, finish, start
from safetensors.numpy import load_file, save
from test_gguf import write

from checkpoints.checkpoint import open_checkpoint
from checkpoints.folders import THEIR_FILE, THEIR_INDEX

LLAMA3 = CHECKPOINTS / "tiny-llama3"
COMPANIONS = {file.name for file in LLAMA3.iterdir()} - {THEIR_FILE}
SHARDS = [f"model-{i + 1:05d}-of-00003.safetensors" for i in range(3)]
UNNEEDED = """README.md consolidated.safetensors extra.safetensors original/consolidated.00.pth
    original/model.safetensors.index.json pytorch_model.bin pytorch_model.bin.index.json""".split()

# Every repository has the model in three files at main, which then moves on (but for "begun"), and in one at
# refs/pr/1.
SHARDED, SINGLE, MOVED, GGUF, PICKLED = (digit * 40 for digit in "12345")
GIVEN = ["sharded", "single@refs/pr/1", "private", "cut@refs/pr/1"]
RESET = "reset@refs/pr/1"
PARTS = [f"q8/model-0000{i}-of-00002.gguf" for i in (1, 2)]
OF_GGUF = f"gguf/{PARTS[1]}", "gguf/whole.gguf@main", "gguf/whale.gguf", "gguf"
BREAKS = {"cut": "ends", "reset": "reset"}  # how the connection does, once, in the middle of that one file
TOKEN = "hf_ours"  # opens "private"
WHAT_TO_DO = {
    "gated": "; accept its license on https://huggingface.co/tiny/gated, and set HF_TOKEN to your token",
    "sharted": "; did you mean tiny/sharded?",
    "missing": "; check the name, and set HF_TOKEN if the repository is private",
    "branchless": "; check what follows the @",
}
REFUSED = {  # which question, with what status and X-Error-Code, in what words
    "gated": ("resolve", 403, "GatedRepo", "Visit its page to ask for access."),
    "sharted": ("revision", 404, "RepoNotFound", "Repository Not Found"),
    "token": ("resolve", 403, "", "Enable access to gated repositories in your token's settings."),
    "forbidden": ("revision", 403, "", "Not for this token."),
    "foreign": ("revision", 401, "", "Invalid username or password."),
    "missing": ("revision", 404, "RepoNotFound", "Repository Not Found"),
    "branchless": ("revision", 404, "RevisionNotFound", "Revision Not Found"),
}


def commits() -> dict[str, dict[str, bytes]]:
    tensors = load_file(LLAMA3 / THEIR_FILE)
    weight_map = {name: SHARDS[i % 3] for i, name in enumerate(tensors)}
    shards = {file: save({t: x for t, x in tensors.items() if weight_map[t] == file}) for file in SHARDS}
    companions = {name: (LLAMA3 / name).read_bytes() for name in COMPANIONS}
    common = companions | dict.fromkeys(UNNEEDED, b"{}")
    index = {THEIR_INDEX: json.dumps({"weight_map": weight_map}).encode()}
    # huggingface_hub takes a file up at a multiple of 10 MiB. This comes first, and is ignored.
    tensors["x.rotary_emb.inv_freq"] = np.zeros(12 * 2**18, np.float32)
    with tempfile.TemporaryDirectory() as folder:
        write(pathlib.Path(folder) / "model.gguf", split_max_tensors=30)
        write(pathlib.Path(folder) / "whole.gguf")
        files = {
            ("q8/" * ("model" in x.name)) + x.name: x.read_bytes() for x in pathlib.Path(folder).iterdir()
        }
    return {
        SHARDED: common | shards | index, SINGLE: common | {THEIR_FILE: save(tensors)}, MOVED: {},
        GGUF: {"README.md": b"{}", **files}, PICKLED: companions | {"pytorch_model.bin": b"{}"},
    }  # fmt: skip


class Handler(http.server.BaseHTTPRequestHandler):
    """/api/models/tiny/NAME/revision/REVISION, .../tree/COMMIT, and /tiny/NAME/resolve/COMMIT/FILE."""

    def do_GET(self):
        hub, path = self.server, urllib.parse.unquote(self.path.partition("?")[0])
        if path == "/api/models":  # a search
            return self.send([{"id": f"tiny/{name}"} for name in ("single", "sharded")])
        name, what, rest = path.removeprefix("/api/models").removeprefix("/tiny/").split("/", 2)
        hub.asked[name, what].append(rest)
        status, headers, body = self.answer(name, what, rest)
        end, start, asked = len(body), 0, self.headers.get("Range")
        if asked:
            start, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(start), min(int(last) + 1, end) if last else end
            status, headers["Content-Range"] = 206, f"bytes {start}-{end - 1}/{len(body)}"
            hub.asked[name, "range"].append(start)
        self.send_response(status)
        for header, value in {"Content-Length": end - start, **headers}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        breaks = hub.breaks.pop(name, None) if rest.endswith("/" + THEIR_FILE) else None
        self.wfile.write(body[start : end * 9 // 10 if breaks else end])
        if breaks == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1] + 7 * [0]))
            self.connection.close()

    do_HEAD = do_GET

    def send(self, content) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", len(body))
        self.end_headers()
        self.wfile.write(body)

    def answer(self, name, what, rest) -> tuple[int, dict, bytes]:
        """(status, headers, body)"""
        if name == "private" and self.headers["Authorization"] != f"Bearer {TOKEN}":
            name = "foreign"
        at, status, code, words = REFUSED.get(name, [None] * 4)
        if what == at:
            return status, {"X-Error-Code": code, "X-Error-Message": words}, b""
        if what == "revision":
            first = name == "begun" or self.server.asked[name, what] == [rest]
            sha = SINGLE if rest == "refs/pr/1" else SHARDED if first else MOVED
            sha = {"gguf": GGUF, "pickled": PICKLED}.get(name, sha)
            return 200, {}, json.dumps({"id": f"tiny/{name}", "sha": sha}).encode()
        commit, _, file = rest.partition("/")
        files = self.server.commits[commit]
        if name.startswith("elsewhere") and file.endswith(".safetensors"):
            self.server.signature += 1
            url = (
                f"http://localhost:{self.server.storage.server_port}/{commit}/{file}?{self.server.signature}"
            )
            headers = {"X-Linked-Size": len(files[file]), "X-Linked-Etag": "x", "X-Repo-Commit": commit}
            return 302, {"Location": url, **headers}, b""
        if what == "tree":
            tree = [dict(type="file", path=file, size=len(x), oid="0" * 40) for file, x in files.items()]
            return 200, {}, json.dumps(tree).encode()
        return 200, {"ETag": hashlib.sha256(files[file]).hexdigest(), "X-Repo-Commit": commit}, files[file]


class Storage(http.server.BaseHTTPRequestHandler):
    """Where the hub redirects to, /COMMIT/FILE?SIGNATURE: a signature is good for three requests."""

    def do_GET(self):
        hub = self.server.hub
        hub.tokens.append(self.headers["Authorization"])
        path, _, signature = self.path.partition("?")
        _, commit, file = path.split("/")
        hub.used[signature] += 1
        content = hub.commits[commit][file] if hub.used[signature] <= 3 else b"expired"
        status = 206 if hub.used[signature] <= 3 else 403
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = content[first : last + 1]
        self.send_response(status)
        self.send_header("Content-Length", len(part))
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(content)}")
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """first: what a program was told that asked for all of these repositories, and what the hub was asked."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as hub:
        hub.commits, hub.home, hub.breaks = commits(), tmp_path_factory.mktemp("hub"), dict(BREAKS)
        hub.said = {}
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        hub.storage = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Storage)
        hub.storage.hub, hub.signature, hub.used, hub.tokens = hub, 0, collections.Counter(), []
        threading.Thread(target=hub.storage.serve_forever, daemon=True).start()
        hub.first = ask(hub, *GIVEN, *REFUSED, RESET, "pickled", *OF_GGUF)
        yield hub
        hub.shutdown()
        hub.storage.shutdown()
        hub.storage.server_close()


ASK = """
import json
import shutil
import sys
from checkpoints.remote import fetching, object_storage
object_storage.HEAD = fetching.GAP = 2**12
fetching.PIECE = 2**15
from checkpoints.checkpoint import open_checkpoint
for question in sys.argv[1:]:
    name, _, free = question.partition(" with free bytes: ")
    if free:
        shutil.disk_usage = lambda folder: shutil._ntuple_diskusage(0, 0, int(free))
    print("asking for", question, file=sys.stderr)
    try:
        checkpoint = open_checkpoint("tiny/" + name)
        sums = {x.name: x.checksum() for x in checkpoint.tensors} if checkpoint.remote else {}
        print(json.dumps(sums or str(checkpoint.folder)))
    except Exception as e:
        print(json.dumps(type(e).__name__ + ": " + str(e)))
"""


def variables(hub) -> dict[str, str]:
    """The environment of a program that asks this hub."""
    env = dict(HF_HOME=str(hub.home), HF_ENDPOINT=f"http://127.0.0.1:{hub.server_port}", HF_TOKEN=TOKEN)
    return env | dict(HF_HUB_DISABLE_TELEMETRY="1", NO_PROXY="*")


def ask(hub, *questions, **env):
    """What a new process is told of each, a folder or an error; and the requests of (repository, what).

    hub.said: the lines on stderr about what is read, by question.
    """
    hub.asked = collections.defaultdict(list)
    env |= variables(hub) | dict(XDG_CACHE_HOME=str(hub.home / "small files"), JAX_PLATFORMS="cpu")
    command, root = [sys.executable, "-c", ASK, *questions], CHECKPOINTS.parents[1]
    env["PATH"] = os.environ["PATH"]
    done = subprocess.run(command, cwd=root, env=env, text=True, capture_output=True, check=True)
    for question, text in zip(questions, done.stderr.split("asking for ")[1:], strict=True):
        hub.said[question] = [x for x in text.splitlines() if x.startswith(("downloading ", "streaming "))]
    return dict(zip(questions, map(json.loads, done.stdout.splitlines()), strict=True)), hub.asked


def check_weights(folder):
    for name, source in open_checkpoint(LLAMA3).sources.items():
        assert open_checkpoint(folder).sources[name].tensors[0].checksum() == source.tensors[0].checksum()


def check_sums(sums: dict[str, str]):
    """Weights that were read over the network."""
    tensors = open_checkpoint(LLAMA3).tensors
    assert sums == {tensor.name: tensor.checksum() for tensor in tensors}


def check_error(error, *words):
    assert error.startswith("UserError: ") and "\n" not in error
    assert all(word in error for word in words), error


@pytest.mark.parametrize("name", GIVEN)
def test_asks_for_what_is_needed_and_no_more(name, hub):
    """With the token, and for the commit that the revision was when it was asked for, once."""
    answers, asked = hub.first
    repository, _, revision = name.partition("@")
    commit, weights = (SINGLE, [THEIR_FILE]) if revision else (SHARDED, [THEIR_INDEX, *SHARDS])
    assert asked[repository, "revision"] == [revision or "main"]
    assert set(asked[repository, "resolve"]) == {f"{commit}/{file}" for file in (*COMPANIONS, *weights)}
    assert len(asked[repository, "range"]) == (repository == "cut"), "what broke off was not taken up there"
    check_weights(answers[name])


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, hub):
    """With the hub's reason, and with what lets the user download it."""
    error = hub.first[0][name]
    check_error(error, f"tiny/{name}: ", REFUSED[name][-1])
    assert error.endswith(WHAT_TO_DO.get(name, "")), error


def test_with_little_room(hub):
    """Only what the cache lacks counts: one of the three files of weights. What has no room is streamed.

    What the hub redirects to is asked for bytes, without the token; if a URL has expired, for another. After
    a broken connection, of which one line told, the same command asks for what is not there yet.
    """
    check_error(hub.first[0][RESET], f"tiny/{RESET}: ", "reset by peer")
    copy = hub.home / "hub/models--tiny--begun"
    shutil.copytree(hub.home / "hub/models--tiny--sharded", copy, symlinks=True)
    link = copy / "snapshots" / SHARDED / SHARDS[1]
    link.resolve().unlink()
    link.unlink()
    size = len(hub.commits[SHARDED][SHARDS[1]])
    free = [f"begun with free bytes: {n}" for n in (size - 1, size, 0)]
    elsewhere = "elsewhere with free bytes: 0"
    answers, asked = ask(hub, RESET, *free, elsewhere)
    assert set(asked["reset", "resolve"]) == {f"{SINGLE}/{THEIR_FILE}"}
    check_weights(answers[RESET])
    check_sums(answers[free[0]])
    (line,) = hub.said[free[0]]
    assert line.startswith("streaming tiny/begun: 0.00 GB are read over the network, each time; the disk of ")
    check_weights(answers[free[1]])
    (line,) = hub.said[free[1]]
    assert line.startswith("downloading tiny/begun: 0.00 GB; the disk of ")
    assert not hub.said[free[2]]  # all is there
    check_sums(answers[elsewhere])
    located = [rest for rest in asked["elsewhere", "resolve"] if rest.endswith(".safetensors")]
    assert set(located) == {f"{SHARDED}/{file}" for file in SHARDS}
    assert len(hub.tokens) > 2 * len(located) and set(hub.tokens) == {None}
    assert not list((hub.home / "hub/models--tiny--elsewhere").rglob("*.safetensors"))


@pytest.mark.deep
def test_several_processes_stream(hub, tmp_path):
    """And say so once; what all of them have in their caches they read from there."""
    join = """
import os
import jax
jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], 2, int(os.environ["JAX_PROCESS_ID"]))
"""
    program = tmp_path / "ask.py"
    program.write_text(join + ASK)
    hub.asked = collections.defaultdict(list)  # no other test's questions count
    env = variables(hub) | dict(PYTHONPATH=str(CHECKPOINTS.parents[1]))
    own = [Own(["elsewhere2", "sharded"], env, program) for _ in range(2)]
    said = []
    for code, stdout, stderr in finish(start(2, 1, own=own)):
        assert not code, stderr
        streamed, folder = map(json.loads, stdout.splitlines())
        check_sums(streamed)
        assert folder == hub.first[0]["sharded"]
        said += [line for line in stderr.splitlines() if line.startswith("streaming ")]
    what = "2 processes read their parts of 0.00 GB over the network"
    assert said == [f"streaming tiny/elsewhere2: {what}; nothing is downloaded"]


def test_gguf(hub):
    """One file of a repository, or all parts of a model whose part was named; and what else there is."""
    answers, asked = hub.first
    assert set(asked["gguf", "resolve"]) == {f"{GGUF}/{file}" for file in (*PARTS, "whole.gguf")}
    for name, question in zip(("model-00001-of", "whole"), OF_GGUF[:2], strict=True):
        assert name in answers[question]
        (line,) = hub.said[question]
        assert line.startswith("downloading tiny/gguf: 0.00 GB")
    check_error(answers["gguf/whale.gguf"], "tiny/gguf: has no whale.gguf; did you mean whole.gguf?")
    check_error(
        answers["gguf"], f"tiny/gguf: has no {THEIR_FILE}; give one of its GGUF files, such as tiny/gguf/"
    )


def test_pickled_weights(hub):
    """They are not downloaded; the error says how to get safetensors files."""
    answers, _ = hub.first
    call = "AutoModelForCausalLM.from_pretrained('tiny/pickled').save_pretrained('NEW_DIR')"
    found = "tiny/pickled: has no safetensors files; pytorch_model.bin is pickled"
    check_error(answers["pickled"], found, call)
    assert not list((hub.home / "hub/models--tiny--pickled").rglob("*.bin"))


def test_offline(hub):
    """What is in the cache is enough, and what is not is named."""
    for name in ("partial", "unlisted"):
        copy = hub.home / f"hub/models--tiny--{name}"
        shutil.copytree(hub.home / "hub/models--tiny--sharded", copy, symlinks=True)
        (copy / "snapshots" / SHARDED / SHARDS[1]).unlink()
    shutil.rmtree(copy / "trees")  # the list of a commit's files, which huggingface_hub did not always keep
    kept = ["sharded", *OF_GGUF[:2]]
    questions = *kept, "gguf/whale.gguf", "partial", "unlisted", "never"
    answers, asked = ask(hub, *questions, HF_HUB_OFFLINE="1")
    assert not asked and [answers[x] for x in kept] == [hub.first[0][x] for x in kept]
    check_error(answers["gguf/whale.gguf"], "tiny/gguf", "whale.gguf")
    check_error(answers["partial"], "tiny/partial: ", SHARDS[1])
    check_error(answers["unlisted"], SHARDS[1])
    check_error(answers["never"], "tiny/never: ", "HF_HUB_OFFLINE")
