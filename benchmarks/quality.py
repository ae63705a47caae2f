"""What do weights of few bits cost? The error of each, and with --text that of the predictions.

    python3 benchmarks/quality.py --checkpoint meta-llama/Llama-3.2-1B --quantize int4 --text wiki.test.raw

An error is ||q - w|| / ||w||, of a tensor or of one channel: of all that contributes to one output. max / rms
is a channel's largest element over its root mean square. KL is KL(float || quantised) of the next token, in
nats, with activations of the same type in both. The text is cut into windows; each begins as the tokenizer
begins a text, and sees nothing of those before.
"""
# ruff: noqa: E402  the folder must be on the path first

import collections
import dataclasses
import datetime
import json
import math
import os
import pathlib
import re
import sys
from functools import partial

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import model
from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.errors import UserError
from checkpoints.loading import load
from checkpoints.names import FLOATS, named_infos
from checkpoints.progress import progress
from model import Config, Weights, forward
from quantize import (
    FORMATS,
    Format,
    PerGroup,
    contracted_axes,
    dequantize_groups,
    join_groups,
    quantize_groups,
    split_groups,
)
from serving import placement
from serving.text import load_tokenizer
from sharding.arrays import ArrayInfo
from terminal import launch
from terminal.command_line import OneLineParser, run

ROUNDINGS = {
    "searched": "rounded on load",
    "nearest": "rounded to the nearest",
    "rotated": "rotated, rounded and rotated back",
}
CHANNELS = 3  # the worst of each tensor, to be named

# ---------------------------------------------------------------------------------------------------- weights


@partial(jax.jit, static_argnames="axes")
def channel_sums(w: Array, q: Array, axes: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Of each channel: the sum of squares of q - w, that of w, and max|w|, float32."""
    w = w.astype(jnp.float32)
    return jnp.sum((q - w) ** 2, axes), jnp.sum(w**2, axes), jnp.max(jnp.abs(w), axes)


@partial(jax.jit, static_argnames=("info", "rounding"))
def rounded(w: Array, info: ArrayInfo, rounding: str = "searched") -> Array:
    """What a weight becomes in its format, float32. Only int4 is rounded in other ways than "searched"."""
    format = info.quantization
    if rounding == "searched" or not isinstance(format, PerGroup):
        return format.decode(format.encode(w, info), info)
    if rounding == "nearest":
        return format.decode(format.encode(w, info, searched=False), info)
    (axes, leading), group_size = contracted_axes(info), format.group_size
    x, at = split_groups(w.astype(jnp.float32), axes, group_size, leading), leading + len(axes)
    turn = jnp.asarray(hadamard(group_size))
    x = jnp.moveaxis(jnp.tensordot(x, turn, (at, 0)), -1, at)
    x = x.reshape(*x.shape[: at - 1], -1, *x.shape[at + 1 :])
    x = dequantize_groups(quantize_groups(x, (at - 1,), group_size, at - 1), at)
    x = jnp.moveaxis(jnp.tensordot(x, turn, (at, 1)), -1, at)
    return join_groups(x, axes, leading)


def decoded(values: np.ndarray, scale: np.ndarray, info: ArrayInfo) -> Array:
    """The weight that stored components stand for, float32."""
    return info.quantization.decode(info.quantization.unpack(values, scale, info), info)


def hadamard(n: int) -> np.ndarray:
    """An orthogonal matrix of +-n**-0.5, [n,n], by which all of x gets into each entry. n: a power of 2.

    Its rows have random signs: else what is alike in x would gather in one entry.
    """
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = np.random.default_rng(0).choice([-1, 1], (n, 1))
    return (signs * matrix / n**0.5).astype(np.float32)


def weight_errors(
    exact: Checkpoint, format: Format, converted: Checkpoint | None = None, rounding: str = "searched"
) -> list[dict]:
    """`summary` of each weight that the format rounds, a slice in memory at a time.

    converted: a checkpoint in the format, whose values are compared; None: they are computed here.
    """
    infos = [(name, info) for name, info in named_infos(exact.config, format=format) if info.quantization]
    total, found = sum(exact.sources[name].nbytes for name, _ in infos), []
    with progress("comparing weights", total, show=jax.process_index() == 0) as bar:
        for name, info in infos:
            sources = [exact.sources[name]]
            quantized = converted or exact
            sources += [quantized.sources[part] for part in quantized.stored(name, info) if part != name]
            nameless, parts = dataclasses.replace(info, stored=None), []
            for letter, _, (w, *stored) in sources[0].read_slices(sources, [x.layout for x in sources[1:]]):
                axis = channel_letters(info).upper().index(letter)  # in a slice channels are whole
                q = decoded(*stored, info) if stored else rounded(w, nameless, rounding)
                parts.append(jax.device_get(channel_sums(w, q, info.contracted_axes)))
            sums = (np.concatenate(part, axis).astype(float) for part in zip(*parts, strict=True))
            found.append(summary(name, info, *sums))
            bar.update(sources[0].nbytes)
    return found


def channel_letters(info: ArrayInfo) -> str:
    return "".join(letter for letter in info.letters if letter not in info.contracted)


def summary(name: str, info: ArrayInfo, error: np.ndarray, square: np.ndarray, largest: np.ndarray) -> dict:
    """A weight's error and its worst channels, from `channel_sums`; channels of zeros have 0.

    Raises UserError if the weight is not finite, or if what it became cannot be of it.
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


# ------------------------------------------------------------------------------------------------ predictions


def read_text(file: str) -> str:
    """Raises UserError if the file is not UTF-8 or has only white space."""
    try:
        text = pathlib.Path(os.path.expanduser(file)).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"--text {file}: not a UTF-8 text file") from None
    if not text.strip():
        raise UserError(f"--text {file}: no text in it")
    return text


