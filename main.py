"""Generate text: python3 main.py [--checkpoint DIR_OR_ID] [--prompt TEXT]...

With no arguments, a tiny model that ships with this repository answers three prompts. On several hosts, run
the same command on each: they find one another, and the first one prints.
"""
# ruff: noqa: E402  an interrupt is heard before the imports that take long

import command_line

if __name__ == "__main__":
    command_line.hear_interrupts()

import dataclasses
import json
import math
import os
import pathlib
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import model
from checkpoint import TYPES, Checkpoint, load, open_checkpoint, read_json
from command_line import OneLineParser, run
from model import Config, Sampling

TINY = pathlib.Path(__file__).resolve().parent / "tests" / "checkpoints" / "tiny-llama3"
PROMPTS = (
    "Tell me your name",
    "What is the weather like expressed in long prose in Old English",
    "Do you like ice cream, be extremely precise",
)
NEW_TOKENS = 256  # unless --max-new-tokens or the room that is left say otherwise

# Memory bandwidth of one jax device (of a TPU7x chip there are two), bytes per second, by jax's device_kind,
# from the vendors' data sheets.
BANDWIDTH = {
    "TPU v4": 1.228e12, "TPU v5 lite": 0.819e12, "TPU v5": 2.765e12, "TPU v5p": 2.765e12,
    "TPU v6 lite": 1.638e12, "TPU7x": 3.69e12, "NVIDIA A100-SXM4-40GB": 1.555e12,
    "NVIDIA A100-SXM4-80GB": 2.039e12, "NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA H200": 4.8e12,
}  # fmt: skip


