"""How fast is this on a CPU, beside transformers and llama.cpp?

    python3 benchmarks/compare.py --llama-cpp-python ~/peers/bin/python [--rounds 5] [--json FILE]

Each contender is a process with a Llama 3.2 1B of random weights. In each round each does each task once,
never two at a time: what disturbs the machine disturbs all alike. The peers may have an environment:

    python3 -m venv ~/peers && ~/peers/bin/pip install torch transformers gguf llama-cpp-python

Memory: making jax's int8 weights takes 3 GB for 1.2, as the embedding is in float32 for a while, so its
contenders go first, the smallest of them before the others.
"""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
if "--worker" not in sys.argv:  # a worker's environment has only what its own library needs
    from models import MODELS

    from checkpoints.errors import UserError
    from terminal.command_line import OneLineParser, run

MODEL = "llama3.2-1b"
MAX_LEN = 1024  # positions per row of a cache


@dataclasses.dataclass(frozen=True)
class Task:
    """Decode `steps` tokens for each row after `context` others; without steps, prefill the context."""

    rows: int
    context: int
    steps: int = 0


TASKS = {
    "decode, 1 row": Task(rows=1, context=128, steps=16),
    "decode, 8 rows": Task(rows=8, context=128, steps=16),
    "prefill, 512 tokens": Task(rows=1, context=512),
}

# Each library makes a model from the fields of a config.json, and returns two functions. prefill(prompts)
# puts them, all of one length, into the cache of that many rows, and chooses the next tokens. decode(rows,
# context, steps) cuts that cache to `context` positions per row, and adds `steps` tokens, greedily.


def jax_library(fields: dict, dtype: str, threads: int, folder: str):
    """This repository, as main.py runs it: int8 weights with bfloat16 activations, the cache in float32."""
    import jax
    import numpy as np

    import model
    from families.registry import read_config
    from quantize import INT8
    from sharding.mesh import make_mesh

    cfg, caches, float_type = read_config(fields), {}, "bfloat16" if dtype == "int8" else dtype
    static = dict(cfg=cfg, mesh=make_mesh(cfg))
    weights = model.init_weights(
        jax.random.key(0, impl="rbg"), cfg, static["mesh"], float_type, INT8 if dtype == "int8" else None
    )

    def cache(rows: int, length: int) -> model.Cache:
        if rows not in caches:
            caches[rows] = model.init_cache(cfg, static["mesh"], rows, MAX_LEN, "float32")
        old = caches.pop(rows)  # will be donated
        lengths = jax.device_put(np.full(rows, length, np.int32), old.length.sharding)
        return dataclasses.replace(old, length=lengths)

    def prefill(prompts: list[list[int]]) -> None:
        rows, width, here = len(prompts), len(prompts[0]), cache(len(prompts), 0)
        text = np.zeros(here.tokens.shape, np.int32)
        text[:, :width] = prompts
        here = dataclasses.replace(here, tokens=jax.device_put(text, here.tokens.sharding))
        count = np.full(rows, width - 1, np.int32)
        _, caches[rows] = model.prefill(None, count, weights, here, width=width, **static)
        decode(rows, width - 1, 1)  # reads the last token and chooses the next

    def decode(rows: int, context: int, steps: int) -> None:
        here, count = cache(rows, context), np.ones(rows, np.int32)
        for _ in range(steps):
            output, here = model.decode_step(count, None, model.Sampling(), weights, here, **static)
            np.asarray(output.tokens)
        caches[rows] = here

    return prefill, decode