def windows(tokenizer, text: str, length: int, rows: int, cfg: Config) -> np.ndarray:
    """Tokens [N,T+1] int32: T inputs and their successors, -1 where there is none; N is a multiple of `rows`.

    T is `length`, or less for a short text. Raises UserError for a text of less than two tokens.
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
    """Of each position: KL(exact || other); whether the likeliest token is the same; -log p(target) of both.

    exact, other: logits [B,T,V] float32. targets: [B,T]. Each result: [B,T], in nats.
    """
    log_p, log_q = jax.nn.log_softmax(exact), jax.nn.log_softmax(other)
    p, ratio = jnp.exp(log_p), log_q - log_p
    # The sum of -p ratio and of q - p, which is 0: so no term is negative, and small ones survive float32.
    terms = jnp.where(ratio < 1, p * (jnp.expm1(ratio) - ratio), jnp.exp(log_q) - p - p * ratio)
    losses = (-jnp.take_along_axis(x, targets[..., None], -1)[..., 0] for x in (log_p, log_q))
    return jnp.sum(terms, -1), jnp.argmax(exact, -1) == jnp.argmax(other, -1), *losses


def compare(exact: Weights, other: Weights, tokens: np.ndarray, cfg: Config, mesh: Mesh) -> dict:
    """How others predict the tokens of `windows`. Raises UserError if a model computes NaN."""
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


# ----------------------------------------------------------------------------------------------------- report


def table(head: str, rows: list[list[str]]) -> str:
    lines = [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def report(result: dict, top: int) -> str:
    """The result as Markdown: kinds of weights, the `top` worst tensors, predictions if any, and how."""
    kinds, rows = collections.defaultdict(list), []
    for x in result["weights"]:
        kinds[re.sub(r"^layers\.\d+\.", "", x["name"]), f"{x['letters']}, {x['channels_of']}"].append(x)
    for kind, found in kinds.items():
        errors, channels = [x["error"] for x in found], [x["channels"][0]["error"] for x in found]
        figures = [f"{x:.2%}" for x in (np.mean(errors), max(errors), max(channels))]
        rows.append([*kind, str(len(found)), *figures, f"{max(x['max_over_rms'] for x in found):.1f}"])
    head = "weight | letters, of a channel | tensors | mean error | worst | worst channel | max / rms"
    parts, rows = [table(head, rows)], []
    for x in sorted(result["weights"], key=lambda x: -x["error"])[:top]:
        channels = ["{channel}: {error:.2%}, {max_over_rms:.1f}".format(**y) for y in x["channels"]]
        rows.append([x["name"], f"{x['error']:.2%}", "; ".join(channels)])
    parts.append(table("worst tensors | error | worst channels: error, max / rms", rows))
    how = "{model}, {format} {how}; {dtype} activations; jax {jax} on {device}; {date}.".format(**result)
    if text := result["text"]:
        head = "tokens | mean KL, nats | median | 99% | max | same top-1 | perplexity | with {format}"
        head = head.format(**result)
        kl, perplexity = (f"{x:.2e}" for x in text["kl"].values()), (f"{x:,.4f}" for x in text["perplexity"])
        parts.append(table(head, [[f"{text['tokens']:,}", *kl, f"{text['top_1']:.2%}", *perplexity]]))
        how += f" Text: {text['file']}, in windows of {text['window']}."
    else:
        how += " No --text: predictions are not compared."
    return "\n\n".join([*parts, how])


def parse_arguments(arguments: list[str] | None = None):
    parser = OneLineParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR_OR_ID", help="the float model, as for main.py")
    add("--quantize", choices=list(FORMATS)[1:], default="int8", help="default: int8")
    add("--converted", metavar="DIR", help="it, converted to that; default: round the float weights")
    how = "of int4: by scales of the least squared error, that clip nothing, or as the first after a rotation"
    add("--rounding", choices=ROUNDINGS, default="searched", help=f"{how}; default: searched")
    add("--text", metavar="FILE", help="UTF-8, to compare predictions on; default: compare weights alone")
    add("--window", type=int, default=512, metavar="N", help="positions, at most; default: 512")
    add("--dtype", choices=FLOATS, help="of activations; default: as for main.py and float weights")
    for name in ("dp", "ep", "tp"):
        add(f"--{name}", type=int, metavar="N", help="as for main.py")
    add("--top", type=int, default=5, metavar="N", help="worst tensors to show; default: 5")
    add("--json", metavar="FILE", help="write all that was measured there")
    args = parser.parse_args(arguments)
    parser.check_positive(args, "window", "dp", "ep", "tp", "top")
    if args.rounding != "searched" and (args.converted or not isinstance(FORMATS[args.quantize], PerGroup)):
        parser.error("--rounding is of int4 that is made here, not of --converted, nor of other formats")
    return args


def open_both(ours: str, theirs: str | None, format: Format) -> tuple[Checkpoint, Checkpoint | None]:
    """Raises UserError if they are not a float model and, if there is one, what it was converted to."""
    exact, converted = open_checkpoint(ours), open_checkpoint(theirs) if theirs is not None else None
    if exact.format:
        raise UserError(f"--checkpoint {ours}: its weights are {exact.format}; give the float model")
    if converted and converted.format != format:
        raise UserError(f"--converted {theirs}: its weights are not {format}, see --quantize")
    if converted and converted.config != exact.config:
        raise UserError(f"--converted {theirs}: another model, its config.json is not that of {ours}")
    return exact, converted


def load_both(exact: Checkpoint, converted: Checkpoint | None, mesh: Mesh, dtype: str, args) -> tuple:
    """The weights, and what --quantize and --rounding make of them."""
    show, format = jax.process_index() == 0, FORMATS[args.quantize]
    weights = load(exact, mesh, dtype, None, show)
    if args.rounding == "searched":
        return weights, load(converted or exact, mesh, dtype, format, show)

    def change(info: ArrayInfo, w: Array) -> Array:
        if not info.quantization:
            return w
        true = w[tuple(map(slice, info.shape))]  # what pads it for the mesh would be no whole groups
        true = rounded(true, dataclasses.replace(info, stored=None), args.rounding).astype(w.dtype)
        true = jnp.pad(true, [(0, n) for n in np.subtract(w.shape, true.shape)])
        return jax.device_put(true, w.sharding)

    return weights, jax.tree.map(change, model.weight_infos(exact.config, format=format), weights)


def main() -> None:
    args = parse_arguments()
    text = read_text(args.text) if args.text is not None else None
    if args.json:
        open(args.json, "a").close()  # a file that cannot be written is known before the measuring
    launch.enable_compilation_cache()
    launch.join_hosts(args)
    format = FORMATS[args.quantize]
    exact, converted = open_both(args.checkpoint, args.converted, format)
    cfg, show = exact.config, jax.process_index() == 0
    mesh = placement.choose_mesh(cfg, args.dp, args.ep, args.tp, launch.device_count())
    dtype, _ = placement.choose_dtypes(args.dtype, None, None)
    placement.set_precision(dtype)
    if text:
        length = min(args.window, cfg.max_positions)
        tokens = windows(load_tokenizer(exact.folder), text, length, mesh.shape["data"], cfg)
    result = dict(
        model=args.checkpoint, format=args.quantize, how=args.converted or ROUNDINGS[args.rounding],
        dtype=dtype, jax=jax.__version__,
        device=jax.devices()[0].device_kind, date=datetime.date.today().isoformat(),
        weights=weight_errors(exact, format, converted, args.rounding), text=None,
    )  # fmt: skip
    if text:
        try:
            both = load_both(exact, converted, mesh, dtype, args)
            result["text"] = dict(file=args.text) | compare(*both, tokens, cfg, mesh)
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e):
                raise
            raise UserError("out of device memory: a smaller --window or more devices may help") from e
    if show:
        print(report(result, args.top))
        if args.json:
            pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run(main)
