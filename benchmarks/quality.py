"""What does quantization cost? The error of each weight, and with --text how far the predictions move.

    python3 benchmarks/quality.py --checkpoint meta-llama/Llama-3.2-1B --quantize int4 --text wiki.test.raw

An error is ||q - w|| / ||w||, of a tensor or of one channel; a channel is all weights that contribute to one
output. max / rms is a channel's largest element over its root mean square. KL is KL(float || quantized) of
the next token, in nats, with activations of the same type in both models. The text is cut into windows, which
start with the token that the tokenizer puts before a text, and do not see one another.
"""

import collections
import dataclasses
import math
import os
import pathlib
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import results
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.loading import load
from checkpoints.names import FLOATS, named_infos
from conversation.text import load_tokenizer
from deployment import compilation_cache, placement
from deployment.deploy import ModelOptions, mesh_for
from deployment.job import Job
from feedback.errors import UserError
from feedback.progress import progress
from model import Config, Weights, forward
from quantize import FORMATS, Format
from sharding.arrays import ArrayInfo
from terminal import launch
from terminal.command_line import OneLineParser, run

CHANNELS = 3  # the worst channels of each tensor, which the report names


@partial(jax.jit, static_argnames="axes")
def channel_sums(w: Array, q: Array, axes: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """For each channel: the sum of squares of q - w, the sum of squares of w, and max|w|, float32."""
    w = w.astype(jnp.float32)
    return jnp.sum((q - w) ** 2, axes), jnp.sum(w**2, axes), jnp.max(jnp.abs(w), axes)


@partial(jax.jit, static_argnames="info")
def rounded(w: Array, info: ArrayInfo) -> Array:
    """A weight after it was quantized and dequantized, float32."""
    return info.quantization.decode(info.quantization.encode(w, info), info)


def weight_errors(exact: Checkpoint, format: Format, converted: Checkpoint | None = None) -> list[dict]:
    """The `summary` of each weight that the format quantizes; one slice of a weight is in memory at a time.

    converted: a checkpoint in this format, to take the quantized values from.
    """
    infos = [(name, info) for name, info in named_infos(exact.config, format=format) if info.quantization]
    total, found = sum(exact.sources[name].nbytes for name, _ in infos), []
    with progress("comparing weights", total, show=jax.process_index() == 0) as bar:
        for name, info in infos:
            sources = [exact.sources[name]]
            quantized, format = converted or exact, info.quantization
            sources += [quantized.sources[part] for part in quantized.stored(name, info) if part != name]
            nameless, parts = dataclasses.replace(info, stored=None), []
            for letter, _, (w, *stored) in sources[0].read_slices(sources, [x.layout for x in sources[1:]]):
                axis = channel_letters(info).upper().index(letter)  # a slice has whole channels
                q = format.decode(format.unpack(*stored, info), info) if stored else rounded(w, nameless)
                parts.append(jax.device_get(channel_sums(w, q, info.contracted_axes)))
            sums = (np.concatenate(part, axis).astype(float) for part in zip(*parts, strict=True))
            found.append(summary(name, info, *sums))
            bar.update(sources[0].nbytes)
    return found


def channel_letters(info: ArrayInfo) -> str:
    return "".join(letter for letter in info.letters if letter not in info.contracted)


def summary(name: str, info: ArrayInfo, error: np.ndarray, square: np.ndarray, largest: np.ndarray) -> dict:
    """A weight's error and its worst channels, from `channel_sums`; a channel of zeros has the error 0.

    Raises UserError if the weight is not finite, or if the quantized values cannot be this weight's.
    """
    if not np.isfinite(error + square).all():
        raise UserError(f"{name}: holds NaN or Inf, or elements whose squares are too large")
    if error[square == 0].any():
        raise UserError(
            f"{name}: {info.quantization} is not zero where the float model is; is it of the same model?"
        )
    divisor = np.where(square > 0, square, 1)
    errors = np.sqrt(error / divisor)
    peaks = largest / np.sqrt(divisor / math.prod(info.shape[axis] for axis in info.contracted_axes))

    def channel(i: int) -> dict:
        index = zip(channel_letters(info), np.unravel_index(i, errors.shape), strict=True)
        where = " ".join(f"{letter}{place}" for letter, place in index)
        return dict(channel=where, error=float(errors.flat[i]), max_over_rms=float(peaks.flat[i]))

    worst = np.argsort(-errors, axis=None, kind="stable")[:CHANNELS]
    return dict(
        name=name, letters=info.letters, channels_of=channel_letters(info), max_over_rms=float(peaks.max()),
        error=math.sqrt(error.sum() / (square.sum() or 1)), channels=[channel(i) for i in worst],
    )  # fmt: skip


def read_text(file: str) -> str:
    """The file's text. Raises UserError if the file is not UTF-8 or has only white space."""
    try:
        text = pathlib.Path(os.path.expanduser(file)).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"--text {file}: not a UTF-8 text file") from None
    if not text.strip():
        raise UserError(f"--text {file}: no text in it")
    return text


