"""How fast does a server answer when requests arrive one by one?

    python3 benchmarks/serve.py --checkpoint model.gguf --rates 1,2,4,inf -- --quantize int8
    python3 benchmarks/serve.py --checkpoint model.gguf --rates inf --against prompt-file
    python3 benchmarks/serve.py --url http://127.0.0.1:8000 --rates 1,2,4,inf

The command starts `main.py --serve` with the options after --, or asks any running server that has OpenAI's
/v1/completions (--url). A rate is requests per second; they arrive as a Poisson process, whether or not
earlier ones are answered, or all at once (inf). A prompt is --prompt-tokens tokens of this repository's own
texts, and is continued greedily by --new-tokens tokens; no two prompts begin alike, so that no prefix is
cached. A server that does not know ignore_eos may end an answer early: the tokens that it sent count.

The table has a line for each server and rate. tokens/s: of all answers, from the first arrival to the last
end; the median of the rounds. First token: from the time at which the request was to arrive, so that waiting
counts. Per token: from an answer's first token to its end, divided by the number of tokens after the first.
Both are percentiles over the requests of all rounds; with fewer than 100 requests the 99th percentile is
close to the slowest. Failed: requests that were refused or broke off; they are in no other column.

--against prompt-file also measures the command line, without a server, on the same prompts and never at the
same time: tokens/s by the seconds in its engine, which has all requests from the start. Compare it with inf,
whose seconds are those that the client sees: they include HTTP and tokenizing.
"""

import collections
import contextlib
import dataclasses
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import results
from results import ROOT

from checkpoints.checkpoint import open_checkpoint
from conversation.text import encode, load_tokenizer
from feedback.errors import UserError
from terminal.command_line import OneLineParser, run

TINY = ROOT / "tests" / "checkpoints" / "tiny-llama3"
ALL_AT_ONCE = float("inf")
OURS, PROMPT_FILE = "main.py --serve", "main.py --prompt-file"
TIMEOUT = 600  # seconds without an answer, after which a request has failed
DISTINCT = 8  # any two prompts differ within their first so many tokens
WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def log(*message) -> None:
    """Print to stderr. (terminal.launch.log would start jax, but the accelerator belongs to the server.)"""
    print(*message, file=sys.stderr, flush=True)


@dataclasses.dataclass
class Outcome:
    """The outcome of a request. Times are of time.perf_counter.

    due: when the request was to arrive. first, last: when the text of its first and its last token arrived.
    tokens, prompt_tokens: as the server counts them; if it does not, the number of texts received, and 0.
    """

    due: float
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    prompt_tokens: int = 0
    text: str = ""
    finished: bool = False
    error: str | None = None

    def record(self, event: dict, now: float) -> None:
        """Take in an event of the stream. `usage` comes after the end; a token without text has no event."""
        if "error" in event:
            self.error = str(event["error"])
        for choice in event.get("choices", ()):
            text = choice.get("text") or ""
            if text or choice.get("finish_reason"):
                self.first, self.last = self.first or now, now
                self.text += text
                self.tokens += bool(text)
                self.finished |= bool(choice.get("finish_reason"))
        if usage := event.get("usage"):
            self.tokens, self.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]


@dataclasses.dataclass(frozen=True)
class Server:
    """A server to ask. more: fields of a request beside OpenAI's."""

    url: str
    model: str
    more: dict

    def ask(self, prompt: str, new_tokens: int, due: float) -> Outcome:
        """Send a request when it is due, and read the answer to its end."""
        time.sleep(max(0.0, due - time.perf_counter()))
        fields = dict(
            model=self.model, prompt=prompt, max_tokens=new_tokens, temperature=0, stream=True,
            stream_options=dict(include_usage=True), **self.more,
        )  # fmt: skip
        outcome = Outcome(due)
        try:
            with fetch(f"{self.url}/v1/completions", fields) as lines:
                for line in lines:
                    if line.startswith(b"data: {"):
                        outcome.record(json.loads(line.removeprefix(b"data: ")), time.perf_counter())
        except (OSError, http.client.HTTPException, ValueError, LookupError) as e:
            outcome.error = f"{type(e).__name__}: {e}"
        if not outcome.finished:
            outcome.error = outcome.error or "the answer broke off"
        return outcome


