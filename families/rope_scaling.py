"""What long-context versions of models do to the frequencies of RoPE: the `scaling` of a `model.Rope`.

Each record is called with the frequencies, [width/2] float32, and theta, and returns the frequencies to use.
"""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """All frequencies divided by a factor: positions are interpolated. Source: arXiv 2306.15595."""

    factor: float

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        return frequencies / np.float32(self.factor)


@dataclasses.dataclass(frozen=True)
class ProportionalScaling:
    """The first frequencies of a head, divided by a factor; the others are 0, and do not rotate.

    kept: the part of the frequencies that is not 0. Source: transformers modeling_rope_utils.py.
    """

    kept: float
    factor: float = 1

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        width = 2 * len(frequencies)
        kept = np.arange(width // 2) < int(self.kept * width // 2)
        return np.where(kept, frequencies / np.float32(self.factor), np.float32(0))


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """High frequencies are kept, low ones are divided by `factor`, and those in between are blended.

    original: the context length of the first training. A frequency that makes more than `high` turns in it is
    kept, one that makes fewer than `low` is divided.
    """

    factor: float
    low: float
    high: float
    original: float

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        turns = self.original * frequencies / np.float32(2 * np.pi)
        # low and high may be equal: then nothing is blended.
        above = (turns - self.low) / (self.high - self.low) if self.high > self.low else turns >= self.low
        kept = np.clip(above, 0, 1).astype(np.float32)
        return (1 - kept) * frequencies / np.float32(self.factor) + kept * frequencies


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """As `Llama3Scaling`, but blended linearly in a frequency's index. Source: arXiv 2309.00071, section 3.2.

    original: the context length of the first training. The frequency that makes `fast` turns in that context
    is the last one that is kept, and the frequency that makes `slow` turns the first one that is divided.
    truncate: the indices of these two frequencies are rounded, the first one down and the second one up.
    """

    factor: float
    original: float
    fast: float = 32
    slow: float = 1
    truncate: bool = True

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        def index(turns: float) -> float:
            return len(frequencies) * math.log(self.original / (turns * 2 * math.pi)) / math.log(theta)

        low, high = index(self.fast), index(self.slow)
        low, high = (math.floor(low), math.ceil(high)) if self.truncate else (low, high)
        low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
        divided = (np.arange(len(frequencies)) - low) / (high - low if high > low else 0.001)
        divided = np.clip(divided, 0, 1).astype(np.float32)
        return divided * frequencies / np.float32(self.factor) + (1 - divided) * frequencies
