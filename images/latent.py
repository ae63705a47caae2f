"""Bytes that one token occupies in one layer's cache, for every model that the planner knows."""

import math

import jax
import jax.numpy as jnp

import model
from families.latent_attention import LatentAttention
from images.drawing import pyplot, redraw, tidy
from planner.published_models import MODELS, read_model

NAMED = {
    "gpt2": (8, -3), "gpt2-xl": (8, -3), "gemma-7b": (-54, -3), "openllama-13b": (8, -3),
    "openllama-7b": (8, -3), "llama3.1-8b": (-22, 8), "llama3.1-70b": (-22, 8), "llama3.1-405b": (-26, 8),
    "qwen3-30b-a3b": (8, -3), "glm-4-9b": (8, -3), "glm-4.7-flash": (9, -3), "qwen2.5-0.5b": (8, -3),
    "gemma-2b": (8, -3), "kimi-k2": (8, -3), "deepseek-r1": (-26, 8),
}  # fmt: skip
KINDS = {
    "one key/value head per query head (MHA)": "#e45756",
    "grouped (GQA)": "#4c78a8",
    "latent": "#54a24b",
}


def slot_bytes(cfg: model.Config) -> int:
    """Bytes of one token in the first layer's cache, in bfloat16."""
    infos = jax.tree.leaves(model.kv_info(cfg.layers[0], 1, 1, jnp.bfloat16))
    return sum(math.prod(info.shape) * jnp.dtype(info.dtype).itemsize for info in infos)


def query_heads(cfg: model.Config) -> int:
    return cfg.attention.K * cfg.attention.G


def kind(cfg: model.Config) -> str:
    mha, gqa, latent = KINDS
    if isinstance(cfg.attention, LatentAttention):
        return latent
    return mha if cfg.attention.G == 1 else gqa


def as_heads(latent: LatentAttention) -> int:
    """Bytes of the keys and values of all heads, which a latent stands for, in bfloat16."""
    return latent.G * (latent.N + latent.R + latent.U) * 2


def draw():
    figure, axes = pyplot().subplots(figsize=(9.5, 4.6))
    points = {}
    for name in MODELS:
        cfg = read_model(name)
        points[name] = query_heads(cfg), slot_bytes(cfg), kind(cfg)
    for label, color in KINDS.items():
        x, y = zip(*{point[:2] for point in points.values() if point[2] == label}, strict=True)
        axes.scatter(x, y, color=color, label=label, zorder=3)
    for name, offset in NAMED.items():
        heads, size, _ = points[name]
        axes.annotate(name, (heads, size), offset, textcoords="offset points", fontsize=8)
    latent = read_model("glm-4.7-flash").attention
    heads, size, _ = points["glm-4.7-flash"]
    whole = as_heads(latent)
    axes.scatter([heads], [whole], facecolors="none", edgecolors=KINDS["latent"], zorder=3)
    arrow = dict(arrowstyle="-|>", color=KINDS["latent"], connectionstyle="arc3,rad=-0.12")
    axes.annotate("", (heads, size * 1.1), (heads, whole * 0.92), arrowprops=arrow)
    whose = f"keys and values of the {heads} heads of glm-4.7-flash: {whole:,} bytes"
    axes.text(heads, whole * 1.2, whose, ha="center", fontsize=8)
    less = f"{whole / size:.0f} times less"
    axes.text(heads * 1.17, (size * whole) ** 0.5 * 1.5, less, fontsize=8, color=KINDS["latent"])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks((8, 16, 32, 64, 128), ("8", "16", "32", "64", "128"))
    axes.set_xlim(7, 180)
    axes.set_ylim(400, 36_000)
    ticks = [2**n for n in range(9, 16)]
    axes.set_yticks(ticks, [f"{n:,}" for n in ticks])
    axes.set_xlabel("query heads")
    axes.set_ylabel("bytes per token and layer, bfloat16")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    tidy(figure)
    return figure


if __name__ == "__main__":
    redraw("latent")
