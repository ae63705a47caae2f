"""The rounding error of small and large weights in three number formats of 8 bits."""

import jax.numpy as jnp
import numpy as np

from images.drawing import pyplot, redraw, tidy
from quantize import FP8, INT8, PerChannel
from sharding.arrays import ArrayInfo

E5M2 = PerChannel("fp8-e5m2", np.dtype(jnp.float8_e5m2), 57344)  # the example of docs/formats.md
SHOWN = (
    (INT8, "#4c78a8", "int8: evenly spaced"),
    (FP8, "#54a24b", "fp8, e4m3: 3 bits of fraction"),
    (E5M2, "#f58518", "fp8-e5m2: 2 bits of fraction"),
)


def relative_errors(format: PerChannel, weights: np.ndarray) -> np.ndarray:
    """The error of each weight of one channel over the weight itself."""
    info = ArrayInfo("fD", "D", shape=(1, weights.size), format=format)
    exact = jnp.asarray(weights)[None]
    return np.abs(np.asarray(format.decode(format.encode(exact, info), info)[0]) - weights) / weights


def draw(bins=34, each=600):
    """The figure: of weights of one channel, the largest error in each small range of magnitudes."""
    weights = np.geomspace(1e-5, 1, bins * each, dtype=np.float32)
    figure, axes = pyplot().subplots(figsize=(9.5, 3.8))
    for format, color, label in SHOWN:
        errors = relative_errors(format, weights).reshape(bins, each).max(1)
        axes.plot(weights.reshape(bins, each)[:, each // 2], errors, color=color, label=label, lw=1.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(1e-3, 1.5)
    ticks = {0.001: "0.1%", 0.01: "1%", 0.1: "10%", 1: "100%"}
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set_xlabel("weight over the largest weight of the channel")
    axes.set_ylabel("error over the weight, at most")
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    tidy(figure)
    return figure


if __name__ == "__main__":
    redraw("formats")
