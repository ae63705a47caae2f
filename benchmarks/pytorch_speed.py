"""How fast is the same model on this machine in PyTorch: in gpt-fast, and in transformers?

    python3 benchmarks/pytorch_speed.py --gpt-fast ../gpt-fast --json pytorch.json

Its figures stand beside those of speed.py, of the same card in the same session: steps of decode around a
context, and prefill, of a Llama's shape with random weights. gpt-fast is imported from a checkout of its own;
nothing of it is here. Each program and number format runs in a process of its own, which finds the whole
memory free, and cannot end the others. This program needs no jax, so it may run in an environment that has
only torch, transformers, and what gpt-fast's requirements.txt names.
"""

import argparse
import contextlib
import datetime
import gc
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import results

from feedback.errors import UserError, did_you_mean

LLAMA3 = dict(
    model_type="llama", vocab_size=128256, num_key_value_heads=8, rms_norm_eps=1e-5,
    max_position_embeddings=131072,
)  # fmt: skip
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=500000.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
MODELS = {  # as in planner/published_models.py, which would import jax, with RoPE
    "llama3.1-8b": LLAMA3
    | dict(hidden_size=4096, num_attention_heads=32, num_hidden_layers=32, intermediate_size=14336)
    | dict(rope_parameters=LLAMA3_ROPE | dict(factor=8.0)),
    "llama3.2-1b": LLAMA3
    | dict(hidden_size=2048, num_attention_heads=32, num_hidden_layers=16, intermediate_size=8192)
    | dict(rope_parameters=LLAMA3_ROPE | dict(factor=32.0), tie_word_embeddings=True),
}
NEEDED = {*LLAMA3, "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"}
FORMATS = "bfloat16", "int8", "int4"
GPT_FAST_FILES = "model.py", "quantize.py", "generate.py", "tokenizer.py"
WORKER = "worker"  # the only argument of the processes that measure


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def one_line(error: Exception) -> str:
    """The first sentence: torch's errors have pages."""
    return f"{type(error).__name__}: {' '.join(str(error).split()).partition('. ')[0][:200]}"


# ------------------------------------------------------------------------------------------- the two programs


class GptFast:
    """gpt-fast's model in one number format, with its own functions, compiled as its generate.py does."""

    def __init__(self, config: dict, number_format: str, device: str, path: str):
        import torch

        # model and quantize are also names of ours.
        ours = {str(results.ROOT), str(results.ROOT / "benchmarks")}
        sys.path[:] = [path, *(x for x in sys.path if os.path.abspath(x) not in ours)]
        generate, quantize, theirs = map(importlib.import_module, ("generate", "quantize", "model"))
        with torch.device("meta"):
            sizes = theirs.ModelArgs(**gpt_fast_sizes(config))
            model = theirs.Transformer(sizes).to(torch.bfloat16)
            if number_format == "int8":
                model = quantize.WeightOnlyInt8QuantHandler(model).convert_for_runtime()
            if number_format == "int4":
                model = quantize.WeightOnlyInt4QuantHandler(model).convert_for_runtime()
        self.model, self.generate = model.to_empty(device=device).eval(), generate
        self.vocabulary, self.device = config["vocab_size"], device
        self.decode_one_token = generate.decode_one_token
        for name, x in model.state_dict().items():
            fill(name, x)

    def make_caches(self, batch: int, length: int) -> None:
        import torch

        self.model.max_batch_size = self.model.max_seq_length = -1  # forget those of another case
        with torch.device(self.device):
            self.model.setup_caches(batch, length)
        for layer in self.model.layers:
            layer.attention.kv_cache.k_cache.normal_()
            layer.attention.kv_cache.v_cache.normal_()

    def decode(self, batch: int, context: int, steps: int, compiled: bool) -> Callable[[], object]:
        """Sampling has the defaults of its command: of the 200 most probable tokens, at temperature 0.8."""
        import torch

        self.make_caches(batch, context + steps)
        token = torch.randint(self.vocabulary, (batch, 1), device=self.device, dtype=torch.int)
        start = torch.tensor([first_position(context, steps)], device=self.device, dtype=torch.int)
        step = self.decode_one_token
        self.generate.decode_one_token = (
            torch.compile(step, mode="reduce-overhead", fullgraph=True) if compiled else step
        )
        decode = self.generate.decode_n_tokens
        return lambda: decode(self.model, token, start.clone(), steps, temperature=0.8, top_k=200)

    def prefill(self, length: int, compiled: bool) -> Callable[[], object]:
        """It computes the logits of all positions."""
        import torch

        self.make_caches(1, length)
        prompt = torch.randint(self.vocabulary, (1, length), device=self.device)
        positions, read = torch.arange(length, device=self.device), self.generate.prefill
        read = torch.compile(read, fullgraph=True, dynamic=True) if compiled else read
        return lambda: read(self.model, prompt, positions, temperature=0.8, top_k=200)


