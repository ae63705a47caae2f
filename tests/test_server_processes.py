"""The server as a command: what it says, how it ends, clients that vanish, two processes as one."""

import contextlib
import http.client
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from conftest import FAST
from processes import SECONDS, finish, free_port, shared_cache, start
from test_server import shallow

import main

ASKED = dict(prompt="What is", temperature=0, max_tokens=100, ignore_eos=True)
CITY = dict(type="object", properties=dict(city=dict(enum=["Bern", "Oslo"])), required=["city"])
CHAT = dict(messages=[dict(role="user", content="How is the weather?")], temperature=0, max_tokens=60)
CALLS = CHAT | dict(
    tools=[dict(type="function", function=dict(name=name, parameters=CITY)) for name in ("now", "later")],
    tool_choice="required",
)
SCHEMA = CHAT | dict(response_format=dict(type="json_schema", json_schema=dict(name="city", schema=CITY)))


@pytest.fixture(scope="module")
def environment():
    """Programs are compiled once for all the tests here."""
    compiled = shared_cache()
    return dict(JAX_PLATFORMS="cpu", JAX_COMPILATION_CACHE_DIR=compiled, XLA_FLAGS=FAST, PYTHONUTF8="1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    return shallow(tmp_path_factory.mktemp("shallow"))


class Server:
    """python3 main.py --serve, once it is ready."""

    def __init__(self, environment, *options: str, stderr=subprocess.PIPE, program=(main.__file__,)):
        """program: arguments of Python."""
        self.port = free_port()
        sizes = f"--serve --port {self.port} --rows 2 --max-len 256".split()
        command = [sys.executable, *program, *sizes, *options]
        self.process = subprocess.Popen(command, env=environment, stderr=stderr, text=True)
        wait_for(self.port, [self.process])

    def end(self) -> tuple[int, str]:
        """After SIGTERM: -> (exit code, stderr)."""
        self.process.send_signal(signal.SIGTERM)
        _, stderr = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, stderr


@contextlib.contextmanager
def serving(*arguments, **options):
    server = Server(*arguments, **options)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


def get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    with contextlib.closing(connection):
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()


def wait_for(port: int, processes: list[subprocess.Popen]) -> None:
    end = time.monotonic() + SECONDS
    while True:
        with contextlib.suppress(OSError):
            if get(port, "/health")[0] == 200:
                return
        assert time.monotonic() < end and all(process.poll() is None for process in processes)
        time.sleep(0.1)


def ask(port: int, **fields) -> http.client.HTTPResponse:
    """The response, once it begins."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    headers = {"content-type": "application/json", "connection": "close"}
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    connection.request("POST", path, json.dumps(fields), headers)
    return connection.getresponse()


def text_of(response) -> str:
    return json.loads(response.read())["choices"][0]["text"]


def choices_of(text: str) -> list[dict]:
    """The first choice in each of a stream's events, to its end."""
    *events, last = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert last == "[DONE]"
    return [json.loads(event)["choices"][0] for event in events]


def parts_of(text: bytes) -> str:
    return "".join(choice["text"] for choice in choices_of(text.decode()))


def answer(port: int, stream: bool = False, **fields) -> tuple[str, list[tuple[str, str]]]:
    """-> (the text of a chat's answer, the name and arguments of each of its calls), whole or of a stream."""
    text = ask(port, **fields, stream=stream).read().decode()
    if stream:
        pieces = [choice["delta"] for choice in choices_of(text)]
    else:
        pieces = [json.loads(text)["choices"][0]["message"]]
    content, calls = "", {}
    for piece in pieces:
        content += piece.get("content") or ""
        for i, call in enumerate(piece.get("tool_calls") or ()):
            name, arguments = calls.get(call.get("index", i), ("", ""))
            added = call["function"]
            calls[call.get("index", i)] = name + added.get("name", ""), arguments + added["arguments"]
    return content, list(calls.values())


def rows_in_use(port: int) -> float:
    lines = get(port, "/metrics")[1].decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("llama_rows_in_use "))


def test_ending(environment, folder):
    """SIGTERM in the middle of answers, of which some wait: they are finished, and the server leaves.

    --no-access-log: no line per request.
    """
    with serving(environment, "--checkpoint", folder, "--no-access-log") as server:
        whole = text_of(ask(server.port, **ASKED))
        streams = [ask(server.port, **ASKED, stream=True) for _ in range(5)]
        begun = streams[0].readline()
        server.process.send_signal(signal.SIGTERM)
        assert parts_of(begun + streams[0].read()) == whole
        assert [parts_of(stream.read()) for stream in streams[1:]] == [whole] * 4
        _, stderr = server.process.communicate(timeout=SECONDS)
        assert server.process.returncode == 0 and "Traceback" not in stderr and "method=" not in stderr
        assert re.search(r"open requests: [1-5], which are finished first; Ctrl-C again", stderr)