def parse_arguments(arguments: list[str] | None = None):
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add(
        "--checkpoint",
        default=str(TINY),
        metavar="DIR_OR_ID",
        help="a converted or Hugging Face folder, or a hub id",
    )
    add("--prompt", action="append", metavar="TEXT", help="may be given many times")
    add("--prompt-file", metavar="FILE", help="one prompt per line")
    add(
        "--no-chat-template",
        action="store_true",
        help="continue the text, even if the tokenizer has a chat template",
    )
    add(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help=f"per prompt; default: {NEW_TOKENS}, or what --max-len allows",
    )
    add(
        "--max-len",
        type=int,
        metavar="N",
        help="positions per row, prompt included; default: as many as needed",
    )
    add("--dp", type=int, metavar="N", help="data parallelism; default: what --ep and --tp leave")
    add("--ep", type=int, metavar="N", help="expert parallelism; default: 1")
    add("--tp", type=int, metavar="N", help="tensor parallelism; default: what --dp and --ep leave")
    add(
        "--dtype",
        choices=tuple(TYPES),
        help="default: float32 on a CPU, unless the weights are int8; else bfloat16",
    )
    add("--quantize", choices=("int8", "none"), help="the weights; default: as in the checkpoint")
    add(
        "--kv-cache-dtype",
        choices=("int8", "bfloat16", "float32"),
        help="default: float32 on a CPU, else --dtype",
    )
    add(
        "--temperature",
        type=float,
        metavar="T",
        help="0: greedy; default: the checkpoint's, or 1 with --top-*",
    )
    add(
        "--top-k", type=int, metavar="K", help="sample from the K likeliest tokens; default: the checkpoint's"
    )
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the likeliest tokens that hold P of the probability",
    )
    add("--seed", type=int, default=0, metavar="S", help="of the sampling; default: 0")
    add("--ignore-eos", action="store_true", help="go on after an end-of-text token")
    add("--logprobs", action="store_true", help="report the log-probability of every token, the prompt's too")
    add("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)
    parser.check_positive(args, "max_new_tokens", "max_len", "dp", "ep", "tp")
    if not 0 <= args.seed < 2**32:
        parser.error(f"--seed {args.seed} is not between 0 and {2**32 - 1}")
    return args


def log(*message) -> None:
    if jax.process_index() == 0:
        print(*message, file=sys.stderr, flush=True)


def keep_compiled() -> None:
    """Let jax keep what it compiles in a folder of the user's, unless JAX_COMPILATION_CACHE_DIR names one."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    settings = {
        "jax_compilation_cache_dir": os.path.join(caches, "llama-jax"),
        "jax_persistent_cache_min_compile_time_secs": 0,
    }
    for name, value in settings.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    warnings.filterwarnings("ignore", message=".*persistent compilation cache", category=UserWarning)


LAPS: dict[str, float] = {}  # seconds of CPU time, by what they went to


def lap(what: str) -> None:
    """Charge the CPU time since the last lap, or since this program began, to `what`."""
    LAPS[what] = LAPS.get(what, 0) + time.process_time() - sum(LAPS.values())


def join_hosts() -> None:
    """Join the other hosts of a TPU pod, a cluster job, or the JAX_* variables below; alone, do nothing."""
    names = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
    given = {argument: os.environ[name] for argument, name in names.items() if name in os.environ}
    try:
        jax.distributed.initialize(**{argument: int(value) for argument, value in given.items()})
    except (ValueError, IndexError, RuntimeError) as e:
        if "coordinator_address" in str(e) and not given:  # jax's way to say that there are no others
            return
        variables = "JAX_COORDINATOR_ADDRESS (HOST:PORT), JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        raise ValueError(f"could not join other hosts ({e}); check {variables}") from None
    # Gloo, which joins CPU processes, writes to file descriptor 1; keep the user's stdout for answers.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def device_count() -> int:
    try:
        return jax.device_count()
    except Exception as e:  # RuntimeError and AssertionError, among others
        reason = str(e).strip().split("\n")[0]
        raise ValueError(f"jax found no devices ({reason}); check JAX_PLATFORMS and XLA_FLAGS") from None


def choose_mesh(cfg: Config, dp: int | None, ep: int | None, tp: int | None, n_devices: int) -> Mesh:
    """The mesh of all devices: of the degrees that the user fixed, else as tensor parallel as possible.

    Raises ValueError if no degrees fit the devices and the model.
    """
    given = [f"--{name} {n}" for name, n in (("dp", dp), ("ep", ep), ("tp", tp)) if n]
    asked, ep = " ".join(given) or "the default mesh", ep or 1
    degrees = [(n_devices // (ep * t), ep, t) for t in range(n_devices, 0, -1) if n_devices % (ep * t) == 0]
    degrees = [(d, e, t) for d, e, t in degrees if dp in (None, d) and tp in (None, t)]
    reasons = ["--dp x --ep x --tp must be the number of devices"]
    for degree in degrees:
        try:
            return model.make_mesh(cfg, *degree)
        except ValueError as e:
            reasons.append(str(e))
    raise ValueError(f"{asked} on {n_devices} devices: {reasons[-1]}")


def read_prompts(args) -> list[str]:
    """The prompts of the command line, then the file's, else the default ones. None may be empty."""
    prompts = [(f"--prompt {prompt!r}", prompt) for prompt in args.prompt or ()]
    if args.prompt_file is not None:
        name = f"--prompt-file {args.prompt_file}"
        try:
            text = pathlib.Path(os.path.expanduser(args.prompt_file)).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise ValueError(f"{name}: not a UTF-8 text file") from None
        if not text.strip():
            raise ValueError(f"{name}: no prompt in it")
        lines = text.rstrip().split("\n")
        prompts += [(f"{name}, line {number}", line) for number, line in enumerate(lines, 1)]
    for where, prompt in prompts:
        if not prompt.strip():
            raise ValueError(f"{where}: an empty prompt")
        if not prompt.isprintable() and any("\ud800" <= c <= "\udfff" for c in prompt):
            raise ValueError(f"{where}: not valid text in this terminal's encoding")
    return [prompt for _, prompt in prompts] or list(PROMPTS)


def encode(tokenizer, prompts: list[str], chat: bool, cfg: Config) -> list[list[int]]:
    """Token ids of each prompt, as a user's turn if `chat`."""

    def ids(prompt: str) -> list[int]:
        if not chat:
            return tokenizer(prompt).input_ids
        turn = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)

    try:
        encoded = [ids(prompt) for prompt in prompts]
    except Exception as e:  # a chat template is a program of the checkpoint's, and may raise anything
        raise ValueError(f"the checkpoint's tokenizer or chat template failed: {e}") from None
    for prompt, row in zip(prompts, encoded, strict=True):
        if not row or max(row) >= cfg.V:
            raise ValueError(
                f"the checkpoint's tokenizer makes {row} of {prompt!r}; config.json has {cfg.V} tokens"
            )
    return encoded