def gpt_fast_sizes(config: dict) -> dict:
    """The fields of its ModelArgs for a config.json. Raises ValueError if it has no such model."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    if (config.get("head_dim") or width // heads) * heads != width:
        raise ValueError(f"gpt-fast has no heads of {config['head_dim']} columns with a width of {width}")
    rope = rope_of(config)
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "llama3"):
        raise ValueError(f"gpt-fast has no RoPE of the kind {kind}")
    names = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
    return dict(
        block_size=config["max_position_embeddings"], vocab_size=config["vocab_size"], dim=width,
        n_layer=config["num_hidden_layers"], n_head=heads, n_local_heads=config["num_key_value_heads"],
        intermediate_size=config["intermediate_size"], norm_eps=config["rms_norm_eps"],
        rope_base=rope.get("rope_theta", 10000.0),
        rope_scaling={name: rope[name] for name in names} if kind == "llama3" else None,
    )  # fmt: skip


def rope_of(config: dict) -> dict:
    """RoPE's parameters, which older files have in two places."""
    older = dict(config.get("rope_scaling") or {}, rope_theta=config.get("rope_theta", 10000.0))
    return config.get("rope_parameters") or older


def fill(name: str, x) -> None:
    """Make a weight of gpt-fast's random, of a size that keeps activations near 1."""
    if name.endswith("scales_and_zeros"):  # int4
        x[..., 0], x[..., 1] = 0.005, 0
    elif name.endswith("scales"):  # int8
        x.fill_(0.0003)
    elif x.is_floating_point():
        x.normal_(std=0.02) if x.ndim > 1 else x.fill_(1)  # a norm
    else:
        bits = 8 * x.element_size()  # a word of int4 has eight numbers
        x.random_(-(1 << bits - 1), 1 << bits - 1)


class Transformers:
    """transformers' model in bfloat16 with a static cache, compiled as its documentation does."""

    def __init__(self, config: dict, number_format: str, device: str, path: str):
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig

        self.config, self.device = LlamaConfig(**config), device
        with torch.device(device):
            self.model = AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16).eval()
        known = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache" if "cache" in known else "past_key_values"  # before 5.24
        self.needs_positions = "cache_position" in known

    def cache(self, batch: int, length: int):
        """A cache full of random numbers, with no position filled."""
        import torch
        from transformers import StaticCache

        cache, cfg = StaticCache(config=self.config, max_cache_len=length), self.config
        cache.early_initialization(
            batch, cfg.num_key_value_heads, cfg.head_dim, torch.bfloat16, torch.device(self.device)
        )
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        return cache

    def logits(self, tokens, positions, cache):
        """Logits of the last position. tokens: [batch,T]; positions: [T]."""
        inputs = {self.cache_name: cache}
        if self.needs_positions:
            inputs["cache_position"] = positions
        return self.model(
            tokens,
            position_ids=positions[None],
            use_cache=True,
            logits_to_keep=1,
            return_dict=False,
            **inputs,
        )[0]

    def next_token(self, tokens, positions, cache):
        return self.logits(tokens, positions, cache)[:, -1].argmax(-1, keepdim=True)

    def decode(self, batch: int, context: int, steps: int, compiled: bool) -> Callable[[], object]:
        """Each step takes the most probable token."""
        import torch

        cache = self.cache(batch, context + steps)
        first = torch.randint(self.config.vocab_size, (batch, 1), device=self.device)
        start = torch.tensor([first_position(context, steps)], device=self.device)
        step = self.next_token
        step = torch.compile(step, mode="reduce-overhead", fullgraph=True) if compiled else step

        def go():
            set_length(cache, start)
            token, position = first, start.clone()
            for _ in range(steps):
                token = step(token, position, cache).clone()
                position += 1
            return token

        return go

    def prefill(self, length: int, compiled: bool) -> Callable[[], object]:
        import torch

        cache = self.cache(1, length)
        prompt = torch.randint(self.config.vocab_size, (1, length), device=self.device)
        positions = torch.arange(length, device=self.device)
        read = self.next_token
        read = torch.compile(read, mode="reduce-overhead", fullgraph=True) if compiled else read

        def go():
            set_length(cache, positions[:1])
            return read(prompt, positions, cache).clone()

        return go


