"""The compiled programs of a batch, over a model's weights and its cache. They know rows, and no requests."""

from collections.abc import Iterable
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh

import model
from checkpoints.errors import UserError
from model import Config, Output, Sampling, Weights
from serving import layer_groups
from serving.hosts import start_fetching

WIDTHS = (32, 128, 512)  # of a prefill chunk: few, for each is compiled


def prefill_width(unread: int) -> int:
    """The width of the next prefill chunk of a prompt with so many tokens to read: at least half is used."""
    return next((width for width in reversed(WIDTHS) if unread > width // 2), WIDTHS[0])


class Speculation(Protocol):
    """How to choose several tokens in one step: see speculation.py.

    n_draft: draft tokens per step, at most. draft: a second model, which reads all that the first one reads.
    """

    n_draft: int
    draft: "Programs | None"

    def decode(self, count: np.ndarray, sampling: Sampling, target: "Programs") -> Output: ...


class Programs:
    """What runs on the devices for a batch of rows. Each call donates the cache and keeps the new one.

    width: how many tokens of a row a decode step may read. masks: of the layers, a draft model's too.
    """

    def __init__(
        self,
        weights: Weights,
        cfg: Config,
        mesh: Mesh,
        rows: int,
        max_len: int,
        kv_dtype: str,
        speculation: Speculation | None = None,
    ):
        """rows: rounded up to whole data shards. Raises UserError for a draft model of another vocabulary."""
        self.run, self.shards = layer_groups if layer_groups.suits(mesh) else model, mesh.shape["data"]
        self.rows, self.max_len = rows + -rows % self.shards, max_len
        self.weights, self.cfg, self.mesh, self.static = weights, cfg, mesh, dict(cfg=cfg, mesh=mesh)
        self.cache = model.init_cache(cfg, mesh, self.rows, max_len, kv_dtype)
        self.speculation, self.draft = speculation, speculation and speculation.draft
        self.width, self.masks = 1 + (speculation.n_draft if speculation else 0), cfg.masks
        if self.draft:
            if cfg.V != self.draft.cfg.V:
                raise UserError(f"the draft has {self.draft.cfg.V} tokens, the model {cfg.V}")
            self.masks |= self.draft.masks

    def warm_up(self, longest: int, scores: Iterable[bool], sampling: Sampling) -> None:
        """Compile what prompts of up to `longest` tokens and this sampling need, by running it on no row."""
        nothing = np.zeros(self.shards, np.int32)
        alone = self.rows == self.shards  # a row has no other to take a prefix from
        for source in (None,) if alone else (None, nothing):
            self.begin(nothing - 1, np.zeros((self.shards, self.max_len), np.int32), nothing, source)
        for width in WIDTHS:
            for score in scores:
                if longest > 1 and prefill_width(longest - 1) >= width:
                    self.prefill(nothing, nothing, width, score)
        jax.block_until_ready(self.decode(np.zeros(self.rows, np.int32), sampling))

    def begin(self, rows, text, length, source) -> None:
        """Give rows other texts, of which some has been read: see model.begin."""
        self.cache = model.begin(rows, text, length, source, self.cache, **self.static)
        if self.draft:
            self.draft.begin(rows, text, length, source)

    def prefill(self, rows, count, width: int, score: bool = False) -> jax.Array | None:
        """Read a chunk of a prompt in a row of each data shard: -> its scores, if asked for."""
        scores, self.cache = self.run.prefill(
            rows, count, self.weights, self.cache, width=width, score=score, **self.static
        )
        if self.draft:
            self.draft.prefill(rows, count, width)
        return start_fetching(scores, self.mesh) if score else None

    def step(self, count, draft_tokens, sampling: Sampling) -> Output:
        """One decode step, which also checks draft tokens [B,N], or None: see model.decode_step."""
        output, self.cache = self.run.decode_step(
            count, draft_tokens, sampling, self.weights, self.cache, **self.static
        )
        return output

    def decode(self, count, sampling: Sampling) -> Output:
        """Choose up to count [B] tokens in each row, with speculation if there is one."""
        if self.speculation:
            output = self.speculation.decode(count, sampling, self)
        else:
            output = self.step(count, None, sampling)
        return start_fetching(output, self.mesh)
