"""A small model with random weights, as the program runs it here, beside the same in float32 on a CPU.

The tiny models of tests/checkpoints have heads of 32 columns, which no kernel of a GPU supports, and answer
in float32. The models here have heads of 64 and 128 columns, bfloat16 activations, and quantized weights and
caches. One layer attends to all tokens, the other to a window, whose cache is a ring. Of three rows of a
batch two read a prompt in two pieces, which are chunks of some rows, and choose tokens; one stays empty.

What a log-probability may differ by: activations are rounded to bfloat16 after each operation, and keys and
values to the cache's type. On a CPU the differences have a standard deviation of at most DEVIATION. A kernel
may also round probabilities to bfloat16, which adds less. A row, a mask, a scale or a weight that is wrong
changes many log-probabilities, whose own standard deviation is 1.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kernel_checks import one_line, pallas_kernels

import model
from ops.platform import KINDS as KERNEL_KINDS
from ops.platform import plain_kinds
from quantize import FORMATS, Format
from serving.executors import one_program
from serving.steps import DecodeStep, PrefillChunk, init_batch
from sharding.mesh import make_mesh

DEVIATION = 0.019  # measured with a cache in int8; in bfloat16 it is 0.012
ALLOWED = 8 * DEVIATION  # that a log-probability may differ by; of 286 the largest difference was 0.065
SLOTS, WIDTH, NEW = 256, 128, 8  # slots of a row, tokens in a piece, tokens that are chosen
ROWS = np.array([2, 0], np.int32)  # of three rows, those that are read
PIECES = ((128, 70), (72, 0))  # tokens of these rows that each chunk reads
WINDOW = model.Window(96, spare=32)  # its ring has fewer slots than the longer row has tokens


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model to be checked. H: the width of its heads. weights: as of --quantize. cache: its type."""

    H: int
    weights: str
    cache: str

    @property
    def format(self) -> Format | None:
        return FORMATS[self.weights]

    @property
    def config(self) -> model.Config:
        norm, attention, rope = model.Norm(1e-5), model.Attention(2, 2, self.H), model.Rope(1e4, self.H)
        first = model.LayerKind(attention, model.MLP(384), norm, rope=rope)
        layers = first, dataclasses.replace(first, mask=WINDOW)
        return model.Config(D=256, V=512, layers=layers, norm=norm, max_positions=SLOTS)

    def __str__(self) -> str:
        return f"a model with heads of {self.H}, --quantize {self.weights} --kv-cache-dtype {self.cache}"


KINDS = (Kind(64, "none", "bfloat16"), Kind(128, "int8", "int8"), Kind(64, "int4", "int8"))


def kinds_of(platform: str) -> list[Kind]:
    """Those whose weights the platform holds in their own format."""
    return [kind for kind in KINDS if not kind.format or kind.format.on(platform) == kind.format]


def run_kind(kind: Kind, cpu: jax.Device) -> dict:
    """Compare one model on this process's first device with the same on a CPU.

    Of the result, error: the largest of all log-probabilities. share: its part of what it may be. failure: in
    one line, what was raised, or what is wrong. remedy: what a user can do.
    """
    kernels, error, failure = [], None, None
    try:
        mesh = make_mesh(kind.config, devices=jax.local_devices()[:1])
        key = jax.random.key(0, impl="rbg")
        weights = model.init_weights(key, kind.config, mesh, jnp.bfloat16, kind.format)
        tokens, logprobs, kernels = read_and_choose(kind, weights, mesh)
        error, failure = compare(tokens, logprobs, expected_logprobs(kind.config, weights, tokens, cpu))
    except Exception as e:  # a compiler's, for example
        failure = one_line(e)
    by = f", by {' and '.join(kernels)}" if kernels else ""
    return dict(
        name=f"{kind}{by}", ok=failure is None, failure=failure, error=error, share=error and error / ALLOWED,
        remedy=None if failure is None else remedy(),
    )  # fmt: skip