def set_length(cache, length) -> None:
    """Newer caches of transformers count the positions that are filled."""
    for layer in cache.layers:
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length.copy_(length[0])


def first_position(context: int, steps: int) -> int:
    """Of `steps` steps around a context."""
    return max(context - steps // 2, 0)


PROGRAMS = {"gpt-fast": GptFast, "transformers": Transformers}


# ---------------------------------------------------------------------------------- a process that measures


def cases_of(job: dict) -> Iterator[dict]:
    """What is measured of a program in a number format. tokens: of each row, in a step or a prompt."""
    for batch in job["batches"]:
        for context in job["contexts"]:
            yield dict(phase="decode", batch=batch, tokens=1, context=context, compiled=job["compile"])
    for length in job["prompts"]:
        for compiled in (False, True) if job["compile"] else (False,):
            yield dict(phase="prefill", batch=1, tokens=length, context=0, compiled=compiled)


def work(job: dict, tell: Callable[[dict], None]) -> None:
    """Measure the cases of one program in one number format, and tell each as soon as it is known."""
    import torch

    on_gpu = job["device"] == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else results.cpu_name()
    tell(dict(device=name, cuda=torch.version.cuda if on_gpu else None))
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    program = PROGRAMS[job["program"]](job["config"], job["format"], job["device"], job["path"])
    for case in cases_of(job):
        try:
            found = measure(program, case, job["steps"], job["repeat"], on_gpu)
        except Exception as e:  # out of memory, or a kernel is missing
            found = dict(failure=one_line(e))
        tell(case | found)
        gc.collect()
        torch.compiler.reset()  # else a second batch would be compiled for batches of all sizes
        if on_gpu:
            torch.cuda.empty_cache()


def measure(program, case: dict, steps: int, repeat: int, on_gpu: bool) -> dict:
    """Seconds of a step, or of a prompt: the median, the least and the most of `repeat` turns.

    compile_seconds: of the first turn, which compiles. memory: the most bytes that were in use on the GPU.
    """
    import torch

    wait = torch.cuda.synchronize if on_gpu else lambda: None
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    if case["phase"] == "decode":
        n, go = steps, program.decode(case["batch"], case["context"], steps, case["compiled"])
    else:
        n, go = 1, program.prefill(case["tokens"], case["compiled"])
    seconds = []
    for _ in range(3 + repeat):  # the first turn compiles, the second may record CUDA graphs
        wait()
        began = time.perf_counter()
        go()
        wait()
        seconds.append((time.perf_counter() - began) / n)
    timed = seconds[3:]
    median = statistics.median(timed)
    return dict(
        seconds=median, seconds_least=min(timed), seconds_most=max(timed),
        tokens_per_second=case["batch"] * case["tokens"] / median, compile_seconds=n * seconds[0],
        memory=torch.cuda.max_memory_allocated() if on_gpu else None,
    )  # fmt: skip


def worker() -> None:
    """Read a job from stdin; write a line of JSON for each case. All else that is printed goes to stderr."""
    job = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)

        def tell(found: dict) -> None:
            print(json.dumps(found), file=out, flush=True)

        try:
            work(job, tell)
        except Exception as e:
            tell(dict(failure=one_line(e)))


# ------------------------------------------------------------------------------------------------ the command


