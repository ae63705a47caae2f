"""Many requests: how fast in fixed batches, and how fast in rows that go on with the next request?

    python3 benchmarks/batching.py --checkpoint meta-llama/Llama-3.2-1B --requests 200 --rows 16

Each round answers the same requests in each way in turn, with an empty cache; the first round is not counted.
A fixed batch takes the next requests as they come, reads their prompts at once, and decodes until the longest
answer is done; it too is a step ahead of the host. All else is engine.Engine.

Lengths are log-normal with sigma 1, of the medians --prompt and --answer: answers twice as long as prompts,
as in the chats of arXiv 2309.06180, section 6.1 (161 and 338 tokens on average). Half of the prompts follow a
system prompt of 32 tokens. Prompts take at most a quarter of --max-len, answers the rest. Prompts are random
tokens, answers greedy, and no token ends them: they are as long as was drawn.
"""
# ruff: noqa: E402  the folders must be on the path first

import dataclasses
import datetime
import importlib.metadata
import json
import pathlib
import platform
import statistics
import sys
import time

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import jax
import jax.numpy as jnp
import numpy as np
from models import MODELS, read_model
from speed import cpu_name, prefill_width

import model
from checkpoints.checkpoint import open_checkpoint
from checkpoints.errors import UserError
from checkpoints.loading import load
from checkpoints.names import FLOATS
from quantize import FORMATS
from serving import memory, placement
from serving.engine import Engine
from serving.programs import Programs, start_fetching
from serving.requests import Request
from serving.speculation import PromptLookup
from terminal import launch
from terminal.command_line import OneLineParser, run

TINY = FOLDER.parent / "tests" / "checkpoints" / "tiny-llama4"
SYSTEM = 32  # tokens of the system prompt
GUESSES = 4