def remedy() -> str:
    """What a user can do about a model that is wrong."""
    if plain_kinds() == set(KERNEL_KINDS):
        return "XLA computes it without a kernel; another number format may avoid it"
    return "LLAMA_JAX_PLAIN=all computes it without kernels, more slowly"


def steps() -> list[PrefillChunk | DecodeStep]:
    """The steps that read PIECES, and those that choose tokens: of all rows, as on any accelerator."""
    counts = [np.array(count, np.int32) for count in PIECES]
    pieces = [PrefillChunk(rows=ROWS, count=x, width=WIDTH, score=0) for x in counts]
    return [*pieces, *NEW * [DecodeStep(count=np.int32([1, 0, 1]))]]


def kernels_of(step: PrefillChunk | DecodeStep, weights, batch, cfg: model.Config, mesh) -> list[str]:
    """The Pallas kernels of a step's program, in their order. weights, batch: also shapes alone."""
    traced = one_program.program(type(step)).trace(step, weights, batch, cfg=cfg, mesh=mesh)
    return list(pallas_kernels(traced.jaxpr.jaxpr))


def read_and_choose(kind: Kind, weights: model.Weights, mesh) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """-> the tokens of all rows, each one's log-probability, and the names of the kernels, in their order.

    tokens, logprobs: [3,SLOTS]. A log-probability is NaN where none was computed.
    """
    cfg, logprobs, length = kind.config, np.full((3, SLOTS), np.nan), np.zeros(3, int)
    batch, kernels = init_batch(cfg, mesh, 3, SLOTS, jnp.dtype(kind.cache)), {}
    tokens = np.random.default_rng(0).integers(0, cfg.V, batch.tokens.shape, np.int32)
    batch = batch.replace(tokens=jax.device_put(tokens, batch.tokens.sharding))
    for step in steps():
        kernels |= dict.fromkeys(kernels_of(step, weights, batch, cfg, mesh))
        found, batch = one_program(step, weights, batch, cfg=cfg, mesh=mesh)
        rows = range(3) if step.rows is None else step.rows
        for row, count, values in zip(rows, step.count, np.asarray(found.logprobs), strict=True):
            logprobs[row, length[row] + 1 :][:count] = values[:count]
            length[row] += count
    return np.asarray(batch.tokens), logprobs, list(kernels)


def expected_logprobs(cfg: model.Config, weights: model.Weights, tokens: np.ndarray, cpu) -> np.ndarray:
    """Of every token in the place that follows, [3,SLOTS,V]: by the forward pass of a CPU, in float32.

    The weights are the numbers that the device has, as they are quantized.
    """
    mesh = make_mesh(cfg, devices=[cpu])

    def move(x: jax.Array) -> jax.Array:
        dtype = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
        return jax.device_put(np.asarray(x).astype(dtype), NamedSharding(mesh, P()))

    logits = model.forward(tokens, jax.tree.map(move, weights), cfg=cfg, mesh=mesh)
    return np.asarray(jax.nn.log_softmax(logits))


def compare(
    tokens: np.ndarray, logprobs: np.ndarray, expected: np.ndarray
) -> tuple[float | None, str | None]:
    """-> the largest error, or what is wrong first, in one line."""
    error = 0.0
    for row, *counts in zip(ROWS, *PIECES, strict=True):
        end = sum(counts) + NEW
        for at in range(1, end + 1):
            known = expected[row, at - 1]
            difference = abs(logprobs[row, at] - known[tokens[row, at]])
            phase = "prefill" if at <= end - NEW else "decode"
            place = f"row {row}, token {at + 1}, in {phase}"
            if not difference <= ALLOWED:  # or it is NaN
                return None, f"{place}: a log-probability is off by {difference:.2g}"
            behind = known.max() - known[tokens[row, at]]
            if phase == "decode" and behind > 2 * ALLOWED:
                return None, f"{place}: a CPU's choice is more probable by {behind:.2g}"
            error = max(error, difference)
    return float(error), None