def cases_found(job: dict) -> Iterator[dict]:
    """What the process of a job tells, then what torch said of CUDA graphs, and how the process failed."""
    command = [sys.executable, __file__, WORKER]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with tempfile.TemporaryFile("w+") as noise:
        with subprocess.Popen(command, stderr=noise, text=True, **pipes) as process:
            with contextlib.suppress(BrokenPipeError):
                json.dump(job, process.stdin)
                process.stdin.close()
            yield from map(json.loads, process.stdout)
        noise.seek(0)
        lines = noise.read().strip().splitlines() or ["without a message"]
    skips = [line[line.index("skipping") :] for line in lines if "skipping cudagraphs" in line]
    for note in dict.fromkeys(skips):
        yield dict(note=note)  # kernels were started one by one
    if process.returncode:
        yield dict(failure=f"its process ended with code {process.returncode}: {lines[-1][:200]}")


def case_name(row: dict) -> str:
    if "phase" not in row:
        return row["format"]
    how = "" if row["compiled"] else ", not compiled"
    return f"{row['format']}, {row['phase']} {row['batch']} x {row['context'] or row['tokens']}{how}"


def table(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        told = [row["failure"].replace("|", "\\|"), "none"] if "failure" in row else figures(row)
        lines.append([row["program"], case_name(row), *told])
    return results.table(["program", "case", "ms (least..most)", "tokens/s"], lines)


def figures(row: dict) -> list[str]:
    ms = [f"{1e3 * row[name]:.2f}" for name in ("seconds", "seconds_least", "seconds_most")]
    return [f"{ms[0]} ({ms[1]}..{ms[2]})", f"{row['tokens_per_second']:,.1f}"]


def facts(result: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        f"{result['model']}, random weights, cache in bfloat16; {result['device']}; {versions}; gpt-fast "
        f"{result['gpt_fast'] or 'not timed'}; {result['date']}. Of {result['repeat']} turns of "
        f"{result['steps']} steps, or of one prompt."
    )


def report(result: dict) -> str:
    return "\n\n".join([table(result["rows"]), facts(result), *result["notes"]])


def commit_of(path: pathlib.Path) -> str:
    git = ["git", "-C", str(path), "rev-parse", "--short=12", "HEAD"]
    with contextlib.suppress(OSError):
        done = subprocess.run(git, capture_output=True, text=True)
        if (path / ".git").exists() and done.returncode == 0:
            return done.stdout.strip()
    return "of an unknown commit"


def versions() -> dict[str, str]:
    found = dict(python=platform.python_version())
    for name in ("torch", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def read_config(file: pathlib.Path) -> dict:
    """A config.json, or the one of a folder. Raises UserError if it is not a Llama's."""
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text())
    except ValueError:
        raise UserError(f"--config {file}: not JSON; give the config.json of a Llama") from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind != "llama":
        raise UserError(f"--config {file}: model_type is {kind}; only llama is timed here")
    if missing := sorted(NEEDED - config.keys()):
        raise UserError(f"--config {file}: {', '.join(missing)} missing; give the config.json of a Llama")
    for name in sorted(NEEDED - {"model_type", "rms_norm_eps"}):
        if type(config[name]) is not int or config[name] < 1:
            raise UserError(
                f"--config {file}: {name} is {config[name]!r}; it should be a number of at least 1"
            )
    return config


def check_gpt_fast(path: pathlib.Path) -> None:
    if missing := [name for name in GPT_FAST_FILES if not (path / name).is_file()]:
        raise UserError(
            f"--gpt-fast {path}: no {missing[0]} there; give the folder of a checkout of gpt-fast"
        )


class Parser(argparse.ArgumentParser):
    """As OneLineParser of terminal/command_line.py, which wants jax to be installed."""

    def error(self, message: str):
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def choose_device(asked: str | None) -> str:
    if importlib.util.find_spec("torch") is None:
        raise UserError(f"{sys.executable} has no torch: pip install torch transformers")
    import torch

    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise UserError(f"--device cuda: torch {torch.__version__} finds no GPU; try --device cpu")
    return asked or ("cuda" if there else "cpu")


def parse_arguments(arguments: list[str] | None = None):
    parser = Parser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    names = ", ".join(MODELS)
    source.add_argument("--model", default="llama3.1-8b", metavar="NAME", help=f"{names}; default: the first")
    source.add_argument("--config", metavar="FILE", help="the shape of a config.json of transformers instead")
    add("--gpt-fast", metavar="DIR", help="a checkout of gpt-fast; without it only transformers is timed")
    numbers = results.positive_numbers(int)
    add("--batch", type=numbers, default=[1, 32], metavar="B,...", help="rows of transformers; default: 1,32")
    add("--context", type=numbers, default=[1024], metavar="S,...", help="of decode; default: 1024")
    add("--prompt", type=numbers, default=[2048], metavar="T,...", help="of one row; default: 2048")
    add(
        "--formats",
        default=",".join(FORMATS),
        metavar="F,...",
        help="of gpt-fast's weights; default: all three",
    )
    add("--steps", type=int, default=64, metavar="N", help="of decode in each turn; default: 64")
    add("--repeat", type=int, default=5, metavar="N", help="turns of each case; default: 5")
    add("--device", choices=("cuda", "cpu"), help="default: cuda, if there is a GPU")
    add("--no-compile", action="store_true", help="without torch.compile")
    add("--json", metavar="FILE", help="write all measurements there, after each case")
    args = parser.parse_args(arguments)
    for name in ("steps", "repeat"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} is not at least 1")
    args.formats = args.formats.split(",")
    if unknown := [x for x in args.formats if x not in FORMATS]:
        parser.error(f"--formats: {unknown[0]} is none of {', '.join(FORMATS)}")
    if args.model not in MODELS:
        parser.error(f"--model {args.model}: none of {names}{did_you_mean(args.model, MODELS)}")
    return args


def add(result: dict, job: dict, found: dict) -> None:
    """Add to the result what the process of a job has told."""
    if "cuda" in found:
        result["device"] = found["device"]
        result["versions"] |= dict(CUDA=found["cuda"]) if found["cuda"] else {}
    elif "note" in found:
        result["notes"].append(f"{job['program']}, {job['format']}: {found['note']}")
        log(result["notes"][-1])
    else:
        row = dict(program=job["program"], format=job["format"], **found)
        result["rows"].append(row)
        told = row.get("failure") or "{} ms, {} tokens/s".format(*figures(row))
        log(f"{row['program']}, {case_name(row)}: {told}")


def main() -> None:
    args = parse_arguments()
    config = read_config(pathlib.Path(args.config)) if args.config else MODELS[args.model]
    limit = config["max_position_embeddings"]
    longest = max(args.context) + args.steps
    if longest > limit:
        raise UserError(
            f"--context {max(args.context)} and --steps {args.steps}: the limit is {limit} positions"
        )
    if max(args.prompt) > limit:
        raise UserError(f"--prompt {max(args.prompt)}: the limit is {limit} positions")
    path = pathlib.Path(args.gpt_fast).expanduser().resolve() if args.gpt_fast else None
    if path:
        check_gpt_fast(path)
    results.check_writable(args.json)
    shared = dict(
        config=config, device=choose_device(args.device), path=str(path), compile=not args.no_compile,
        contexts=args.context, prompts=args.prompt, steps=args.steps, repeat=args.repeat,
    )  # fmt: skip
    jobs = [dict(program="gpt-fast", format=x, batches=[1]) for x in args.formats if path]
    jobs.append(dict(program="transformers", format="bfloat16", batches=args.batch))
    if not path:
        log("gpt-fast is not timed: --gpt-fast DIR names a checkout of it")
    result = dict(
        model=args.config or args.model, device=shared["device"], versions=versions(),
        gpt_fast=commit_of(path) if path else None, date=datetime.date.today().isoformat(),
        steps=args.steps, repeat=args.repeat, rows=[], notes=[],
    )  # fmt: skip
    for job in jobs:
        log(f"{job['program']}, {job['format']}: making random weights")
        for found in cases_found(shared | job):
            add(result, job, found)
            results.write(result, args.json)
    print(report(result))
    if all("failure" in row for row in result["rows"]):
        raise UserError("no case could be timed; the lines above say why")


def run() -> None:
    """main, with what a user can correct in one line on stderr."""
    try:
        main()
    except UserError as e:
        sys.exit(f"error: {e}")
    except OSError as e:
        sys.exit(f"error: {e.filename}: {(e.strerror or str(e)).lower()}; check the path, and who may use it")
    except KeyboardInterrupt:
        log("interrupted")
        sys.exit(130)


if __name__ == "__main__":
    worker() if sys.argv[1:] == [WORKER] else run()