def windows(tokenizer, text: str, length: int, rows: int, cfg: Config) -> np.ndarray:
    """Windows of the text, [N,T+1] int32: T inputs and the token after each, -1 where the text has ended.

    N is a multiple of `rows`; T is `length`, or less for a short text. Raises UserError for a text of less
    than two tokens.
    """
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if len(ids) < 2:
        raise UserError(f"--text: {len(ids)} token is too little, at least 2 are needed")
    if max(ids) >= cfg.V:
        raise UserError(f"--text: the tokenizer makes token {max(ids)}, config.json has {cfg.V}")
    begin = np.array(tokenizer("").input_ids[:1], np.int32)
    step = min(length + 1 - len(begin), len(ids))
    tokens = np.full((-(-len(ids) // (step * rows)) * rows, step), -1, np.int32)
    tokens.flat[: len(ids)] = ids
    return np.hstack([np.tile(begin, (len(tokens), 1)), tokens])


@jax.jit
def divergence(exact: Array, other: Array, targets: Array) -> tuple[Array, Array, Array, Array]:
    """For each position: KL(exact || other), whether both have the same top-1 token, -log p(target) of both.

    exact, other: logits [B,T,V] float32. targets: [B,T]. Each result: [B,T], in nats.
    """
    log_p, log_q = jax.nn.log_softmax(exact), jax.nn.log_softmax(other)
    p, ratio = jnp.exp(log_p), log_q - log_p
    # The sum of -p ratio and of q - p, which is 0: so no term is negative, and small ones survive float32.
    terms = jnp.where(ratio < 1, p * (jnp.expm1(ratio) - ratio), jnp.exp(log_q) - p - p * ratio)
    losses = (-jnp.take_along_axis(x, targets[..., None], -1)[..., 0] for x in (log_p, log_q))
    return jnp.sum(terms, -1), jnp.argmax(exact, -1) == jnp.argmax(other, -1), *losses


def compare(exact: Weights, other: Weights, tokens: np.ndarray, cfg: Config, mesh: Mesh) -> dict:
    """How far the predictions of `other` are from those of `exact`, on the tokens of `windows`.

    Raises UserError if a model computes NaN.
    """
    total, found = int((tokens[:, 1:] >= 0).sum()), []
    with progress("comparing predictions", total, show=jax.process_index() == 0) as bar:
        bar.unit = " tokens"
        for rows in np.split(tokens, len(tokens) // mesh.shape["data"]):
            inputs, targets = np.maximum(rows[:, :-1], 0), rows[:, 1:]
            logits = [forward(inputs, weights, cfg=cfg, mesh=mesh) for weights in (exact, other)]
            measured = multihost_utils.process_allgather(divergence(*logits, targets), tiled=True)
            found.append([x[targets >= 0] for x in measured])
            bar.update(len(found[-1][0]))
    kl, same, *losses = (np.concatenate(x).astype(float) for x in zip(*found, strict=True))
    if not np.isfinite(kl).all():
        raise UserError("the model computes NaN: its weights are damaged, or overflow this --dtype")
    kl_of = dict(mean=kl.mean(), median=np.median(kl), percentile_99=np.percentile(kl, 99), max=kl.max())
    return dict(
        tokens=total, window=tokens.shape[1] - 1, kl={name: float(x) for name, x in kl_of.items()},
        top_1=float(same.mean()), perplexity=[float(np.exp(loss.mean())) for loss in losses],
    )  # fmt: skip


def report(result: dict, top: int) -> str:
    """The result as Markdown: kinds of weights, the `top` worst tensors, predictions if any, and how."""
    kinds, rows = collections.defaultdict(list), []
    for x in result["weights"]:
        kinds[re.sub(r"^layers\.\d+\.", "", x["name"]), f"{x['letters']}, {x['channels_of']}"].append(x)
    for kind, found in kinds.items():
        errors, channels = [x["error"] for x in found], [x["channels"][0]["error"] for x in found]
        figures = [f"{x:.2%}" for x in (np.mean(errors), max(errors), max(channels))]
        rows.append([*kind, str(len(found)), *figures, f"{max(x['max_over_rms'] for x in found):.1f}"])
    head = ["weight", "letters, of a channel", "tensors", "mean error", "worst", "worst channel", "max / rms"]
    parts, rows = [results.table(head, rows)], []
    for x in sorted(result["weights"], key=lambda x: -x["error"])[:top]:
        channels = ["{channel}: {error:.2%}, {max_over_rms:.1f}".format(**y) for y in x["channels"]]
        rows.append([x["name"], f"{x['error']:.2%}", "; ".join(channels)])
    parts.append(results.table(["worst tensors", "error", "worst channels: error, max / rms"], rows))
    how = "{model}, {format} {how}; {dtype} activations; jax {versions[jax]} on {device}; {date}."
    how = how.format(**result)
    if text := result["text"]:
        head = ["tokens", "mean KL, nats", "median", "99%", "max", "same top-1", "perplexity"]
        head.append(f"with {result['format']}")
        kl, perplexity = (f"{x:.2e}" for x in text["kl"].values()), (f"{x:,.4f}" for x in text["perplexity"])
        row = [f"{text['tokens']:,}", *kl, f"{text['top_1']:.2%}", *perplexity]
        parts.append(results.table(head, [row]))
        how += f" Text: {text['file']}, in windows of {text['window']}."
    else:
        how += " No --text: predictions are not compared."
    return "\n\n".join([*parts, how])


def parse_arguments(arguments: list[str] | None = None):
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR_OR_ID", help="the float model, as for main.py")
    add("--quantize", choices=list(FORMATS)[1:], default="int8", help="default: int8")
    add("--converted", metavar="DIR", help="the same model, converted; default: quantize the float weights")
    add("--text", metavar="FILE", help="UTF-8 text to compare predictions on; default: compare weights only")
    add("--window", type=int, default=512, metavar="N", help="tokens of a window, at most; default: 512")
    add("--dtype", choices=FLOATS, help="of activations; default: as for main.py and float weights")
    for name in ("dp", "ep", "tp"):
        add(f"--{name}", type=int, metavar="N", help="as for main.py")
    add("--top", type=int, default=5, metavar="N", help="worst tensors to show; default: 5")
    add("--json", metavar="FILE", help="write all measurements there")
    args = parser.parse_args(arguments)
    parser.check_positive(args, "window", "dp", "ep", "tp", "top")
    return args


def open_both(ours: str, theirs: str | None, format: Format) -> tuple[Checkpoint, Checkpoint | None]:
    """Open the float model and its converted form, if given. Raises UserError if they are something else."""
    exact, converted = open_checkpoint(ours), open_checkpoint(theirs) if theirs is not None else None
    if exact.format:
        raise UserError(f"--checkpoint {ours}: its weights are {exact.format}; give the float model")
    if converted and converted.format != format:
        raise UserError(f"--converted {theirs}: its weights are not {format}, see --quantize")
    if converted and converted.config != exact.config:
        raise UserError(f"--converted {theirs}: another model, its config.json is not that of {ours}")
    return exact, converted


def main() -> None:
    args = parse_arguments()
    text = read_text(args.text) if args.text is not None else None
    results.check_writable(args.json)
    compilation_cache.enable_compilation_cache()
    launch.join_hosts(args)
    format = FORMATS[args.quantize]
    exact, converted = open_both(args.checkpoint, args.converted, format)
    cfg, show = exact.config, jax.process_index() == 0
    dtype, kv_dtype = placement.choose_dtypes(args.dtype, None, None)
    options = ModelOptions(args.checkpoint, dp=args.dp, ep=args.ep, tp=args.tp)
    job = Job(cfg, 1, min(args.window, cfg.max_positions), None, kv_dtype, dtype)
    mesh = mesh_for(options, launch.device_count(), job, launch.log)
    placement.set_precision(dtype)
    if text:
        length = min(args.window, cfg.max_positions)
        tokens = windows(load_tokenizer(exact.folder), text, length, mesh.shape["data"], cfg)
    result = dict(
        model=args.checkpoint, format=args.quantize, how=args.converted or "rounded on load", dtype=dtype,
        device=jax.devices()[0].device_kind, **results.versions_and_date(),
        weights=weight_errors(exact, format, converted), text=None,
    )  # fmt: skip
    if text:
        try:
            weights = load(exact, mesh, dtype, None, show)
            quantized = load(converted or exact, mesh, dtype, format, show)
            result["text"] = dict(file=args.text) | compare(weights, quantized, tokens, cfg, mesh)
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e):
                raise
            raise UserError("out of device memory: a smaller --window or more devices may help") from e
    if show:
        print(report(result, args.top))
        results.write(result, args.json)


if __name__ == "__main__":
    run(main)
