"""Which records the layers of each family have: read from the Configs of one model per family."""

from collections.abc import Callable

from families.deepseek_v3 import GroupLimitedRouter
from families.gemma import GeGLU
from families.gpt2 import GeluMLP, LayerNorm, LearnedPositions
from families.gpt_oss import SinkAttention
from families.latent_attention import LatentAttention
from families.muse_glimmer import GatedAttention
from families.registry import read_config
from families.rope_scaling import YarnScaling
from images.drawing import pyplot, redraw
from model import (
    MLP,
    Attention,
    BlockLocal,
    Config,
    Full,
    LayerKind,
    MoE,
    Norm,
    Window,
)
from planner.published_models import MODELS

FAMILIES = {
    "llama (Llama 3.1 8B)": MODELS["llama3.1-8b"],
    "llama4_text (Scout)": MODELS["llama4-scout"],
    "muse_glimmer_text (30B)": MODELS["muse-glimmer-30b"],
    "mistral (7B v0.1)": MODELS["mistral-7b"],
    "mixtral (8x7B)": MODELS["mixtral-8x7b"],
    "qwen2 (Qwen 2.5 7B)": MODELS["qwen2.5-7b"],
    "qwen3 (8B)": MODELS["qwen3-8b"],
    "qwen3_moe (30B-A3B)": MODELS["qwen3-30b-a3b"],
    "gemma (7B)": MODELS["gemma-7b"],
    "gemma3_text (4B)": MODELS["gemma3-4b"],
    "gpt2 (124M)": MODELS["gpt2"],
    "gpt_oss (20b)": MODELS["gpt-oss-20b"],
    "glm (GLM-4-9B)": MODELS["glm-4-9b"],
    "glm4_moe_lite (4.7-Flash)": MODELS["glm-4.7-flash"],
    "deepseek_v3 (V3, R1)": MODELS["deepseek-v3"],
    "kimi_k2 (K2)": MODELS["kimi-k2"],
}
# Of each group of columns, the test that a layer passes if it has the record or the option.
LAYER: dict[str, dict[str, Callable[[LayerKind], bool]]] = {
    "attention": {
        "Attention": lambda x: isinstance(x.attention, Attention),
        "  bias": lambda x: getattr(x.attention, "bias", False),
        "  qk_norm": lambda x: bool(getattr(x.attention, "qk_norm", None)),
        "  query_scale": lambda x: bool(getattr(x.attention, "query_scale", None)),
        "  scale": lambda x: getattr(x.attention, "scale", None) is not None,
        "  gate": lambda x: isinstance(x.attention, GatedAttention),
        "  sinks": lambda x: isinstance(x.attention, SinkAttention),
        "LatentAttention": lambda x: isinstance(x.attention, LatentAttention),
    },
    "mask": {
        "Full": lambda x: isinstance(x.mask, Full),
        "BlockLocal": lambda x: isinstance(x.mask, BlockLocal),
        "Window": lambda x: isinstance(x.mask, Window),
    },
    "positions": {
        "Rope": lambda x: x.rope is not None,
        "  interleaved": lambda x: x.rope is not None and x.rope.interleaved,
        "  YaRN": lambda x: isinstance(getattr(x.rope, "scaling", None), YarnScaling),
        "  part of a head": lambda x: x.rope is not None and x.rope.width < x.attention.slot_layout.key,
    },
    "feed-forward": {
        "MLP": lambda x: isinstance(x.feed_forward, MLP),
        "  GeGLU": lambda x: isinstance(getattr(x.feed_forward, "activation", None), GeGLU),
        "GeluMLP": lambda x: isinstance(x.feed_forward, GeluMLP),
        "MoE": lambda x: isinstance(x.feed_forward, MoE),
        "  shared": lambda x: bool(getattr(x.feed_forward, "shared", None)),
        "  biases": lambda x: getattr(x.feed_forward, "bias", False),
        "  softmax router": lambda x: (
            isinstance(x.feed_forward, MoE) and x.feed_forward.router.score == "softmax"
        ),
        "  groups": lambda x: (
            isinstance(x.feed_forward, MoE) and isinstance(x.feed_forward.router, GroupLimitedRouter)
        ),
    },
    "norm": {
        "Norm": lambda x: isinstance(x.norm, Norm),
        "  offset": lambda x: bool(getattr(x.norm, "offset", 0)),
        "LayerNorm": lambda x: isinstance(x.norm, LayerNorm),
        "post_norm": lambda x: x.post_norm is not None,
    },
}
WHOLE: dict[str, Callable[[Config], bool]] = {
    "LearnedPositions": lambda cfg: isinstance(cfg.position_embedding, LearnedPositions),
    "embedding_scale": lambda cfg: cfg.embedding_scale is not None,
    "embedding_norm": lambda cfg: cfg.embedding_norm is not None,
    "logit_softcap": lambda cfg: cfg.logit_softcap is not None,
    "tied_embeddings": lambda cfg: cfg.tied_embeddings,
}
EVERY, SOME = "#4c78a8", "#9ecae1"


def grid() -> dict[str, dict[str, tuple[int, int]]]:
    """{family: {column: (how many layers have it, layers)}}; of a whole model, (0 or 1, 1)."""
    found = {}
    for name, fields in FAMILIES.items():
        cfg = read_config(fields)
        depth = len(cfg.layers)
        found[name] = {
            column: (sum(map(bool, map(has, cfg.layers))), depth)
            for columns in LAYER.values()
            for column, has in columns.items()
        } | {column: (int(has(cfg)), 1) for column, has in WHOLE.items()}
    return found


def draw():
    counts = grid()
    columns = [(group, column) for group, names in LAYER.items() for column in names]
    columns += [("model", column) for column in WHOLE]
    figure = pyplot().figure(figsize=(10, 5.7))
    axes = figure.add_axes((0.195, 0.06, 0.795, 0.71))
    for y, own in enumerate(counts.values()):
        for x, (_, column) in enumerate(columns):
            n, depth = own[column]
            color = "#ffffff" if not n else EVERY if n == depth else SOME
            axes.add_patch(pyplot().Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=color, edgecolor="#bbb"))
            if 0 < n < depth:
                axes.text(x, y, str(n), ha="center", va="center", fontsize=8)
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(counts) - 0.5, -0.5))
    axes.xaxis.tick_top()
    labels = [column.strip() for _, column in columns]
    axes.set_xticks(range(len(columns)), labels, rotation=90, fontsize=8.5)
    for label, (_, column) in zip(axes.get_xticklabels(), columns, strict=True):
        label.set_fontweight("normal" if column.startswith(" ") else "bold")
    axes.set_yticks(range(len(counts)), counts, fontsize=8.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    groups = [group for group, _ in columns]
    for group in dict.fromkeys(groups):
        first, n = groups.index(group), groups.count(group)
        axes.axvline(first - 0.5, color="#333", linewidth=1.2)
        axes.text(first + n / 2 - 0.5, len(counts) - 0.1, group, ha="center", va="center", fontsize=9)
    handles = [pyplot().Rectangle((0, 0), 1, 1, facecolor=color, edgecolor="#bbb") for color in (EVERY, SOME)]
    legend = "all layers", "that many layers"
    figure.legend(handles, legend, loc="upper left", fontsize=9, frameon=False)
    return figure


if __name__ == "__main__":
    redraw("families")
