"""Speculative decoding: draft tokens, which may come next, and of which a decode step checks several at once.

A draft token that the model would have chosen itself is accepted, so the text does not depend on them, only
the number of steps does. This holds for sampling too, where a draw depends on its seed and place alone.
Source: arXiv 2211.17192, with one draw in the place of two. This module makes drafts, and steps.DecodeStep
checks them.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from checkpoints.errors import UserError
from model import Config
from ops import cpu
from serving.executors import one_program
from serving.programs import Programs
from serving.steps import Batch, DecodeStep, Output, by_rows, most_drafts, tokens_at
from sharding.mesh import mesh_shape
from sharding.sampling import Sampling

NGRAM = 3  # tokens that prompt lookup compares at most
# Draft tokens per step, at most. A longer step is no decode to a CPU, which then rounds int8 products in
# another way: they would change the text. Nor would a TPU's decode kernel take it at 8 heads per key head.
MAX_DRAFT = cpu.DECODE - 1


def check_n_draft(n: int) -> int:
    """The number itself. UserError if a step cannot check so many draft tokens."""
    if not 1 <= n <= MAX_DRAFT:
        raise UserError(f"{str(n)[:40]} guesses at a time are not between 1 and {MAX_DRAFT}")
    return n


class PromptLookup:
    """Drafts what followed when the last few tokens were last in the text. Source: arXiv 2304.04487."""

    draft = None

    def __init__(self, n_draft: int):
        self.n_draft = check_n_draft(n_draft)

    def decode(self, count, sampling: Sampling, target: Programs) -> Output:
        tokens, length = target.batch.tokens, target.batch.cache.length
        draft_tokens, count = look_up(count, tokens, length, n_draft=self.n_draft, mesh=target.mesh)
        return target.step(count, draft_tokens, sampling)


@partial(jax.jit, static_argnames=("n_draft", "mesh"))
def look_up(count, text: Array, length: Array, *, n_draft: int, mesh: Mesh) -> tuple[Array, Array]:
    """-> (draft tokens [B,N], count [B] with those that are to be checked).

    text: [B,S], of which each row's first 1 + length[B] tokens are known. count: [B], see steps.DecodeStep.
    """

    @by_rows(mesh)
    def on_device(count: Array, text: Array, length: Array) -> tuple[Array, Array]:
        slots = jnp.arange(text.shape[1])
        same, matches = slots < length[:, None], 0
        for back in range(NGRAM):
            last = jnp.take_along_axis(text, length[:, None] - back, 1, mode="clip")
            same &= (jnp.roll(text, back, 1) == last) & (slots >= back)
            matches += same
        # The longest match, and of these the last; what followed it, again and again if it is shorter.
        best = jnp.argmax(matches * slots.size + jnp.where(matches > 0, slots, 0), 1)[:, None]
        period = length[:, None] - best
        found = jnp.take_along_axis(matches, best, 1)[:, 0] > 0
        at = best + 1 + jnp.arange(n_draft) % jnp.maximum(period, 1)
        known = jnp.take_along_axis(text, at, 1, mode="clip")
        return known, jnp.where(found, count, jnp.minimum(count, 1))

    return on_device(count, text, length)


def mesh_for_draft(cfg: Config, mesh: Mesh) -> Mesh:
    """A mesh for this model of the devices of another's, in the same order, as one program needs them.

    Raises ValueError if it cannot be divided so.
    """
    shape = mesh_shape(cfg, mesh.shape["data"], 1, mesh.size // mesh.shape["data"])
    devices = mesh.devices.reshape(tuple(shape.values()))
    return Mesh(devices, tuple(shape), axis_types=mesh.axis_types)


class DraftModel:
    """Drafts what a smaller model of the same vocabulary would choose, which draws with the same seeds."""

    def __init__(self, draft: Programs, n_draft: int):
        self.draft, self.n_draft = draft, check_n_draft(n_draft)

    def decode(self, count, sampling: Sampling, target: Programs) -> Output:
        draft = self.draft
        draft_tokens, count, draft.batch = read_ahead(
            count, sampling, draft.weights, draft.batch, n_draft=self.n_draft, **draft.static
        )
        output = target.step(count, draft_tokens, sampling)
        draft.batch = correct(draft.batch, count, output, mesh=draft.mesh)
        return output


@partial(jax.jit, static_argnames=("n_draft", "cfg", "mesh"), donate_argnames="batch")
def read_ahead(
    count, sampling: Sampling, weights, batch: Batch, *, n_draft: int, cfg: Config, mesh: Mesh
) -> tuple[Array, Array, Batch]:
    """Let the draft model decode n_draft tokens: -> (draft tokens [B,N], count [B], its batch).

    The draft model also reads the last of them, because the model may accept it.
    """
    start = batch.cache.length
    count = jnp.minimum(count, most_drafts(start, cfg))

    def read_one(i, batch: Batch) -> Batch:
        step = DecodeStep(count=(i < count).astype(jnp.int32), sampling=sampling)
        return one_program(step, weights, batch, cfg=cfg, mesh=mesh)[1]

    batch = lax.fori_loop(0, 1 + n_draft, read_one, batch)
    positions = start[:, None] + 1 + jnp.arange(n_draft)
    return tokens_at(batch.tokens, positions), count, batch


@partial(jax.jit, static_argnames="mesh", donate_argnames="batch")
def correct(batch: Batch, ahead: Array, output: Output, *, mesh: Mesh) -> Batch:
    """The draft model's batch, which has read `ahead` [B] tokens, rolled back to what the model chose."""

    @by_rows(mesh)
    def on_device(text: Array, length: Array, output: Output) -> tuple[Array, Array]:
        rows, i = jnp.arange(text.shape[0])[:, None], jnp.arange(output.tokens.shape[1])
        at = jnp.where(i < output.count[:, None], length[:, None] + 1 + i, text.shape[1])
        return text.at[rows, at].set(output.tokens, mode="drop"), length + output.count

    tokens, length = on_device(batch.tokens, batch.cache.length - ahead, output)
    return batch.replace(tokens=tokens, length=length)
