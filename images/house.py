"""The rooms of this repository, in the order of their imports."""

from images.drawing import pyplot
from tests.test_rooms import ORDER

WHAT = {
    "main": "the commands: generate and serve, convert, plan, measure", "convert_checkpoint": "", "plan": "",
    "benchmarks": "",
    "planner": "what a model needs on TPUs that are not here: memory, bytes, collectives, time",
    "images": "pictures, drawn from data and from the code",
    "terminal": "options, prompts, chat, one-line errors",
    "server": "the OpenAI-compatible API and the chat page",
    "generation": "from a prompt to a reply, for the terminal, Python and the server",
    "deployment": "a model on these devices: mesh, memory, compiled programs",
    "serving": "the engine: continuous batching, prefix cache, speculation",
    "conversation": "messages, templates, tools and grammars, text from tokens",
    "checkpoints": "any published checkpoint -> weights on a mesh",
    "distributed": "several hosts: joining, agreeing, noticing that one is gone",
    "families": "a file per family: config.json -> the records of model.py",
    "model": "the model: forward, prefill, decode_step; layers; weights, cache",
    "sharding": "meshes, which letter is split over which axis, prefill by columns",
    "ragged_attention": "attention by platform, and the TPU's kernel",
    "ops": "kernels for CPU, GPU and TPU, and the reference of each",
    "quantize": "a class per number format: int8, int4, fp8",
    "feedback": "errors that a user can correct, and progress",
}  # fmt: skip
FILES = ("main", "convert_checkpoint", "plan", "model", "ragged_attention", "quantize")
COMMANDS, MODEL, OTHER = "#f9dcb4", "#cfe0f1", "#eeeeee"


def draw():
    """One line per room or group of rooms: each imports only rooms below it."""
    from matplotlib.patches import FancyBboxPatch

    step, left = 30, 20
    figure = pyplot().figure(figsize=(9, (step * len(ORDER) + 44) / 100))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 900), ylim=(step * len(ORDER) + 44, 0))
    axes.axis("off")
    for i, names in enumerate(ORDER):
        x, y = left, 14 + step * i
        for name in sorted(names, key=list(WHAT).index):
            label = f"{name}.py" if name in FILES else f"{name}/"
            width = 26 + 7.6 * len(label)
            color = MODEL if name == "model" else COMMANDS if i == 0 else OTHER
            style = dict(facecolor=color, edgecolor="#555", lw=0.8)
            axes.add_patch(FancyBboxPatch((x, y), width, 19, "round,pad=1,rounding_size=4", **style))
            weight = "bold" if name == "model" else "normal"
            axes.text(x + width / 2, y + 10, label, ha="center", va="center", fontsize=9, weight=weight)
            x += width + 10
        what = next(WHAT[name] for name in WHAT if name in names)
        axes.text(max(x, 250) + 6, y + 10, what, va="center", fontsize=9, color="#333")
    axes.annotate("", (9, step * len(ORDER) + 4), (9, 14), arrowprops=dict(arrowstyle="-|>", color="#555"))
    rule = "Each line imports only from the lines below it."
    axes.text(left, step * len(ORDER) + 28, rule, va="center", fontsize=9, color="#555")
    return figure