def make_requests(n: int, prompt: int, answer: int, vocabulary: int, max_len: int) -> list[Request]:
    rng = np.random.default_rng(0)

    def lengths(median: int, limit: int) -> np.ndarray:
        return np.clip(rng.lognormal(np.log(median), 1, n).round().astype(int), 1, limit)

    def tokens(n: int) -> list[int]:
        return rng.integers(0, vocabulary, n).tolist()

    system, requests = tokens(SYSTEM), []
    for length, new in zip(lengths(prompt, max_len // 4), lengths(answer, max_len * 3 // 4), strict=True):
        begins = system if rng.random() < 0.5 else []
        requests.append(Request((begins + tokens(length))[: max_len // 4], int(new)))
    return requests


# ------------------------------------------------------------------------------------------------------ ways


@dataclasses.dataclass
class Found:
    """What one way took for all requests. pieces: prefill chunks. row_steps: steps times the rows in use."""

    seconds: float
    answers: list[list[int]]
    steps: int
    row_steps: int
    pieces: int
    read: int = 0
    reused: int = 0
    guessed: int = 0
    guessed_right: int = 0


def without_prefix_caching(engine: Engine) -> None:
    for shard in engine.scheduler.shards:
        shard.match_prefixes = lambda _, rows=shard.rows: dict.fromkeys(rows, 0)


@dataclasses.dataclass(frozen=True)
class Bench:
    weights: model.Weights
    cfg: model.Config
    mesh: jax.sharding.Mesh
    rows: int
    max_len: int
    kv_dtype: str

    def fixed(self, requests: list[Request]) -> Found:
        static = dict(cfg=self.cfg, mesh=self.mesh)
        cache = model.init_cache(self.cfg, self.mesh, self.rows, self.max_len, self.kv_dtype)
        began, answers, steps, pieces = time.perf_counter(), [], 0, 0
        for first in range(0, len(requests), self.rows):
            group = requests[first : first + self.rows]
            text = np.zeros((self.rows, self.max_len), np.int32)
            unread, new = np.zeros((2, self.rows), np.int32)
            for row, request in enumerate(group):
                text[row, : len(request.prompt)] = request.prompt
                unread[row], new[row] = len(request.prompt) - 1, request.max_new_tokens
            cache = dataclasses.replace(
                cache,
                tokens=jax.device_put(text, cache.tokens.sharding),
                length=jax.device_put(np.zeros(self.rows, np.int32), cache.length.sharding),
            )
            while unread.any():
                width = prefill_width(self.rows, unread.max())
                count = np.minimum(unread, width)
                _, cache = model.prefill(None, count, self.weights, cache, width=width, **static)
                unread -= count
                pieces += 1
            ahead, tokens = None, []
            for step in range(new.max()):
                count = (step < new).astype(np.int32)
                output, cache = model.decode_step(
                    count, None, model.Sampling(), self.weights, cache, **static
                )
                if ahead is not None:
                    tokens.append(np.asarray(ahead))
                ahead = start_fetching(output.tokens, self.mesh)
            tokens = np.hstack([*tokens, ahead])
            answers += [tokens[row, : new[row]].tolist() for row in range(len(group))]
            steps += len(tokens[0])
        seconds, made = time.perf_counter() - began, sum(map(len, answers))
        read = sum(len(request.prompt) for request in requests)
        return Found(seconds, answers, steps, made, pieces, read=read)

    def continuous(self, requests: list[Request], change=None, speculation=None) -> Found:
        sizes = self.rows, self.max_len, self.kv_dtype
        engine = Engine(Programs(self.weights, self.cfg, self.mesh, *sizes, speculation), requests)
        if change is not None:
            change(engine)
        start = time.perf_counter()
        answers = [engine.add(request) for request in requests]
        while engine.busy:
            engine.advance()
        seconds, stats, prefills = time.perf_counter() - start, engine.stats, engine.scheduler.prefills
        return Found(
            seconds, [answer.tokens for answer in answers], stats.steps, stats.row_steps, prefills,
            read=stats.prompt_tokens - stats.reused_tokens, reused=stats.reused_tokens,
            guessed=stats.drafted, guessed_right=stats.accepted,
        )  # fmt: skip

    def ways(self) -> dict:
        return {
            "fixed batches": self.fixed,
            "continuous, each prompt read whole": lambda requests: self.continuous(
                requests, without_prefix_caching
            ),
            "continuous": self.continuous,
            f"continuous, prompt lookup, {GUESSES} draft tokens": lambda requests: self.continuous(
                requests, speculation=PromptLookup(GUESSES)
            ),
        }


def measure(bench: Bench, requests: list[Request], rounds: int) -> list[dict]:
    """What each way took: seconds of each round but the first, and the counts, which are always the same."""
    seconds, found = {way: [] for way in bench.ways()}, {}
    for number in range(1 + rounds):
        for way, answer in bench.ways().items():
            found[way] = answer(requests)
            seconds[way].append(found[way].seconds)
            launch.log(f"round {number}: {way} took {found[way].seconds:.2f} s")
    expected, lines = found["fixed batches"].answers, []
    for way, one in found.items():
        lengths = [len(tokens) for tokens in one.answers]
        assert lengths == [request.max_new_tokens for request in requests], f"{way}: a wrong length"
        same = sum(ours == theirs for ours, theirs in zip(one.answers, expected, strict=True))
        counts = {name: x for name, x in vars(one).items() if name not in ("seconds", "answers")}
        lines.append(dict(way=way, seconds=seconds[way][1:], same_answers=same, **counts))
    return lines


# ---------------------------------------------------------------------------------------------------- report


def table(result: dict) -> str:
    """That of docs/, in Markdown."""
    head = (
        "| | tokens/s (least..most) | | steps | | rows in use | tokens per row and step | accepted "
        "| prompt tokens read | reused | prefill chunks | same answers |"
    )
    lines, (fixed, *_) = [head, "|---" * 12 + "|"], result["ways"]
    for line in result["ways"]:
        rates = [result["tokens"] / x for x in line["seconds"]]
        faster = statistics.median(fixed["seconds"]) / statistics.median(line["seconds"])
        cells = [
            line["way"], f"{statistics.median(rates):,.0f} ({min(rates):,.0f}..{max(rates):,.0f})",
            f"{faster:.2f}x", f"{line['steps']:,}", f"{fixed['steps'] / line['steps']:.2f}x fewer",
            f"{line['row_steps'] / line['steps']:.2f}", f"{result['tokens'] / line['row_steps']:.2f}",
            f"{line['guessed_right'] / line['guessed']:.0%}" if line["guessed"] else "",
            *(f"{line[name]:,}" for name in ("read", "reused", "pieces", "same_answers")),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    how = (
        "{model}, {weights} weights, {dtype}, cache {kv_cache_dtype}; {requests} requests with medians of "
        "{median_prompt} and {median_answer}, {tokens:,} tokens in {batch_rows} rows of {max_len}; {device}, "
        "mesh {mesh}; jax {versions[jax]}; {date}."
    )
    return "\n".join([*lines, "", how.format(**result)])


def parse_arguments(arguments: list[str] | None = None):
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    names = ", ".join(MODELS)
    source.add_argument("--model", metavar="NAME_OR_CONFIG", help=f"random weights: {names} or a config.json")
    source.add_argument("--checkpoint", default=str(TINY), metavar="DIR_OR_ID", help="as for main.py")
    add("--requests", type=int, default=200, metavar="N", help="default: 200")
    add("--prompt", type=int, default=20, metavar="N", help="median of the prompts; default: 20")
    add("--answer", type=int, default=40, metavar="N", help="median of the answers; default: 40")
    add("--rows", type=int, default=8, metavar="B", help="default: 8")
    add("--max-len", type=int, metavar="N", help="positions per row; default: 1024, or the model's limit")
    add("--rounds", type=int, default=3, metavar="N", help="default: 3")
    for name in ("dp", "ep", "tp"):
        add(f"--{name}", type=int, metavar="N", help="as for main.py")
    add("--dtype", choices=FLOATS, help="of activations; default: as for main.py")
    add("--quantize", choices=FORMATS, help="the weights; default: as in the checkpoint")
    add("--kv-cache-dtype", choices=("int8", "bfloat16", "float32"), help="default: as for main.py")
    add("--json", metavar="FILE", help="write all that was measured there")
    args = parser.parse_args(arguments)
    parser.check_positive(args, "requests", "prompt", "answer", "rows", "max_len", "rounds", "dp", "ep", "tp")
    return args


def main() -> None:
    args = parse_arguments()
    if args.json:
        open(args.json, "a").close()  # a file that cannot be written is known before the measuring
    launch.enable_compilation_cache()
    launch.join_hosts(args)
    checkpoint = None if args.model else open_checkpoint(args.checkpoint)
    cfg = checkpoint.config if checkpoint else read_model(args.model)
    mesh = placement.choose_mesh(cfg, args.dp, args.ep, args.tp, launch.device_count())
    if args.rows % mesh.shape["data"]:
        raise UserError(f"--rows {args.rows} is no multiple of the data parallelism {mesh.shape['data']}")
    max_len = args.max_len or min(1024, cfg.max_positions)
    if not 4 * SYSTEM <= max_len <= cfg.max_positions:
        raise UserError(
            f"--max-len {max_len} is not between {4 * SYSTEM} and the model's {cfg.max_positions}"
        )
    format = placement.choose_format(args.quantize, checkpoint, launch.log_once)
    dtype, kv_dtype = placement.choose_dtypes(args.dtype, args.kv_cache_dtype, format)
    placement.set_precision(dtype)
    memory.fit_cache([memory.Deployment(cfg, mesh, dtype, format, kv_dtype)], [], args.rows, max_len)
    if checkpoint:
        weights = load(checkpoint, mesh, dtype, format, show=jax.process_index() == 0)
    else:
        launch.log("making random weights")
        weights = model.init_weights(jax.random.key(0, impl="rbg"), cfg, mesh, jnp.dtype(dtype), format)
    requests = make_requests(args.requests, args.prompt, args.answer, cfg.V, max_len)
    ways = measure(Bench(weights, cfg, mesh, args.rows, max_len, kv_dtype), requests, args.rounds)
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    result = dict(
        model=args.model or args.checkpoint, dtype=dtype, kv_cache_dtype=kv_dtype,
        weights=str(format or dtype), devices=mesh.size,
        device=cpu_name() if jax.default_backend() == "cpu" else jax.devices()[0].device_kind,
        mesh="x".join(str(n) for n in mesh.shape.values() if n > 1) or "1",
        requests=args.requests, median_prompt=args.prompt, median_answer=args.answer,
        batch_rows=args.rows, max_len=max_len,
        tokens=sum(request.max_new_tokens for request in requests),
        prompts=[len(request.prompt) for request in requests],
        answers=[request.max_new_tokens for request in requests],
        versions=dict(python=platform.python_version(), **versions),
        date=datetime.date.today().isoformat(), ways=ways,
    )  # fmt: skip
    if jax.process_index() == 0:
        print(table(result))
        if args.json:
            pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run(main)