def fetch(url: str, fields: dict | None = None) -> http.client.HTTPResponse:
    headers = {"content-type": "application/json"}
    if key := os.environ.get("LLAMA_JAX_API_KEY"):  # the variable that main.py --serve reads
        headers["authorization"] = f"Bearer {key}"
    body = json.dumps(fields).encode() if fields else None
    return WITHOUT_PROXY.open(urllib.request.Request(url, body, headers), timeout=TIMEOUT)


def find_server(url: str) -> Server:
    """The server at the address. One that refuses ignore_eos is asked without it: answers may be shorter."""
    url = url.rstrip("/").removesuffix("/v1")
    try:
        with fetch(f"{url}/v1/models") as response:
            model = json.load(response)["data"][0]["id"]
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as e:
        raise UserError(f"{url}: no OpenAI server there ({e})") from None
    for more in (dict(ignore_eos=True), {}):
        server = Server(url, model, more)
        first = server.ask("Once", 1, time.perf_counter())
        if first.error is None:
            return server
    raise UserError(f"{url}: {first.error}")


def load(server: Server, prompts: list[str], new_tokens: int, arrivals: Sequence[float]) -> list[Outcome]:
    """Ask for each prompt at its arrival (seconds from now), each in a thread of its own."""
    began = time.perf_counter() + 0.1  # for the threads to start
    with ThreadPoolExecutor(len(prompts)) as threads:
        due = [began + arrival for arrival in arrivals]
        return list(threads.map(server.ask, prompts, [new_tokens] * len(prompts), due))


def make_arrivals(n: int, rate: float, rng: np.random.Generator) -> np.ndarray:
    """The times of n arrivals of a Poisson process, in seconds: exponential gaps with the mean 1 / rate."""
    return np.cumsum(rng.exponential(1 / rate, n))


def make_prompts(text: str, n: int, length: int, tokenizer, vocabulary: int) -> list[str]:
    """n pieces of the text, each `length` tokens long; no two begin with the same tokens."""
    words, prompts, beginnings = text.split(" "), [], set()
    for start in np.random.default_rng(0).permutation(len(words)).tolist():
        if len(prompts) == n:
            break
        ids = encode(tokenizer, " ".join(words[start : start + length]), vocabulary)
        prompt = tokenizer.decode(ids[:length], skip_special_tokens=True)
        ids = encode(tokenizer, prompt, vocabulary) if prompt.strip() else []
        beginning = tuple(ids[:DISTINCT])
        if len(ids) == length and beginning not in beginnings:
            prompts.append(prompt)
            beginnings.add(beginning)
    if len(prompts) < n:
        raise UserError(f"the texts have {len(prompts)} of {n} prompts of {length} tokens; ask for less")
    return prompts


def tokens_per_second(outcomes: list[Outcome]) -> float:
    answered = [x for x in outcomes if x.error is None]
    if not answered:
        return 0.0
    return sum(x.tokens for x in answered) / (max(x.last for x in answered) - min(x.due for x in outcomes))


def percentiles(seconds: list[float]) -> tuple[float, float] | None:
    """(the median, the 99th percentile), interpolated between neighbors; None if there are no values."""
    return tuple(np.percentile(seconds, (50, 99)).tolist()) if seconds else None


def summary(rounds: list[list[Outcome]]) -> dict:
    """A server's line of the table at one rate. rounds: the outcomes of each round."""
    outcomes = [x for outcomes in rounds for x in outcomes]
    answered = [x for x in outcomes if x.error is None]
    return dict(
        tokens_per_second=[tokens_per_second(outcomes) for outcomes in rounds],
        first_token=percentiles([x.first - x.due for x in answered]),
        per_token=percentiles([(x.last - x.first) / (x.tokens - 1) for x in answered if x.tokens > 1]),
        requests=len(outcomes), failed=len(outcomes) - len(answered),
        tokens=sum(x.tokens for x in answered), prompt_tokens=sum(x.prompt_tokens for x in answered),
    )  # fmt: skip


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def positions(args) -> int:
    """Positions of a row, a few more than are needed."""
    return args.prompt_tokens + args.new_tokens + 8


def main_command(args) -> list:
    sizes = ["--rows", args.rows, "--max-len", positions(args)]
    return [sys.executable, ROOT / "main.py", "--checkpoint", args.checkpoint, *args.options, *sizes]


