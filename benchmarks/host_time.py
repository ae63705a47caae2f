"""How long is the host busy with a step, and with a request that begins? python3 benchmarks/host_time.py

The device is to wait for neither. Here it has nothing to do: what engine.Engine sends is put on it, what
it gets back is ready. Prompts fill the rows but for their answers, and share half of their tokens, so
that each is compared with all rows that far. A step is a prefill chunk and a token for all that are read.
"""
# ruff: noqa: E402  the folders must be on the path first

import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import numpy as np

from model import Config, Gated, Heads, LayerKind, Norm, Output, Sampling
from serving.engine import Engine
from serving.programs import Programs
from serving.requests import Answer, Request
from sharding.mesh import make_mesh
from terminal.command_line import OneLineParser, run

VOCABULARY = 128256  # of Llama 3


class Idle(Programs):
    """No model: reading and choosing cost the device nothing."""

    def __init__(self, rows: int, max_len: int):
        layers = (LayerKind(Heads(K=1, G=1, H=2), Gated(F=2), Norm(1e-5)),)
        cfg = Config(D=2, V=VOCABULARY, layers=layers, norm=Norm(1e-5), max_positions=max_len)
        super().__init__(None, cfg, make_mesh(cfg, devices=jax.devices()[:1]), rows, max_len, "bfloat16")

    def begin(self, *arguments) -> None:
        jax.block_until_ready(jax.device_put(arguments))

    def prefill(self, rows: np.ndarray, count: np.ndarray, width: int, score: int | None = None) -> None:
        jax.block_until_ready(jax.device_put((rows, count)))

    def decode(self, count: np.ndarray, sampling: Sampling) -> Output:
        jax.block_until_ready(jax.device_put((count, sampling)))
        chosen = np.full((len(count), 1), 7, np.int32)
        return Output(tokens=chosen, logprobs=chosen * -0.5, count=count, drafted=0 * count)


class Timed(Engine):
    """admissions: seconds of each request that began."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.admissions: list[float] = []

    def advance(self) -> list[Answer]:
        """Time it where requests begin, for as many as do."""
        before, start = self.scheduler.admitted, time.perf_counter()
        changed = super().advance()
        if n := self.scheduler.admitted - before:
            self.admissions.append((time.perf_counter() - start) / n)
        return changed


def measure(rows: int, max_len: int, new: int, requests: int) -> tuple[list[float], list[float]]:
    """Seconds of each step while all rows are taken, and of each request that begins."""
    engine, rng, steps = Timed(Idle(rows, max_len), [], longest=max_len), np.random.default_rng(0), []
    head = rng.integers(0, VOCABULARY, max_len // 2, np.int32)
    for _ in range(rows + requests):
        own = rng.integers(0, VOCABULARY, max_len - len(head) - new, np.int32)
        engine.add(Request(np.concatenate([head, own]), new))
    while engine.busy:
        admitted, start = engine.scheduler.admitted, time.perf_counter()
        engine.advance()
        if admitted == engine.scheduler.admitted and not any(row.free for row in engine.scheduler.rows):
            steps.append(time.perf_counter() - start)
    return steps, engine.admissions


def main() -> None:
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    for name, default in (("rows", 32), ("max-len", 131072), ("new", 100), ("requests", 32)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"default: {default}")
    args = parser.parse_args()
    parser.check_positive(args, "rows", "max_len", "new", "requests")
    if args.max_len < 2 * args.new:
        parser.error(f"--max-len {args.max_len} is less than twice --new {args.new}")
    found = measure(args.rows, args.max_len, args.new, args.requests)
    print(f"{args.rows} rows of {args.max_len:,} positions, milliseconds of the host:")
    for what, seconds in zip(("a step", "a request that begins"), found, strict=True):
        middle, most = 1e3 * statistics.median(seconds), 1e3 * max(seconds)
        print(f"{what}: {middle:.2f} (at most {most:.2f}; {len(seconds)} of them)")


if __name__ == "__main__":
    run(main)
