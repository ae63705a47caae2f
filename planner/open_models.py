"""Which open models there are on the Hugging Face hub, and what runs them: the table of docs/models.md.

    python3 -m planner.open_models    prints its tables

Nothing is compiled. A model fits where its weights, and a cache of 8 rows of 4096 positions, leave a tenth of
the memory. Its speed is the most that the data sheets allow: the time to read weights and cache once, and the
collectives, on the mesh that main.py would take for these rows.
"""

import dataclasses
import functools
import sys
from collections.abc import Iterable, Iterator

import jax

from deployment.chips import CHIPS, Topology
from deployment.floor import needed
from deployment.job import Job
from deployment.memory import HEADROOM, Deployment
from deployment.placement import Choice, rank_meshes
from feedback.errors import UserError
from planner.published_models import read_model
from planner.topologies import find_topology
from quantize import FORMATS
from sharding.mesh import make_mesh

ROWS, POSITIONS = 8, 4096
LAPTOP = 16e9  # bytes
TPUS = {"v5e-8": "v5e:2x4", "v6e-8": "v6e:2x4", "v5e-16": "v5e:4x4", "v5e-64": "v5e:8x8"}
GPUS = {"one H100": 1, "8 H100": 8}
COLUMNS = ("one H100", *TPUS)  # the smallest first
SHOWN = {"none": "bfloat16"}
LOADS = (
    ("qwen3-8b", "one H100"), ("qwen3-8b", "v5e-8"), ("qwen3-32b", "one H100"), ("qwen3-32b", "v6e-8"),
    ("qwen3-30b-a3b", "one H100"), ("qwen3-30b-a3b", "v5e-8"), ("qwen3-30b-a3b", "v5e-16"),
    ("llama3.1-70b", "8 H100"), ("llama3.1-70b", "v5e-16"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class OpenModel:
    """hub: its id. name: in published_models.MODELS. token: whether the hub asks for an account's token.

    formats: in which its weights are held, the most exact first.
    """

    hub: str
    name: str
    token: bool = False
    formats: tuple[str, ...] = ("none", "int8", "int4")


MXFP4 = ("mxfp4",)  # in which its experts are published
OPEN_MODELS = (
    OpenModel("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m"),
    OpenModel("HuggingFaceTB/SmolLM2-360M-Instruct", "smollm2-360m"),
    OpenModel("HuggingFaceTB/SmolLM2-1.7B-Instruct", "smollm2-1.7b"),
    OpenModel("Qwen/Qwen3-0.6B", "qwen3-0.6b"),
    OpenModel("Qwen/Qwen3-1.7B", "qwen3-1.7b"),
    OpenModel("Qwen/Qwen3-4B", "qwen3-4b"),
    OpenModel("Qwen/Qwen3-8B", "qwen3-8b"),
    OpenModel("Qwen/Qwen3-14B", "qwen3-14b"),
    OpenModel("Qwen/Qwen3-32B", "qwen3-32b"),
    OpenModel("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
    OpenModel("Qwen/Qwen3-235B-A22B", "qwen3-235b-a22b"),
    OpenModel("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3-next-80b-a3b"),
    OpenModel("Qwen/Qwen3.5-0.8B", "qwen3.5-0.8b"),
    OpenModel("Qwen/Qwen3.5-9B", "qwen3.5-9b"),
    OpenModel("Qwen/Qwen3.5-27B", "qwen3.5-27b"),
    OpenModel("Qwen/Qwen3.5-35B-A3B", "qwen3.5-35b-a3b"),
    OpenModel("Qwen/Qwen3.5-397B-A17B", "qwen3.5-397b-a17b"),
    OpenModel("Qwen/Qwen2.5-0.5B-Instruct", "qwen2.5-0.5b"),
    OpenModel("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
    OpenModel("Qwen/Qwen2.5-14B-Instruct", "qwen2.5-14b"),
    OpenModel("Qwen/Qwen2.5-32B-Instruct", "qwen2.5-32b"),
    OpenModel("Qwen/Qwen2.5-72B-Instruct", "qwen2.5-72b"),
    OpenModel("HuggingFaceTB/SmolLM3-3B", "smollm3-3b"),
    OpenModel("allenai/Olmo-3-7B-Instruct", "olmo3-7b"),
    OpenModel("mistralai/Mistral-Small-3.1-24B-Instruct-2503", "mistral-small-3.1-24b"),
    OpenModel("ByteDance-Seed/Seed-OSS-36B-Instruct", "seed-oss-36b"),
    OpenModel("openai/gpt-oss-20b", "gpt-oss-20b", formats=MXFP4),
    OpenModel("openai/gpt-oss-120b", "gpt-oss-120b", formats=MXFP4),
    OpenModel("zai-org/GLM-4.7-Flash", "glm-4.7-flash"),
    OpenModel("zai-org/GLM-4.5-Air", "glm-4.5-air"),
    OpenModel("zai-org/GLM-4.7", "glm-4.7"),
    OpenModel("MiniMaxAI/MiniMax-M2", "minimax-m2"),
    OpenModel("deepseek-ai/DeepSeek-R1", "deepseek-r1"),
    OpenModel("moonshotai/Kimi-K2-Instruct", "kimi-k2"),
    OpenModel("moonshotai/Kimi-K2.5", "kimi-k2.5"),
    OpenModel("meta-models/Muse-Spark-Open-816B-A42B", "muse-spark-816b"),
    OpenModel("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b", token=True),
    OpenModel("mistralai/Mixtral-8x22B-Instruct-v0.1", "mixtral-8x22b", token=True),
    OpenModel("google/gemma-3-1b-it", "gemma3-1b", token=True),
    OpenModel("google/gemma-3-4b-it", "gemma3-4b", token=True),
    OpenModel("google/gemma-3-12b-it", "gemma3-12b", token=True),
    OpenModel("google/gemma-3-27b-it", "gemma3-27b", token=True),
    OpenModel("google/gemma-4-E2B-it", "gemma4-e2b", token=True),
    OpenModel("google/gemma-4-E4B-it", "gemma4-e4b", token=True),
    OpenModel("google/gemma-4-12B-it", "gemma4-12b", token=True),
    OpenModel("google/gemma-4-26B-A4B-it", "gemma4-26b-a4b", token=True),
    OpenModel("google/gemma-4-31B-it", "gemma4-31b", token=True),
    OpenModel("meta-llama/Llama-3.2-1B-Instruct", "llama3.2-1b", token=True),
    OpenModel("meta-llama/Llama-3.2-3B-Instruct", "llama3.2-3b", token=True),
    OpenModel("meta-llama/Llama-3.1-8B-Instruct", "llama3.1-8b", token=True),
    OpenModel("meta-llama/Llama-3.3-70B-Instruct", "llama3.1-70b", token=True),
    OpenModel("meta-llama/Llama-3.1-405B-Instruct", "llama3.1-405b", token=True),
    OpenModel("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4-scout", token=True),
    OpenModel("meta-llama/Llama-4-Maverick-17B-128E-Instruct", "llama4-maverick", token=True),
)


@functools.cache
def machine(name: str) -> Topology:
    """The devices of a machine, by its name. CPUs stand for GPUs, whose arrays are not padded either."""
    if name in TPUS:
        return find_topology(TPUS[name])
    return Topology(name, CHIPS["h100"], (), tuple(jax.devices("cpu")[:1]) * GPUS[name])


def job_of(name: str, format: str, platform: str, rows: int = ROWS, positions: int = POSITIONS) -> Job:
    """A decode step with weights in the format of that name, as the platform holds it."""
    cfg, held = read_model(name), FORMATS[format]
    kv_dtype = "float32" if platform == "cpu" else "bfloat16"
    return Job(cfg, rows, min(positions, cfg.max_positions), held and held.on(platform), kv_dtype)


def best_mesh(job: Job, topology: Topology) -> Choice | None:
    """The mesh that main.py takes, or None if none fits."""
    best = rank_meshes(job, topology, have=topology.chip.hbm * (1 - HEADROOM))[0]
    return best if best.fits else None


def weight_bytes(name: str, format: str) -> int:
    """Of all weights in the format of that name, on one device."""
    cfg = read_model(name)
    mesh = make_mesh(cfg, devices=jax.devices("cpu")[:1])
    return Deployment(cfg, mesh, "bfloat16", FORMATS[format], "bfloat16").weight_bytes()


def on_laptop(name: str) -> float | None:
    """Bytes that weights in int8 and one row need there, or None if that is too much."""
    job = job_of(name, "int8", "cpu", rows=1)
    mesh = make_mesh(job.cfg, devices=jax.devices("cpu")[:1])
    stored = sum(size for *_, size in job.shards(mesh))
    return stored if stored <= LAPTOP * (1 - HEADROOM) else None


def on_machine(model: OpenModel, name: str) -> tuple[str, float] | None:
    """(the most exact format that fits, tokens per second and row at most), or None if none fits."""
    for format in model.formats:
        if best := best_mesh(job_of(model.name, format, platform_of(name)), machine(name)):
            return format, 1 / best.estimated_step_seconds
    return None


def platform_of(name: str) -> str:
    return "tpu" if name in TPUS else "gpu"


def model_cells(model: OpenModel) -> list[str]:
    """A model's row of the table of models."""
    laptop = on_laptop(model.name)
    sizes = [f"{weight_bytes(model.name, format) / 1e9:.1f}" for format in ("none", "int8", "int4")]
    cells, formats = [f"{laptop / 1e9:.1f} GB" if laptop else "-"], ["int8"] if laptop else []
    for name in COLUMNS:
        found = on_machine(model, name)
        formats += [found[0]] if found else []
        cells.append(f"{SHOWN.get(found[0], found[0])}: {found[1]:.0f}" if found else "-")
    option = f" --quantize {formats[0]}" if formats[0] in ("int8", "int4") else ""
    command = f"`python3 main.py --checkpoint {model.hub}{option} --serve`"
    return [model.hub + " *" * model.token, *sizes, *cells, command]


def load_cells(name: str, where: str, positions: int) -> list[str]:
    """A row of the table of loads: the most rows of so many positions that fit, and what they give."""
    topology, fitting = machine(where), None
    for rows in (2**i for i in range(10)):
        job = dataclasses.replace(job_of(name, "int8", platform_of(where), rows, positions), kv_dtype="int8")
        if best := best_mesh(job, topology):
            fitting = job, best
    if not fitting:
        return [name, where, f"{positions:,}", "-", "-", "-", "-", "-"]
    job, best = fitting
    seconds, mesh = best.estimated_step_seconds, best.make(job.cfg, topology)
    halved = dataclasses.replace(job, context=job.context // 2)  # what a token of the prompt sees on average
    _, flops = needed(halved.prefill(positions, mesh), mesh)
    prompt = flops / topology.chip.flops
    numbers = f"{job.batch}", f"{1 / seconds:.0f}", f"{job.batch / seconds:,.0f}", f"{prompt * 1e3:,.0f} ms"
    return [name, where, f"{positions:,}", str(best), *numbers]


def lines(heads: Iterable[str], rows: Iterable[list[str]]) -> Iterator[str]:
    """A table in Markdown."""
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(tuple(heads)) + "|"
    for cells in rows:
        yield f"| {' | '.join(cells)} |"


def models_table() -> Iterator[str]:
    heads = "model", "bfloat16", "int8", "int4", "laptop", *COLUMNS, "command"
    return lines(heads, map(model_cells, OPEN_MODELS))


def loads_table() -> Iterator[str]:
    heads = "model", "machine", "positions", "mesh", "rows", "tokens/s, a row", "all rows", "prompt, at least"
    return lines(heads, (load_cells(name, where, n) for name, where in LOADS for n in (2048, 8192, 32768)))


if __name__ == "__main__":
    try:
        for line in (*models_table(), "", *loads_table()):
            print(line, flush=True)
    except UserError as e:
        sys.exit(f"error: {e}")