def choose_quantized(asked: str | None, checkpoint: Checkpoint) -> bool:
    """Whether to hold int8 weights: as asked, else as the checkpoint does. ValueError if that cannot be."""
    if asked == "none" and checkpoint.quantized:
        where = checkpoint.folder
        raise ValueError(f"--quantize none: the weights in {where} are int8; use the original model")
    return checkpoint.quantized or asked == "int8"


def choose_dtypes(dtype: str | None, kv_dtype: str | None, quantized: bool) -> tuple[str, str]:
    """The types of activations and cache that the user asked for, or else those that are fast here."""
    on_cpu = jax.default_backend() == "cpu"
    dtype = dtype or ("float32" if on_cpu and not quantized else "bfloat16")
    if dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")  # else TPUs and GPUs round the factors
    return dtype, kv_dtype or ("float32" if on_cpu else dtype)


def plan_lengths(
    encoded: list[list[int]], max_new: int | None, max_len: int | None, cfg: Config
) -> tuple[list[int], int]:
    """(new tokens of each row, positions per row). Raises ValueError if a row exceeds a limit."""
    limit, why = cfg.max_positions, "the model's limit"
    if max_len is not None:
        if max_len > limit:
            raise ValueError(f"--max-len {max_len}: the model's limit is {limit} positions")
        limit, why = max_len, "--max-len"
    new = [max_new or min(NEW_TOKENS, max(limit - len(row), 1)) for row in encoded]
    ends = [len(row) + n for row, n in zip(encoded, new, strict=True)]
    longest = max(range(len(ends)), key=ends.__getitem__)
    if ends[longest] > limit:
        what = f"{len(encoded[longest])} tokens, which with {new[longest]} new ones exceed {why} of {limit}"
        raise ValueError(f"prompt {longest + 1} has {what}")
    return new, max_len or min(limit, -(-max(ends) // 128) * 128)  # few sizes to compile for


def stop_tokens(folder: pathlib.Path, tokenizer) -> frozenset[int]:
    """The ids that end an answer: generation_config.json's, else config.json's, else the tokenizer's."""
    config = read_json(folder / "config.json")
    for source in (_generation_config(folder), config, config.get("text_config") or {}):
        ids = source.get("eos_token_id")
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(isinstance(i, int) and 0 <= i < 2**31 for i in ids):
                raise ValueError(
                    f"{folder}: eos_token_id = {ids!r} in its configuration is no list of tokens"
                )
            return frozenset(ids)
    return frozenset() if tokenizer.eos_token_id is None else frozenset([tokenizer.eos_token_id])


def _generation_config(folder: pathlib.Path) -> dict:
    file = folder / "generation_config.json"
    return read_json(file) if file.exists() else {}


def choose_sampling(args, folder: pathlib.Path) -> Sampling:
    """What the user asked for; for the rest, what generation_config.json does; greedy if neither samples."""
    theirs = _generation_config(folder)
    if theirs.get("do_sample") is not True:
        theirs = {"temperature": 0.0 if args.top_k is None and args.top_p is None else 1.0}
    asked = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
    given = {name: theirs.get(name) if value is None else value for name, value in asked.items()}
    if given["temperature"] is None:
        given["temperature"] = 1.0
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if not isinstance(value, int if name == "top_k" else (int, float)):
            raise ValueError(f"{folder / 'generation_config.json'}: {name} = {value!r} is no number")
    return Sampling(**given)


@dataclasses.dataclass
class Generation:
    """What came of a batch.

    tokens, logprobs: per row, up to and including a stop token.
    prompt_logprobs: [B,T] of each prompt token after the first, or None.
    decode_rate: tokens per second after the first, of the whole batch.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    prompt_logprobs: np.ndarray | None
    prefill_seconds: float
    decode_rate: float | None
    decode_steps_per_second: float | None


def fetch(x) -> np.ndarray:
    """A device array's values, on every host."""
    here = x.is_fully_addressable or x.is_fully_replicated
    return np.asarray(x if here else multihost_utils.process_allgather(x, tiled=True))


def generate(
    weights: model.Weights,
    encoded: list[list[int]],
    cfg: Config,
    mesh: Mesh,
    new: int | list[int],
    max_len: int,
    kv_dtype: str,
    sampling: Sampling,
    seed: int = 0,
    stop: frozenset[int] = frozenset(),
    score: bool = False,
) -> Generation:
    """Continue each prompt (token ids) by up to `new` tokens (of all, or of each row), or to a stop token."""
    n = len(encoded)
    rows = encoded + [[0]] * (-n % mesh.shape["data"])  # every data shard has the same number of rows
    prompt = model.pieces(rows, score)
    seeds = np.full(len(rows), seed, np.uint32)  # a prompt's answer does not depend on its place in the batch
    limits = np.zeros(len(rows), int)
    limits[:n] = new
    static = dict(sampling=sampling, cfg=cfg, mesh=mesh)
    cache = model.init_cache(cfg, mesh, len(rows), max_len, kv_dtype)
    active = np.arange(len(rows)) < n

    began = time.perf_counter()
    for piece in {piece.tokens.shape: piece for piece in prompt}.values():
        model.step.lower(piece, seeds, weights, cache, **static).compile()
    if limits.max() > 1:
        token = jax.device_put(np.zeros((len(rows), 1), np.int32), NamedSharding(mesh, P("data")))
        next_token = model.Piece(tokens=token, count=active.astype(np.int32))
        model.step.lower(next_token, seeds, weights, cache, **static).compile()
    log(f"compiled in {time.perf_counter() - began:.1f} s")
    lap("compilation")

    began = time.perf_counter()
    output, cache = model.prefill(prompt, seeds, weights, cache, **static)
    fetch(output.tokens)
    prefill_seconds = time.perf_counter() - began
    lap("prefill")

    tokens, logprobs = [[] for _ in encoded], [[] for _ in encoded]
    prompt_logprobs = fetch(output.scores) if score else None
    began, steps = time.perf_counter(), 0
    for i in range(limits.max()):
        # The next step is under way before this one's tokens are looked at: the device does not wait for the
        # host, and a row that has just stopped takes that one step in vain.
        here = output
        if i + 1 < limits.max():
            output, cache = model.decode_step(output.tokens, active, seeds, weights, cache, **static)
            steps += 1
        chosen, chosen_logprobs = fetch(here.tokens)[:, 0], fetch(here.logprobs)
        if chosen[active].max() >= cfg.V:  # no token is the likeliest
            raise ValueError("the model computes NaN: its weights are damaged, or overflow this --dtype")
        for row in np.flatnonzero(active):
            tokens[row].append(int(chosen[row]))
            logprobs[row].append(float(chosen_logprobs[row]))
        active = active & ~np.isin(chosen, list(stop)) & (i + 1 < limits)
        if not active.any():
            break
    seconds = time.perf_counter() - began
    made = sum(map(len, tokens)) - n
    return Generation(
        tokens, logprobs, prompt_logprobs, prefill_seconds,
        made / seconds if made else None, steps / seconds if steps else None,
    )  # fmt: skip


def shard_bytes(tree) -> int:
    """Bytes that each device holds of a tree of arrays, or of their abstract shapes."""
    shards = ((x.sharding.shard_shape(x.shape), x.dtype.itemsize) for x in jax.tree.leaves(tree))
    return sum(math.prod(shape) * itemsize for shape, itemsize in shards)


def device_memory() -> int:
    """Bytes of memory per device; those on a CPU share the host's."""
    stats = jax.local_devices()[0].memory_stats() or {}
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    return stats.get("bytes_limit", host)


def check_fit(cfg, mesh: Mesh, dtype: str, quantized: bool, rows: int, max_len: int, kv_dtype: str) -> None:
    """Raise ValueError if weights and cache alone exceed a device's memory; temporaries are not counted."""
    rows += -rows % mesh.shape["data"]
    weights = shard_bytes(model.abstract(model.weight_infos(cfg), mesh, jnp.dtype(dtype), quantized))
    cache = shard_bytes(model.abstract(model.cache_infos(cfg, rows, max_len, jnp.dtype(kv_dtype)), mesh))
    have = device_memory()
    if weights + cache <= have:
        return
    if weights > cache:  # remedies for the larger of the two
        remedies = ["--quantize int8"] * (not quantized)
    else:
        remedies = ["--kv-cache-dtype int8"] * (kv_dtype != "int8")
        remedies += ["fewer prompts"] * (rows > mesh.shape["data"]) + ["a smaller --max-len"]
    remedies += ["more devices"]
    weights, cache, have = (f"{size / 2**30:.2f} GiB" for size in (weights, cache, have))
    needs = (
        f"each device needs {weights} for weights and {cache} for its share of {rows} x {max_len} positions"
    )
    raise ValueError(f"does not fit: {needs}, and has {have}; try {', '.join(remedies)}")


def bytes_per_step(weights, cfg: Config, mesh: Mesh, batch: int, mean_length: float, kv_dtype: str) -> float:
    """Bytes that one device must read for a decode step: the weights in use and the filled cache slots.

    batch: rows on one data shard. mean_length: filled positions per row.
    """
    scale_bytes = 2 / cfg.H if kv_dtype == "int8" else 0  # one bfloat16 per key or value
    kv_bytes = jnp.dtype(kv_dtype).itemsize + scale_bytes
    total = shard_bytes((weights.norm, weights.embed if cfg.tied_embeddings else weights.unembed))
    for layer, kind in zip(weights.layers, cfg.layers, strict=True):
        total += shard_bytes(layer)
        if kind.moe:  # batch tokens leave E (1 - A/E)^batch experts alone, on average
            routed = layer.feed_forward
            total -= shard_bytes((routed.gate, routed.up, routed.down)) * (1 - cfg.A / cfg.E) ** batch
        slots = min(mean_length, kind.chunk or math.inf)
        total += batch * slots * 2 * cfg.K * cfg.H * kv_bytes / model.mesh_size(mesh, model.MODEL)
    return total


def load_tokenizer(folder: pathlib.Path):
    """The folder's tokenizer. Not AutoTokenizer, which also reads config.json and refuses Scout's."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it advises, on import, to install PyTorch
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as e:  # it raises many kinds, for one reason: files that are not a tokenizer's
        raise ValueError(f"{folder}: no tokenizer could be loaded from its tokenizer.json ({e})") from None


def main() -> None:
    args = parse_arguments()
    prompts = read_prompts(args)
    lap("imports")
    keep_compiled()
    join_hosts()
    checkpoint = open_checkpoint(args.checkpoint)
    cfg, folder = checkpoint.config, checkpoint.folder
    sampling = choose_sampling(args, folder)
    mesh = choose_mesh(cfg, args.dp, args.ep, args.tp, device_count())
    tokenizer = load_tokenizer(folder)
    encoded = encode(tokenizer, prompts, bool(tokenizer.chat_template) and not args.no_chat_template, cfg)
    stop = frozenset() if args.ignore_eos else stop_tokens(folder, tokenizer)
    new, max_len = plan_lengths(encoded, args.max_new_tokens, args.max_len, cfg)
    lap("tokenizer")

    quantized = choose_quantized(args.quantize, checkpoint)
    dtype, kv_dtype = choose_dtypes(args.dtype, args.kv_cache_dtype, quantized)
    check_fit(cfg, mesh, dtype, quantized, len(prompts), max_len, kv_dtype)
    try:
        weights = load(checkpoint, mesh, dtype, quantized, show=jax.process_index() == 0)
        lap("weights")
        result = generate(
            weights, encoded, cfg, mesh, new, max_len, kv_dtype, sampling, args.seed, stop, args.logprobs
        )  # fmt: skip
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        raise ValueError(
            "out of device memory: try fewer prompts, a smaller --max-len, --quantize int8 or more devices"
        ) from e
    if jax.process_index() == 0:
        report(args, cfg, mesh, weights, prompts, encoded, result, tokenizer, stop, kv_dtype)


def report(args, cfg, mesh, weights, prompts, encoded, result: Generation, tokenizer, stop, kv_dtype) -> None:
    """Print the answers on stdout: text, or with --json one object."""
    texts = [
        tokenizer.decode([t for t in row if t not in stop], skip_special_tokens=True) for row in result.tokens
    ]
    filled = [len(prompt) + len(row) / 2 for prompt, row in zip(encoded, result.tokens, strict=True)]
    bandwidth, steps = BANDWIDTH.get(jax.devices()[0].device_kind), result.decode_steps_per_second
    utilization = None
    if bandwidth and steps:
        per_device = -(-len(prompts) // mesh.shape["data"])
        needed = bytes_per_step(weights, cfg, mesh, per_device, sum(filled) / len(filled), kv_dtype)
        utilization = needed * steps / bandwidth
    rate = result.decode_rate
    split = ", ".join(f"{what} {seconds:.1f}" for what, seconds in LAPS.items())
    log(f"first token after {sum(LAPS.values()):.1f} s of CPU time: {split}")
    log(
        f"prefill {result.prefill_seconds:.3f} s, decode {f'{rate:.1f} tokens/s' if rate else 'not needed'}"
        + (f", {100 * utilization:.0f}% of the memory bandwidth" if utilization else "")
    )
    if not args.json:
        for prompt, text in zip(prompts, texts, strict=True):
            print(f"> {prompt}\n{text}\n")
        if args.logprobs:
            print("For log-probabilities by token, use --json. Of each answer as a whole:")
            print(" ".join(f"{sum(row):.4f}" for row in result.logprobs))
        return
    responses = []
    for i, prompt in enumerate(prompts):
        tokens = result.tokens[i]
        response = dict(prompt=prompt, prompt_tokens=encoded[i])
        if args.logprobs:
            scores = result.prompt_logprobs[i][: len(encoded[i]) - 1]
            response |= dict(prompt_logprobs=[None, *map(float, scores)], logprobs=result.logprobs[i])
        reason = "stop" if tokens[-1] in stop else "length"
        responses.append(response | dict(tokens=tokens, text=texts[i], finish_reason=reason))
    shape = {name: model.mesh_size(mesh, axes) for name, axes in
             (("data", "data"), ("expert", model.EXPERT), ("tensor", model.TENSOR))}  # fmt: skip
    print(json.dumps(dict(
        model=args.checkpoint, mesh=shape, devices=jax.device_count(), responses=responses,
        startup_cpu_seconds=LAPS, prefill_seconds=result.prefill_seconds, decode_tokens_per_second=rate,
        bandwidth_utilization=utilization,
    )))  # fmt: skip


if __name__ == "__main__":
    run(main)