def transformers_library(fields: dict, dtype: str, threads: int, folder: str):
    """LlamaForCausalLM, with the attention and the cache that are its defaults."""
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(threads)
    llama = LlamaForCausalLM._from_config(LlamaConfig(**fields), dtype=getattr(torch, dtype)).eval()
    caches = {}

    @torch.inference_mode()
    def forward(tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        output = llama(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits.argmax(-1)

    def prefill(prompts: list[list[int]]) -> None:
        caches[len(prompts)] = DynamicCache(config=llama.config)
        forward(torch.tensor(prompts), caches[len(prompts)])

    def decode(rows: int, context: int, steps: int) -> None:
        cache, tokens = caches[rows], torch.ones((rows, 1), dtype=torch.long)
        cache.crop(context - cache.get_seq_length())
        for _ in range(steps):
            tokens = forward(tokens, cache)

    return prefill, decode


def llama_cpp_library(fields: dict, dtype: str, threads: int, folder: str):
    """llama.cpp by its C interface, with the attention and the float16 cache that are its defaults."""
    import llama_cpp as cpp
    import numpy as np

    file = pathlib.Path(folder) / f"{MODEL}-{fields['num_hidden_layers']}-{dtype}.gguf"
    if not file.exists():
        write_gguf(file, fields, dtype)
    options = cpp.llama_model_default_params()
    options.load_mode = cpp.llama_load_mode_from_str(b"none")  # its own memory, as the others'
    llama, contexts = cpp.llama_model_load_from_file(bytes(file), options), {}

    def context_of(rows: int):
        if rows not in contexts:
            options = cpp.llama_context_default_params()
            options.n_ctx, options.n_seq_max, options.n_batch = MAX_LEN * rows, rows, 512
            options.n_threads = options.n_threads_batch = threads
            contexts[rows] = cpp.llama_init_from_model(llama, options)
        return contexts[rows]

    def cut(rows: int, length: int) -> None:
        for row in range(rows):
            cpp.llama_memory_seq_rm(cpp.llama_get_memory(context_of(rows)), row, length, -1)

    def forward(rows: int, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """entries: token, position, row, and whether the next one is wanted."""
        batch, wanted = cpp.llama_batch_init(len(entries), 0, 1), sum(entry[3] for entry in entries)
        for i, entry in enumerate(entries):
            batch.token[i], batch.pos[i], batch.seq_id[i][0], batch.logits[i] = entry
            batch.n_seq_id[i] = 1
        batch.n_tokens = len(entries)
        if code := cpp.llama_decode(context_of(rows), batch):
            raise RuntimeError(f"llama_decode returns {code}")
        cpp.llama_batch_free(batch)
        logits = cpp.llama_get_logits(context_of(rows))
        return np.ctypeslib.as_array(logits, (wanted, fields["vocab_size"])).argmax(-1).tolist()

    def prefill(prompts: list[list[int]]) -> None:
        cut(len(prompts), 0)
        for row, prompt in enumerate(prompts):
            last = len(prompt) - 1
            forward(len(prompts), [(token, i, row, i == last) for i, token in enumerate(prompt)])

    def decode(rows: int, context: int, steps: int) -> None:
        cut(rows, context)
        tokens = [1] * rows
        for position in range(context, context + steps):
            tokens = forward(rows, [(token, position, row, True) for row, token in enumerate(tokens)])

    return prefill, decode


def write_gguf(file: pathlib.Path, fields: dict, dtype: str) -> None:
    """A model of random weights, the same in all layers, without a tokenizer."""
    import gguf
    import numpy as np

    D, F, V = (fields[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    N, K, H = (fields[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    kind, random = gguf.GGMLQuantizationType[dtype.upper()], np.random.default_rng(0)
    part = file.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
    numbers = dict(
        block_count=fields["num_hidden_layers"], context_length=fields["max_position_embeddings"],
        embedding_length=D, feed_forward_length=F, head_count=N, head_count_kv=K, rope_dimension_count=H,
        rope_freq_base=fields["rope_theta"], layer_norm_rms_eps=fields["rms_norm_eps"], vocab_size=V,
        tokenizer_model="none", file_type=gguf.LlamaFileType[f"MOSTLY_{dtype.upper()}"],
    )  # fmt: skip
    for name, value in numbers.items():
        getattr(writer, f"add_{name}")(value)

    def matrix(rows: int, columns: int) -> np.ndarray:
        blocks = [min(4096, rows - first) for first in range(0, rows, 4096)]  # bounds the memory
        normal = (random.standard_normal((n, columns), np.float32) * columns**-0.5 for n in blocks)
        return np.concatenate([gguf.quants.quantize(x, kind) for x in normal])

    layer = dict(attn_q=(N * H, D), attn_k=(K * H, D), attn_v=(K * H, D), attn_output=(D, N * H))
    layer |= dict(ffn_gate=(F, D), ffn_up=(F, D), ffn_down=(D, F))
    layer = {name: matrix(*shape) for name, shape in layer.items()}
    writer.add_tensor("token_embd.weight", matrix(V, D), raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(D, np.float32))
    for i in range(fields["num_hidden_layers"]):
        for name, x in layer.items():
            writer.add_tensor(f"blk.{i}.{name}.weight", x, raw_dtype=kind)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(D, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(file)


LIBRARIES = {
    "jax": (jax_library, ("jax", "jaxlib")),
    "transformers": (transformers_library, ("transformers", "torch")),
    "llama.cpp": (llama_cpp_library, ("llama_cpp_python",)),
}
CONTENDERS = (
    "jax-int8", "jax-bfloat16", "jax-float32", "transformers-float32", "transformers-bfloat16",
    "llama.cpp-q8_0", "llama.cpp-bf16",
)  # fmt: skip


def busy_seconds() -> float:
    """What all cores have worked since the machine started, and what the host has kept of them."""
    user, nice, system, _, _, irq, softirq, steal = map(int, open("/proc/stat").readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def work(job: dict) -> None:
    """A worker: prints a line of JSON when it is ready, and one for each line of stdin, a task's name."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints
    pathlib.Path("/proc/self/oom_score_adj").write_text("1000")  # without memory, this ends, not another
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job["threads"]])
    kind, _, dtype = job.pop("contender").rpartition("-")
    library, packages = LIBRARIES[kind]
    prefill, decode = library(dtype=dtype, **job)

    def do(task: Task, steps: int) -> None:
        if steps:
            decode(task.rows, task.context, steps)
        else:
            prefill([list(range(1000 + row, 1000 + row + task.context)) for row in range(task.rows)])

    for task in TASKS.values():  # compile, and fill the caches
        do(task, 0)
        do(task, min(task.steps, 2))
    versions = {name: importlib.metadata.version(name) for name in packages}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps(dict(python=platform.python_version(), **versions, peak_gib=peak)), file=answers)
    for line in sys.stdin:
        task = TASKS[line.strip()]
        began, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
        do(task, task.steps)
        seconds, own = time.perf_counter() - began, time.process_time() - own
        others = max(0.0, busy_seconds() - busy - own) / seconds
        rate = task.rows * (task.steps or task.context) / seconds
        print(json.dumps(dict(tokens_per_second=rate, cores_of_others=others)), file=answers)


@dataclasses.dataclass
class Worker:
    """A contender's process. log: its stderr."""

    name: str
    process: subprocess.Popen
    log: pathlib.Path

    def ask(self, task: str) -> dict:
        with contextlib.suppress(BrokenPipeError):  # it has ended: `answer` says why
            self.process.stdin.write(task + "\n")
            self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict:
        if (line := self.process.stdout.readline()).startswith("{"):
            return json.loads(line)
        reason = (self.log.read_text(errors="replace").strip() or "no message").split("\n")[-1]
        raise UserError(f"{self.name} ended with code {self.process.wait()}: {reason}")


def start(name: str, python: str, job: dict, stack: contextlib.ExitStack) -> Worker:
    """Start a contender, which ends with the stack."""
    log = pathlib.Path(job["folder"]) / f"{name}.log"
    command = [python, __file__, "--worker", json.dumps(job | dict(contender=name))]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    pipes = dict(
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stack.enter_context(log.open("w")),
    )
    process = stack.enter_context(subprocess.Popen(command, text=True, **pipes))
    stack.callback(process.kill)
    return Worker(name, process, log)


def compare(pythons: dict[str, str], args, folder: str) -> dict:
    """Time the contenders, {name: its python}. Returns what --json writes."""
    fields = MODELS[MODEL] | dict(rope_theta=500000.0)
    fields["num_hidden_layers"] = args.layers or fields["num_hidden_layers"]
    job, workers, versions = dict(fields=fields, threads=args.threads, folder=folder), [], {}
    memory = {}
    samples = {name: {task: [] for task in TASKS} for name in pythons}
    with contextlib.ExitStack() as stack:
        for name, python in pythons.items():  # not at once: making weights takes more memory than having them
            began = time.perf_counter()
            workers.append(start(name, python, job, stack))
            versions[name] = workers[-1].answer()
            memory[name], seconds = versions[name].pop("peak_gib"), time.perf_counter() - began
            print(f"{name}: ready after {seconds:.0f} s, peak {memory[name]:.1f} GiB", file=sys.stderr)
        for i in range(args.rounds):
            for task in TASKS:
                for worker in workers[:: -1 if i % 2 else 1]:
                    samples[worker.name][task].append(worker.ask(task))
            print(f"round {i + 1} of {args.rounds}", file=sys.stderr)
    names = [x.split(":")[1].strip() for x in open("/proc/cpuinfo") if x.startswith("model name")]
    return dict(
        model=MODEL, layers=fields["num_hidden_layers"], cpu=names[0] if names else platform.machine(),
        cores=os.cpu_count(), threads=args.threads, rounds=args.rounds, versions=versions, samples=samples,
        peak_gib=memory,
        date=datetime.date.today().isoformat(), tasks={name: vars(task) for name, task in TASKS.items()},
    )  # fmt: skip


def table(result: dict) -> str:
    """The result in Markdown. Of rows that decode together, tokens per second of all."""
    lines = [f"| tokens/s, median (least..most) | {' | '.join(TASKS)} |", "|---" * (len(TASKS) + 1) + "|"]
    others = []
    for name, tasks in result["samples"].items():
        cells = []
        for found in tasks.values():
            rates = [x["tokens_per_second"] for x in found]
            cells.append(f"{statistics.median(rates):.1f} ({min(rates):.1f}..{max(rates):.1f})")
            others += [x["cores_of_others"] for x in found]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    versions = sorted({f"{k} {v}" for found in result["versions"].values() for k, v in found.items()})
    facts = "{model}, {layers} layers; {cpu}, {threads} threads, {cores} cores; {rounds} rounds; {date}"
    busy = f"Other processes kept {statistics.median(others):.2f} cores busy, at most {max(others):.2f}."
    return "\n".join([*lines, "", f"{facts.format(**result)}; {', '.join(versions)}. {busy}"])


def parse_arguments(arguments: list[str] | None = None):
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add, default = parser.add_argument, ",".join(CONTENDERS[:-1])
    add("--contenders", default=default, metavar="A,B", help=f"default: {default}; also {CONTENDERS[-1]}")
    for name in ("transformers", "llama-cpp"):
        add(f"--{name}-python", default=sys.executable, metavar="FILE", help="default: this one")
    add("--rounds", type=int, default=5, metavar="N", help="default: 5")
    add("--threads", type=int, default=2, metavar="N", help="and cores, of each contender; default: 2")
    add("--layers", type=int, metavar="L", help="only the first L layers")
    add("--folder", metavar="DIR", help="where GGUF files and logs are kept; default: a temporary one")
    add("--json", metavar="FILE", help="write all measurements there")
    args = parser.parse_args(arguments)
    args.contenders = args.contenders.split(",")
    for name in set(args.contenders) - set(CONTENDERS):
        parser.error(f"--contenders: {name!r} is none of {', '.join(CONTENDERS)}")
    parser.check_positive(args, "rounds", "threads", "layers")
    return args


def main() -> None:
    args = parse_arguments()
    if not hasattr(os, "sched_setaffinity"):
        raise UserError("this comparison needs Linux, to give each contender the same cores")
    if args.threads > os.cpu_count():
        raise UserError(f"--threads {args.threads}: this machine has {os.cpu_count()} cores")
    if args.json:
        open(args.json, "a").close()  # a file that cannot be written is known before the measuring
    peers = {"transformers": args.transformers_python, "llama.cpp": args.llama_cpp_python}
    pythons = {name: peers.get(name.rpartition("-")[0], sys.executable) for name in args.contenders}
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(args.folder or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        result = compare(pythons, args, str(folder))
    print(table(result))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(sys.argv[2]))
    else:
        run(main)