@contextlib.contextmanager
def running_server(args) -> Iterator[str]:
    """`main.py --serve` in a process of its own: yields its address when it is ready."""
    port = free_port()
    command = [*main_command(args), "--serve", "--port", port, "--max-queue", args.requests]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output)
        try:
            url = f"http://127.0.0.1:{port}"
            while not is_ready(url):
                if process.poll() is not None:
                    output.seek(0)
                    raise UserError(f"{OURS} ended: {last_line(output.read())}")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def is_ready(url: str) -> bool:
    try:
        with fetch(f"{url}/v1/models"):
            return True
    except urllib.error.HTTPError as e:
        if e.code != http.client.SERVICE_UNAVAILABLE:  # a server that is loading its model answers with this
            raise UserError(f"{url}: {e}") from None
    except (OSError, http.client.HTTPException):
        pass  # no server listens yet
    return False


def last_line(text: str) -> str:
    return (text.strip() or "without a message").split("\n")[-1]


def ask_command_line(prompts: list[str], args) -> tuple[float, list[str]]:
    """Ask main.py --prompt-file. Returns the tokens per second of its engine, and the answers."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps(dict(prompt=prompt)) + "\n" for prompt in prompts)
        file.flush()
        asked = ["--prompt-file", file.name, "--no-chat-template", "--max-new-tokens", args.new_tokens]
        how = ["--temperature", 0, "--ignore-eos", "--json"]
        command = list(map(str, [*main_command(args), *asked, *how]))
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"main.py --prompt-file ended: {last_line(done.stderr)}")
    found = json.loads(done.stdout)
    tokens = sum(len(x["tokens"]) for x in found["responses"])
    return tokens / found["engine_seconds"], [x["text"] for x in found["responses"]]


@dataclasses.dataclass
class Measurements:
    """All measurements of a run.

    loads: for each rate, the outcomes of the server's requests in each round. command_line: for each round,
    the tokens per second of the command line's engine, and its answers.
    """

    loads: dict[float, list[list[Outcome]]] = dataclasses.field(default_factory=dict)
    command_line: list[tuple[float, list[str]]] = dataclasses.field(default_factory=list)

    def lines(self, server: str) -> list[dict]:
        """The lines of the table."""
        found = [
            dict(server=server, rate=str(rate), **summary(rounds)) for rate, rounds in self.loads.items()
        ]
        if self.command_line:
            rates = [rate for rate, _ in self.command_line]
            found.append(dict(server=PROMPT_FILE, rate=str(ALL_AT_ONCE), tokens_per_second=rates))
        return found

    def comparison(self) -> str:
        """The server beside the command line, on the same requests."""
        rounds = self.loads[ALL_AT_ONCE]
        rate = statistics.median(map(tokens_per_second, rounds))
        share = rate / statistics.median(rate for rate, _ in self.command_line)
        ours = [x.text for outcomes in rounds for x in outcomes]
        same = sum(a == b for a, b in zip(ours, sum((x for _, x in self.command_line), []), strict=True))
        of_all = f"{same} of {len(ours)} answers are the same"
        return f"The server has {share:.1%} of the command line's tokens/s; {of_all}."


def measure(args, prompts: Iterator[str]) -> Measurements:
    """Measure the server and, if asked for, the command line: one after the other in each round."""
    measured, rng = Measurements(), np.random.default_rng(0)

    def new_prompts(n: int) -> list[str]:
        return [next(prompts) for _ in range(n)]

    for number in range(args.rounds):
        log(f"round {number}")
        first = new_prompts(args.rows)
        asked = {
            rate: (new_prompts(args.requests), make_arrivals(args.requests, rate, rng)) for rate in args.rates
        }
        with contextlib.nullcontext(args.url) if args.url else running_server(args) as url:
            server = find_server(url)
            load(server, first, args.new_tokens, np.zeros(args.rows))  # warms up
            for rate, (of_rate, arrivals) in asked.items():
                busy = time.process_time()
                outcomes = load(server, of_rate, args.new_tokens, arrivals)
                log_load(rate, outcomes, time.process_time() - busy)
                measured.loads.setdefault(rate, []).append(outcomes)
        if args.against:
            measured.command_line.append(ask_command_line(asked[ALL_AT_ONCE][0], args))
            log(f"  {PROMPT_FILE}: {measured.command_line[-1][0]:.1f} tokens/s")
    return measured


def log_load(rate: float, outcomes: list[Outcome], busy: float) -> None:
    """busy: seconds of CPU time of this process, which a server on the same machine had to do without."""
    rate_reached = tokens_per_second(outcomes)
    log(f"  {rate_name(rate)}: {rate_reached:.1f} tokens/s; asking took {busy:.2f} s of CPU time")
    for error, count in collections.Counter(x.error for x in outcomes if x.error).most_common():
        log(f"  {count} failed: {error}")


def rate_name(rate: float) -> str:
    return "all at once" if rate == ALL_AT_ONCE else f"{rate:g} a second"


def report(result: dict) -> str:
    """The result in Markdown."""
    head = ["", "requests", "tokens/s (least..most)", "first token, s: p50, p99", "per token, ms: p50, p99"]
    lines = []
    for line in result["lines"]:
        rates = line["tokens_per_second"]
        first, each = line.get("first_token"), line.get("per_token")
        lines.append([
            line["server"], rate_name(float(line["rate"])),
            f"{statistics.median(rates):,.1f} ({min(rates):,.1f}..{max(rates):,.1f})",
            f"{first[0]:.2f}, {first[1]:.2f}" if first else "",
            f"{1e3 * each[0]:.1f}, {1e3 * each[1]:.1f}" if each else "",
            f"{line['failed']} of {line['requests']}" if "failed" in line else "",
        ])  # fmt: skip
    facts = (
        "{model} {options}; {requests} requests of {prompt_tokens} tokens and {new_tokens} new ones; "
        "rounds: {rounds}, rows: {rows}; {cpu}; jax {versions[jax]}; {date}."
    )
    table = results.table([*head, "failed"], lines)
    return "\n".join([table, "", facts.format(**result), *result["compared"]])


def parse_arguments(arguments: list[str] | None = None):
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--url", metavar="URL", help="address of a running server; default: start one")
    add("--checkpoint", default=str(TINY), metavar="DIR_OR_ID",
        help="as for main.py; its tokenizer cuts the prompts; default: a tiny model from here")  # fmt: skip
    rates = results.positive_numbers(float)
    add("--rates", type=rates, default="1,2,4,inf", metavar="R,...", help="per second; default: 1,2,4,inf")
    add("--requests", type=int, default=32, metavar="N", help="for each rate; default: 32")
    add("--prompt-tokens", type=int, default=128, metavar="N", help="default: 128")
    add("--new-tokens", type=int, default=64, metavar="N", help="default: 64")
    add("--rows", type=int, default=8, metavar="N", help="requests answered at a time; default: 8")
    add("--rounds", type=int, default=1, metavar="N", help="default: 1")
    add("--against", choices=["prompt-file"], help="measure the command line in turn with the server")
    add("--json", metavar="FILE", help="write all measurements there")
    add("options", nargs="*", metavar="-- OPTION", help="options of main.py")
    args = parser.parse_args(arguments)
    if args.url and (args.against or args.options):
        parser.error("--url excludes --against and options of main.py: that server was started otherwise")
    if args.against and ALL_AT_ONCE not in args.rates:
        parser.error("--against prompt-file needs inf among the --rates: it has all requests at once")
    parser.check_positive(args, "requests", "prompt_tokens", "new_tokens", "rows", "rounds")
    return args


def main() -> None:
    args = parse_arguments()
    results.check_writable(args.json)
    checkpoint = open_checkpoint(args.checkpoint)
    text = "\n".join(
        file.read_text() for file in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    )
    count = args.rounds * (args.rows + len(args.rates) * args.requests)
    tokenizer = load_tokenizer(checkpoint.folder)
    prompts = make_prompts(text, count, args.prompt_tokens, tokenizer, checkpoint.config.V)
    found = measure(args, iter(prompts))
    result = dict(
        model=args.checkpoint, options=" ".join(args.options), requests=args.requests,
        prompt_tokens=args.prompt_tokens, new_tokens=args.new_tokens, rounds=args.rounds, rows=args.rows,
        cpu=results.cpu_name(), **results.versions_and_date(),
        lines=found.lines(args.url or OURS), compared=[found.comparison()] if args.against else [],
    )  # fmt: skip
    print(report(result))
    results.write(result, args.json)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server is ended, too
    run(main)
