"""The shapes of prefill chunks, and which of them suits the prompts that wait.

A chunk reads up to `width` tokens in each of `rows` rows of every data shard. Each shape is a program of its
own, so there are few. A wide chunk reads a long prompt; a chunk of several rows reads short prompts together,
which one after another would each leave most of a chunk to padding.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jax.sharding import Mesh

from model import Config
from ops.platform import platform


class Shape(NamedTuple):
    """The shape of a prefill chunk: rows of a data shard, and tokens of each."""

    rows: int
    width: int

    @property
    def tokens(self) -> int:
        return self.rows * self.width


# A CPU reads no more tokens per second in a chunk of 512 tokens than in one of 128.
CPU_SHAPES = (Shape(1, 32), Shape(4, 32), Shape(1, 128), Shape(2, 128))
ACCELERATOR_SHAPES = (
    Shape(1, 32), Shape(4, 32), Shape(1, 128), Shape(4, 128), Shape(1, 512), Shape(1, 2048),
)  # fmt: skip
# Of a model with experts: more rows do not fit into the experts' kernel of TPUs, see ops/grouped_matmul.py.
EXPERTS_TOKENS = 512
# A chunk takes as long as its tokens and so many more.
OVERHEAD = 64
# A shape of more rows must read so many times as many tokens per second: the prompt that comes first would be
# read earlier in a chunk of its own.
WORTH_MORE_ROWS = 1.125


def chunk_shapes(cfg: Config, mesh: Mesh, rows: int) -> list[Shape]:
    """The shapes of chunks of a model, on a mesh with so many rows in each data shard."""
    shapes = [Shape(*shape) for shape in (CPU_SHAPES if platform(mesh) == "cpu" else ACCELERATOR_SHAPES)]
    most = EXPERTS_TOKENS if cfg.moe else math.inf
    return [shape for shape in shapes if shape.rows <= rows and shape.tokens <= most]


def useful_shapes(shapes: Sequence[Shape], longest: int, tokens: float) -> list[Shape]:
    """The shapes of chunks for prompts of which up to `longest` tokens are to be read; none if that is 0.

    tokens: no larger chunk is wanted, unless all are larger.
    """
    if longest < 1:
        return []
    widths = sorted({shape.width for shape in shapes})
    widest = max((width for width in widths if longest > width // 2), default=widths[0])
    return at_most(tokens, [shape for shape in shapes if shape.width <= widest])


def at_most(tokens: float, shapes: Sequence[Shape]) -> list[Shape]:
    """The shapes of up to so many tokens, or the smallest one if all have more."""
    return [shape for shape in shapes if shape.tokens <= tokens] or sorted(shapes, key=lambda x: x.tokens)[:1]


def best_shape(shapes: Iterable[Shape], unread: Sequence[Sequence[int]]) -> Shape:
    """The shape whose chunk reads the most tokens per second of these prompts.

    unread: for each data shard, how many tokens are left of each prompt, see `prompts_in_chunk`.
    """
    best, best_rate = None, 0.0
    for shape in sorted(shapes):
        read = sum(tokens_read(shape, prompts) for prompts in unread)
        rate = read / (shape.tokens + OVERHEAD)
        if best is None or rate > best_rate * (WORTH_MORE_ROWS if shape.rows > best.rows else 1):
            best, best_rate = shape, rate
    return best


def tokens_read(shape: Shape, unread: Sequence[int]) -> int:
    """How many tokens a chunk of this shape reads in one data shard. unread: see `prompts_in_chunk`."""
    return sum(min(unread[i], shape.width) for i in prompts_in_chunk(shape, unread))


def prompts_in_chunk(shape: Shape, unread: Sequence[int]) -> list[int]:
    """Which prompts of a data shard a chunk of this shape reads: the first, and those that fill it best.

    unread: how many tokens of each prompt are left. -> indices.
    """
    others = sorted(range(1, len(unread)), key=lambda i: (-min(unread[i], shape.width), unread[i]))
    return [*range(len(unread[:1])), *others][: shape.rows]
