"""benchmarks/serve.py: its requests, what it counts and by which clock, its report."""

import contextlib
import json
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import serve
from conftest import CHECKPOINTS, invoke

from conversation.text import encode, load_tokenizer
from feedback.errors import UserError


def event(text: str, **more) -> dict:
    return dict(choices=[dict(index=0, text=text, finish_reason=None, **more)])


def end(tokens: int, prompt_tokens: int = 7) -> list[dict]:
    """The last events of a stream."""
    usage = dict(completion_tokens=tokens, prompt_tokens=prompt_tokens)
    return [dict(choices=[dict(index=0, text="", finish_reason="length")]), dict(choices=[], usage=usage)]


@contextlib.contextmanager
def fake_server(reply):
    """Yields its address. reply(fields): a status other than 200, or the events of the stream."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(dict(data=[dict(id="fake")])).encode())

        def do_POST(self) -> None:
            fields = json.loads(self.rfile.read(int(self.headers["content-length"])))
            found = reply(fields)
            self.send_response(found if isinstance(found, int) else 200)
            self.end_headers()
            for part in () if isinstance(found, int) else found:
                self.wfile.write(b": a comment\n\ndata: " + json.dumps(part).encode() + b"\n\n")
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Clock:
    """Replaces `time`: it stands still, except that `at` moves it forward and waits until it is read."""

    def __init__(self):
        self.now, self.slept, self.read = 1.0, [], threading.Event()

    def perf_counter(self) -> float:
        now = self.now
        self.read.set()
        return now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    def at(self, now: float, part: dict):
        self.read.clear()
        self.now = now
        yield part
        assert self.read.wait(60)


def test_by_which_clock(monkeypatch):
    """A request is due at 2 s, its tokens come at 5, 6, 7.5 and 9 s; the last token has no text."""
    clock = Clock()
    monkeypatch.setattr(serve, "time", clock)

    def reply(fields: dict):
        for now, part in zip((5, 6, 7.5, 9, 20), [*map(event, "abc"), *end(4)], strict=True):
            yield from clock.at(now, part)

    with fake_server(reply) as url:
        found = serve.Server(url, "fake", {}).ask("x", 4, due=2.0)
    assert clock.slept == [1.0]  # until it is due
    assert (found.first, found.last, found.tokens, found.prompt_tokens) == (5.0, 9.0, 4, 7)
    assert found.text == "abc" and found.finished and found.error is None
    line = serve.summary([[found]])
    assert line["first_token"] == (3.0, 3.0)
    assert line["per_token"] == (4 / 3, 4 / 3)
    assert line["tokens_per_second"] == [4 / 7]


def test_statistics():
    """The statistics of two rounds, computed by numpy and by hand."""
    random = np.random.default_rng(3)
    rounds = []
    for _ in range(2):
        due, first, each = random.random(40), random.random(40), random.random(40)
        tokens = random.integers(1, 9, 40)
        rounds.append([
            serve.Outcome(*map(float, (d, d + f, d + f + (n - 1) * e)), int(n), 5)
            for d, f, e, n in zip(due, first, each, tokens, strict=True)
        ])  # fmt: skip
    rounds[1][3].error = "refused"  # its tokens do not count
    line, answered = serve.summary(rounds), [x for x in sum(rounds, []) if not x.error]
    assert (line["requests"], line["failed"], line["prompt_tokens"]) == (80, 1, 5 * 79)
    waited = sorted(x.first - x.due for x in answered)
    assert line["first_token"][0] == waited[39]  # the middle one of 79
    np.testing.assert_allclose(line["first_token"][1], waited[77] + 0.22 * (waited[78] - waited[77]))
    each = [(x.last - x.first) / (x.tokens - 1) for x in answered if x.tokens > 1]  # one token takes no time
    np.testing.assert_allclose(line["per_token"], np.quantile(each, (0.5, 0.99)))
    whole = max(x.last for x in rounds[0]) - min(x.due for x in rounds[0])
    np.testing.assert_allclose(line["tokens_per_second"][0], sum(x.tokens for x in rounds[0]) / whole)
    nothing = serve.summary([[serve.Outcome(0.0, error="refused")]])
    assert nothing["tokens_per_second"] == [0] and nothing["first_token"] is nothing["per_token"] is None


def test_arrivals():
    n = 10_000
    gaps = np.diff(serve.make_arrivals(n, 4, np.random.default_rng(0)))
    # Of n exponential gaps mean and deviation are 1 / 4, within 5 of their standard errors.
    assert abs(gaps.mean() - 0.25) < 5 * 0.25 / n**0.5
    assert abs(gaps.std() - 0.25) < 5 * 0.25 * (2 / n) ** 0.5
    assert not serve.make_arrivals(3, serve.ALL_AT_ONCE, np.random.default_rng(0)).any()


def test_prompts():
    """All prompts have the same length, and no two have the same first tokens."""
    tokenizer = load_tokenizer(CHECKPOINTS / "tiny-llama3")
    text = (serve.ROOT / "README.md").read_text()
    prompts = serve.make_prompts(text, 20, 30, tokenizer, 512)
    ids = [encode(tokenizer, prompt, 512) for prompt in prompts]
    assert [len(x) for x in ids] == [30] * 20
    assert len({tuple(x[: serve.DISTINCT]) for x in ids}) == 20
    with pytest.raises(UserError, match="have 4 of 5 prompts"):
        serve.make_prompts("one two three four " * 20, 5, 10, tokenizer, 512)


def test_of_a_server(tmp_path, monkeypatch, capsys):
    """The server refuses ignore_eos, has no room for one request, and breaks off the answer to another."""
    asked = []

    def reply(fields: dict):
        if "ignore_eos" in fields:
            return 400
        asked.append(fields)
        match len(asked) - 3:  # after the one that tried, and two to warm up
            case 1:
                return 429
            case 4:
                return [event("a")]
        return [event("a"), event("b"), *end(3)]

    with fake_server(reply) as url:
        arguments = ["--url", url + "/v1", "--rates", "1000,inf", "--requests", "3", "--prompt-tokens", "20"]
        arguments += ["--new-tokens", "3", "--rows", "2", "--json", tmp_path / "found"]
        code, out, err = invoke(monkeypatch, capsys, serve, *arguments)
    assert code == 0, err
    assert "1 failed: HTTPError: HTTP Error 429" in err and "1 failed: the answer broke off" in err
    assert len({fields["prompt"] for fields in asked}) == 9
    for fields in asked[1:]:
        assert (fields["max_tokens"], fields["temperature"], fields["stream"]) == (3, 0, True)
    lines = json.loads((tmp_path / "found").read_text())["lines"]
    assert [line["rate"] for line in lines] == ["1000.0", "inf"]
    for line in lines:
        assert (line["failed"], line["tokens"], line["prompt_tokens"]) == (1, 6, 14)
    rows = [line.split(" | ") for line in out.split("\n")[2:4]]
    assert [row[1] for row in rows] == ["1000 a second", "all at once"]
    assert [row[-1] for row in rows] == ["1 of 3 |"] * 2


def test_beside_the_command_line(monkeypatch, capsys):
    """The command line's time is its engine's, and all of its answers but one are the server's."""
    program = """
import json, sys
file = sys.argv[sys.argv.index("--prompt-file") + 1]
prompts = [json.loads(line)["prompt"] for line in open(file)]
answers = [dict(tokens=[1] * 5, text=prompt[:4]) for prompt in prompts]
answers[1]["text"] = "other"
print(json.dumps(dict(responses=answers, engine_seconds=2.0)))
"""
    monkeypatch.setattr(serve, "main_command", lambda args: [sys.executable, "-c", program])
    with fake_server(lambda fields: [event(fields["prompt"][:4]), *end(5)]) as url:
        monkeypatch.setattr(serve, "running_server", lambda args: contextlib.nullcontext(url))
        arguments = ["--rates", "inf", "--requests", "4", "--prompt-tokens", "20", "--new-tokens", "5"]
        code, out, err = invoke(monkeypatch, capsys, serve, *arguments, "--against", "prompt-file")
    assert code == 0, err
    assert "| main.py --prompt-file | all at once | 10.0 (10.0..10.0) |" in out
    assert "3 of 4 answers are the same" in out


def test_a_server_that_does_not_start(monkeypatch):
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    monkeypatch.setattr(serve, "main_command", lambda args: command)
    with pytest.raises(UserError, match="main.py --serve ended: no such model"):
        with serve.running_server(types.SimpleNamespace(requests=1)):
            raise AssertionError


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("--rates 1,0", "invalid list of numbers above 0 value"),
        ("--against vllm", "invalid choice: 'vllm'"),
        ("--rates 1 --against prompt-file", "needs inf among the --rates"),
        ("--url http://127.0.0.1:9 --rates inf --against prompt-file", "--url excludes --against"),
        ("--url http://127.0.0.1:9", "no OpenAI server there"),
    ],
)
def test_refused(arguments, said, monkeypatch, capsys):
    code, out, err = invoke(monkeypatch, capsys, serve, *arguments.split())
    assert code in (1, 2) and said in err and not out
