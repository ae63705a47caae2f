"""Speculative decoding: this module proposes draft tokens, and one decode step verifies several of them.

A draft token is accepted if the model itself chooses it. So the draft tokens change the number of steps, but
not the text. This holds for sampling too, because a draw depends only on the logits, the seed and the
position. Source: arXiv 2211.17192, with one draw instead of two.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from feedback.errors import UserError
from model import Config
from ops import cpu
from serving.executors import one_program
from serving.programs import Programs
from serving.steps import Batch, DecodeStep, Output, by_rows, most_readable, of_rows, tokens_at
from sharding.mesh import mesh_shape
from sharding.sampling import Sampling

NGRAM = 3  # the longest match of prompt lookup, in tokens
# The most draft tokens per step. With more tokens a CPU uses another int8 matmul, whose rounding differs, so
# drafts would change the text; a TPU's decode kernel does not support more at 8 queries per key head.
MAX_DRAFT = cpu.DECODE - 1


def check_n_draft(n: int) -> int:
    """-> n. Raises UserError if a decode step cannot verify n draft tokens."""
    if not 1 <= n <= MAX_DRAFT:
        raise UserError(f"{str(n)[:40]} draft tokens per step are not between 1 and {MAX_DRAFT}")
    return n


class PromptLookup:
    """Proposes the tokens that followed an earlier occurrence of the last few. Source: arXiv 2304.04487."""

    draft = None

    def __init__(self, n_draft: int):
        self.n_draft = check_n_draft(n_draft)

    def decode(self, count, sampling: Sampling, rows, target: Programs) -> Output:
        tokens, length = target.batch.tokens, target.batch.cache.length
        draft_tokens, count = target.call(
            prompt_lookup, count, tokens, length, rows, n_draft=self.n_draft, mesh=target.mesh
        )
        return target.step(DecodeStep(count=count, drafts=draft_tokens, sampling=sampling, rows=rows))


@partial(jax.jit, static_argnames=("n_draft", "mesh"))
def prompt_lookup(
    count, text: Array, length: Array, rows=None, *, n_draft: int, mesh: Mesh
) -> tuple[Array, Array]:
    """-> (draft tokens [B,N], count [B]: at most 1 for rows without a match).

    count, rows: [B], see steps.DecodeStep. text, length: of all rows; the first 1 + length tokens of a row
    are known.
    """

    @by_rows(mesh)
    def on_device(rows: Array | None, count: Array, text: Array, length: Array) -> tuple[Array, Array]:
        text, length = of_rows(rows, (text, length))
        slots = jnp.arange(text.shape[1])
        same, matches = slots < length[:, None], 0
        for back in range(NGRAM):
            last = tokens_at(text, length[:, None] - back)
            same &= (jnp.roll(text, back, 1) == last) & (slots >= back)
            matches += same
        # The last of the longest matches. The tokens after it repeat if they are fewer than the draft.
        best = jnp.argmax(matches * slots.size + jnp.where(matches > 0, slots, 0), 1)[:, None]
        period = length[:, None] - best
        found = jnp.take_along_axis(matches, best, 1)[:, 0] > 0
        known = tokens_at(text, best + 1 + jnp.arange(n_draft) % jnp.maximum(period, 1))
        return known, jnp.where(found, count, jnp.minimum(count, 1))

    return on_device(rows, count, text, length)


def mesh_for_draft(cfg: Config, mesh: Mesh) -> Mesh:
    """A mesh for the draft model: the devices of the model's mesh in the same order, as one program requires.

    Raises ValueError if they do not suit cfg.
    """
    shape = mesh_shape(cfg, mesh.shape["data"], 1, mesh.size // mesh.shape["data"])
    devices = mesh.devices.reshape(tuple(shape.values()))
    return Mesh(devices, tuple(shape), axis_types=mesh.axis_types)


class DraftModel:
    """Proposes the tokens that a smaller model of the same vocabulary chooses with the same seeds."""

    def __init__(self, draft: Programs, n_draft: int):
        self.draft, self.n_draft = draft, check_n_draft(n_draft)

    def decode(self, count, sampling: Sampling, rows, target: Programs) -> Output:
        draft = self.draft
        draft_tokens, count, draft.batch = draft.call(
            propose, count, sampling, rows, draft.weights, draft.batch, n_draft=self.n_draft, **draft.static
        )
        output = target.step(DecodeStep(count=count, drafts=draft_tokens, sampling=sampling, rows=rows))
        draft.batch = draft.call(take_over, draft.batch, count, output, rows, mesh=draft.mesh)
        return output


@partial(jax.jit, static_argnames=("n_draft", "cfg", "mesh"), donate_argnames="batch")
def propose(
    count, sampling: Sampling, rows, weights, batch: Batch, *, n_draft: int, cfg: Config, mesh: Mesh
) -> tuple[Array, Array, Batch]:
    """Choose the next tokens with the draft model: -> (draft tokens [B,N], count [B], its batch).

    count, rows: [B], see steps.DecodeStep. The draft model also reads the last draft token, which may be
    accepted.
    """
    select = by_rows(mesh)(of_rows)
    start = select(rows, batch.cache.length)
    count = jnp.minimum(count, most_readable(start, cfg))

    def read_one(i, batch: Batch) -> Batch:
        step = DecodeStep(count=(i < count).astype(jnp.int32), sampling=sampling, rows=rows)
        return one_program(step, weights, batch, cfg=cfg, mesh=mesh)[1]

    batch = lax.fori_loop(0, 1 + n_draft, read_one, batch)
    positions = start[:, None] + 1 + jnp.arange(n_draft)
    return tokens_at(select(rows, batch.tokens), positions), count, batch


@partial(jax.jit, static_argnames="mesh", donate_argnames="batch")
def take_over(batch: Batch, ahead: Array, output: Output, rows=None, *, mesh: Mesh) -> Batch:
    """Replace the last tokens of the draft model's batch by those that the model has chosen.

    ahead: [B], how many tokens of each row are replaced. rows: [B], see steps.DecodeStep.
    """

    @by_rows(mesh)
    def on_device(rows: Array | None, ahead: Array, text: Array, length: Array, output: Output):
        rows = jnp.arange(length.size) if rows is None else rows
        start, i = length[rows] - ahead, jnp.arange(output.tokens.shape[1])
        at = jnp.where(i < output.count[:, None], start[:, None] + 1 + i, text.shape[1])
        text = text.at[rows[:, None], at].set(output.tokens, mode="drop")
        return text, length.at[rows].set(start + output.count)

    tokens, length = on_device(rows, ahead, batch.tokens, batch.cache.length, output)
    return batch.replace(tokens=tokens, length=length)