def test_ending_with_much_to_tell(environment, folder):
    """An answer of 0.7 MB, which takes longer to write than the engine to end: it arrives.

    And a full disk for logs: nothing that is said there can be said, and it serves all the same.
    """
    with open("/dev/full", "w") as full, serving(environment, "--checkpoint", folder, stderr=full) as server:
        replies = []
        asked = ASKED | dict(n=32, logprobs=20, max_tokens=40)
        thread = threading.Thread(target=lambda: replies.append(ask(server.port, **asked).read()))
        thread.start()
        while not rows_in_use(server.port):
            time.sleep(0.01)
        assert server.end()[0] == 0
        thread.join()
        assert len(json.loads(replies[0])["choices"]) == 32


def test_ending_at_once(environment, folder):
    """Of a second signal: it does not wait for the answer."""
    with serving(environment, "--checkpoint", folder) as server:
        with ask(server.port, **ASKED, n=64, stream=True) as stream:
            stream.readline()
            for code in (signal.SIGTERM, signal.SIGINT):
                server.process.send_signal(code)
                time.sleep(0.3)
        _, stderr = server.process.communicate(timeout=SECONDS)
        assert server.process.returncode == 130 and stderr.endswith("interrupted\n")


FAILS_LATER = """if True:
    from terminal.command_line import exit_on_signals, run
    exit_on_signals()
    import main
    from serving.engine import Engine
    advance, left = Engine.advance, list(range(30))
    def failing(engine):
        if not left:
            raise RuntimeError("injected\\nfailure")
        left.pop()
        return advance(engine)
    Engine.advance = failing
    run(main.main)
"""


def test_the_engine_fails(environment, folder):
    """All that is open gets an error, and the process leaves by itself, with a line."""
    with serving(environment, "--checkpoint", folder, program=["-c", FAILS_LATER]) as server:
        stream = ask(server.port, **ASKED, n=5, stream=True)
        whole = ask(server.port, **ASKED)
        assert whole.status == 500 and "the engine has failed" in json.loads(whole.read())["error"]["message"]
        *_, last, done, end = stream.read().decode().split("\n\n")
        assert "the engine has failed" in json.loads(last[6:])["error"]["message"]
        assert done == "data: [DONE]" and not end
        _, stderr = server.process.communicate(timeout=SECONDS)
    line = "error: the engine has failed, and the server ends: RuntimeError: injected failure"
    logged = [x for x in stderr.splitlines() if " method=POST " in x]
    assert server.process.returncode == 1 and stderr.splitlines()[-1] == line
    assert len(logged) == 2 and all(re.search("finish=(cancelled,)?error ", x) for x in logged)


@contextlib.contextmanager
def two_processes():
    """-> (the port of a server of two processes, the processes)."""
    port = free_port()
    options = f"--serve --port {port} --rows 4 --max-len 512 --timeout 12 --dp 1".split()
    processes = start(2, 1, *options)
    try:
        wait_for(port, processes)
        yield port, processes
    finally:
        for process in processes:
            process.kill()


@pytest.mark.deep
def test_two_processes(environment):
    """They serve as one; SIGTERM of either drains both."""
    with two_processes() as (port, processes):
        with serving(environment, "--max-len", "512") as alone:
            form = dict(response_format=dict(type="regex", regex="[a-c]{5}"))
            more = dict(logit_bias={"65": 5}, presence_penalty=1, echo=True, logprobs=2)
            short = ASKED | dict(max_tokens=40)
            drawn = dict(temperature=1, seed=3, top_k=9, stop="e")
            every = [short, short | drawn, short | form, short | more]
            expected = [json.loads(ask(alone.port, **x).read())["choices"] for x in every]
            replies = [ask(port, **x) for x in every * 2]
            found = [json.loads(reply.read())["choices"] for reply in replies]
            for asked in (CALLS, SCHEMA):
                text, calls = whole = answer(alone.port, **asked)
                assert json.loads(calls[0][1] if asked is CALLS else text)["city"] in ("Bern", "Oslo")
                assert answer(port, **asked) == answer(port, stream=True, **asked) == whole
        assert [x[0]["text"] for x in found] == [x[0]["text"] for x in expected] * 2
        stream = ask(port, **ASKED, n=2, stream=True)
        assert stream.readline()
        processes[1].send_signal(signal.SIGTERM)
        assert stream.read().endswith(b"data: [DONE]\n\n")
        assert [code for code, _, _ in finish(processes)] == [0, 0]


@pytest.mark.deep
def test_one_of_two_processes_dies():
    """The other says so, with its name."""
    with two_processes() as (port, processes):
        stream = ask(port, **ASKED, n=8, stream=True)
        assert stream.readline()
        processes[1].kill()
        stream.close()
        (code, _, stderr), _ = finish(processes)
        assert code == 1 and "error: process 1 of 2" in stderr


def test_no_port(environment):
    """One that is taken is one line, before anything is loaded."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        command = [sys.executable, main.__file__, "--serve", "--port", str(port)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 1
    assert done.stderr == f"error: --host 127.0.0.1 --port {port}: Address already in use; choose another\n"
