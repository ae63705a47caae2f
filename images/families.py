"""Which records the layers of each family have: read from the Configs of one model per family."""

import dataclasses
from collections import Counter
from collections.abc import Iterator

from images.drawing import pyplot
from model import LayerKind
from planner.published_models import read_model

FAMILIES = {
    "llama (Llama 3.1 8B)": "llama3.1-8b",
    "smollm3 (3B)": "smollm3-3b",
    "llama4_text (Scout)": "llama4-scout",
    "muse_glimmer_text (30B)": "muse-glimmer-30b",
    "muse_spark_text (816B)": "muse-spark-816b",
    "mistral (7B v0.1)": "mistral-7b",
    "ministral3 (8B)": "ministral3-8b",
    "mixtral (8x7B)": "mixtral-8x7b",
    "qwen2 (Qwen 2.5 7B)": "qwen2.5-7b",
    "seed_oss (36B)": "seed-oss-36b",
    "qwen3 (8B)": "qwen3-8b",
    "qwen3_moe (30B-A3B)": "qwen3-30b-a3b",
    "qwen3_next (80B-A3B)": "qwen3-next-80b-a3b",
    "qwen3_5_text (27B)": "qwen3.5-27b",
    "qwen3_5_moe_text (35B-A3B)": "qwen3.5-35b-a3b",
    "gemma (7B)": "gemma-7b",
    "gemma3_text (4B)": "gemma3-4b",
    "gemma4_text (E2B)": "gemma4-e2b",
    "gemma4_text (31B)": "gemma4-31b",
    "gemma4_text (26B-A4B)": "gemma4-26b-a4b",
    "gemma4_unified_text (12B)": "gemma4-12b",
    "gpt2 (124M)": "gpt2",
    "gpt_oss (20b)": "gpt-oss-20b",
    "glm (GLM-4-9B)": "glm-4-9b",
    "glm4_moe (GLM-4.7)": "glm-4.7",
    "glm4_moe_lite (4.7-Flash)": "glm-4.7-flash",
    "deepseek_v3 (V3, R1)": "deepseek-v3",
    "kimi_k2 (K2)": "kimi-k2",
    "olmo3 (7B)": "olmo3-7b",
    "minimax_m2 (M2)": "minimax-m2",
}
# Of each group, the columns: a label, and which trait of a layer or of the model it shows.
COLUMNS = {
    "attention": {
        "Attention": "attention: Attention", "  bias": "attention.bias", "  qk_norm": "attention.qk_norm",
        "  query_scale": "attention.query_scale", "  scale": "attention.scale",
        "  gate": "attention: GatedAttention", "  sinks": "attention: SinkAttention",
        "  joint norm": "attention: JointNormAttention",
        "  shares_kv": "shares_kv", "LatentAttention": "attention: LatentAttention",
        "GatedDeltaNet": "attention: GatedDeltaNet",
    },
    "mask": {
        "Full": "mask: Full", "BlockLocal": "mask: BlockLocal", "Window": "mask: Window",
        "Recurrent": "mask: Recurrent",
    },
    "positions": {
        "Rope": "rope", "  interleaved": "rope.interleaved", "  YaRN": "rope.scaling: YarnScaling",
        "  part of a head": "part of a head",
    },
    "feed-forward": {
        "MLP": "feed_forward: MLP", "  GeGLU": "feed_forward.activation: GeGLU",
        "GeluMLP": "feed_forward: GeluMLP", "MoE": "feed_forward: MoE", "  shared": "feed_forward.shared",
        "  biases": "feed_forward.bias", "  softmax router": "feed_forward.router.score: softmax",
        "  groups": "feed_forward.router: GroupLimitedRouter",
    },
    "norm": {
        "Norm": "norm: Norm", "  offset": "norm.offset", "LayerNorm": "norm: LayerNorm",
        "post_norm": "residual.norm",
    },
    "model": {
        "LearnedPositions": "position_embedding: LearnedPositions", "embedding_scale": "embedding_scale",
        "embedding_norm": "embedding_norm", "layer_inputs": "layer_inputs", "logit_softcap": "logit_softcap",
        "tied_embeddings": "tied_embeddings",
    },
}  # fmt: skip
EVERY, SOME = "#4c78a8", "#9ecae1"


def traits(record, path: str = "") -> Iterator[str]:
    """What a layer or a model has: each field that is set, `attention.bias`, and its class or its word.

    `attention: SinkAttention` and `feed_forward.router.score: softmax`, for example.
    """
    for name, x in vars(record).items():
        if x:
            yield path + name
            words = [x] if isinstance(x, str) else [base.__name__ for base in type(x).__mro__]
            yield from (f"{path}{name}: {word}" for word in words)
        if dataclasses.is_dataclass(x):
            yield from traits(x, f"{path}{name}.")
    if isinstance(record, LayerKind) and record.rope and record.rope.width < record.attention.slot_layout.key:
        yield "part of a head"


def grid() -> dict[str, dict[str, tuple[int, int]]]:
    """{family: {column: (how many layers have it, layers)}}; of a whole model, (0 or 1, 1)."""
    found = {}
    for family, name in FAMILIES.items():
        cfg, own = read_model(name), {}
        for group, columns in COLUMNS.items():
            records = [cfg] if group == "model" else cfg.layers
            counts = Counter(trait for record in records for trait in set(traits(record)))
            own |= {column: (counts[trait], len(records)) for column, trait in columns.items()}
        found[family] = own
    return found


def draw():
    counts = grid()
    columns = [(group, column) for group, names in COLUMNS.items() for column in names]
    figure = pyplot().figure(figsize=(10, 6.2))
    axes = figure.add_axes((0.195, 0.055, 0.795, 0.735))
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
