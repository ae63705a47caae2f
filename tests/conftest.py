"""Eight virtual CPU devices, or DEVICES, requested before jax is imported, and what the tests share."""

import os
from importlib.metadata import version

os.environ["JAX_PLATFORMS"] = "cpu"
# The tests spend their time compiling. Without optimized machine code that takes half as long, without the
# newer fusion emitters half of that again, and a tenth less if a program is compiled in one part instead of
# many side by side. HLO is optimized as usual.
FAST = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if version("jaxlib").startswith("0.10."):  # later versions do not have this flag
    FAST += " --xla_cpu_use_fusion_emitters=false"
DEVICES = os.environ.get("DEVICES", "8")
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES} {FAST}"
os.environ["HF_HUB_OFFLINE"] = "1"

import dataclasses
import functools
import pathlib
import sys
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

import families.registry  # noqa: F401  it imports all families
import model
from distributed.exchange import warn
from families.llama4 import QueryScale
from families.rope_scaling import Llama3Scaling
from quantize import Format
from serving.engine import Engine
from serving.needed import demand_of, needed_programs, warm_up
from serving.programs import Programs
from serving.requests import Answer, Request
from serving.reuse import with_room
from serving.scheduler import PrefillLimits
from sharding import slots
from sharding.arrays import abstract
from sharding.mesh import make_mesh
from sharding.shapes import check_shapes
from sharding.stages import in_stages
from terminal.command_line import run

# Tests do not use the cache in which main.py keeps compiled programs. Also, in a process that had compiled
# thousands of programs, jax 0.10.2 crashed while it wrote one into the cache.
jax.config.update("jax_enable_compilation_cache", False)

# Of these functions, arrays are compared with the shapes in their docstrings.
FAMILIES = [module for name, module in sorted(sys.modules.items()) if name.startswith("families.")]
CHECKED_FUNCTIONS = check_shapes(model, slots, *FAMILIES)

CHECKPOINTS = pathlib.Path(__file__).parent / "checkpoints"
sys.path.append(str(CHECKPOINTS))  # questions.py, of which the tiny models were trained

# (data, expert, tensor) degrees.
MESHES = {
    "1": (1, 1, 1),
    "dp8": (8, 1, 1),
    "tp8": (1, 1, 8),
    "ep2-tp4": (1, 2, 4),
    "ep4-tp2": (1, 4, 2),
    "dp2-ep2-tp2": (2, 2, 2),
}


def pytest_addoption(parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests marked deep, which take long")


# The test files that take longest start first: else one worker would be left with one at the end.
LONGEST = (
    "plan answers generation meshes conversion speculation hosts chat kernels gpu reuse_search server "
    "grammar command_line transformers families attention speed trained sampling cpu experts quality"
).split()


def pytest_xdist_auto_num_workers(config) -> int:
    """The tests of one file run in this process, those of several files in one process per core, up to 4."""
    files = {argument.partition("::")[0] for argument in config.args}
    one = len(files) == 1 and pathlib.Path(*files).is_file()
    return 0 if one or config.option.collectonly else min(len(os.sched_getaffinity(0)), 4)


def pytest_collection_modifyitems(config, items) -> None:
    rank = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
    deep = [] if config.getoption("--all") else [item for item in items if item.get_closest_marker("deep")]
    if deep:
        config.hook.pytest_deselected(items=deep)
        items[:] = [item for item in items if item not in deep]


def pytest_terminal_summary(terminalreporter, config) -> None:
    """Skipped tests are listed with their reasons (-rs, in pyproject.toml); deselected ones are not."""
    if not config.getoption("--all"):
        terminalreporter.write_line("The tests marked deep did not run; --all runs them, too.")


@pytest.fixture(autouse=True, scope="module")
def programs_of_one_file():
    """Free the programs that the tests of one file compiled: those of all files take gigabytes."""
    yield
    jax.clear_caches()


MAPS = pathlib.Path("/proc/self/maps")  # the parts of this process's memory, a line each; on Linux
MOST_MAPS = 25_000  # Linux allows 65,530, and XLA crashes beyond; a test's programs take up to a few thousand


@pytest.fixture(autouse=True)
def programs_of_few_tests():
    """Free the programs also within a file, before the process has more parts of memory than Linux allows."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


def mesh_of(cfg: model.Config, name: str = "1", copies: int = 1):
    """copies: of each key/value head, see sharding/mesh.py."""
    data, expert, tensor = (MESHES | {"dp2-tp4": (2, 1, 4)})[name]
    return make_mesh(cfg, data, expert, tensor, jax.devices()[: data * expert * tensor], copies=copies)


class Kind(NamedTuple):
    """A layer of Llama 4, in short."""

    rope: bool = True
    chunk: int | None = None
    moe: bool = False
    window: int | None = None  # in the place of a chunk


def mask_of(kind: Kind) -> model.Full | model.BlockLocal | model.Window:
    """A window's ring is little longer than the window, so that short texts go round."""
    if kind.window:
        return model.Window(kind.window, spare=8)
    return model.BlockLocal(kind.chunk) if kind.chunk else model.Full()


EVERY_KIND = Kind(chunk=8, moe=True), Kind(chunk=8), Kind(rope=False, moe=True)


def llama4_config(
    layers=EVERY_KIND, D=32, K=2, G=5, H=8, F=44, M=24, E=4, A=1, V=101, **changes
) -> model.Config:
    """Every kind of Llama 4 layer at once, and sizes that 8 devices do not divide: V, F and G are padded."""
    norm, heads = model.Norm(1e-5), model.Attention(K, G, H)
    rotary = dataclasses.replace(heads, qk_norm=model.Norm(1e-5, weight=False))
    other = dataclasses.replace(heads, query_scale=QueryScale(0.1, 4.0))
    experts = model.MoE(E, A, M, model.Router("sigmoid", scales="input"), model.MLP(M))
    kinds = tuple(
        model.LayerKind(
            rotary if kind.rope else other,
            experts if kind.moe else model.MLP(F),
            norm,
            mask_of(kind),
            model.Rope(1e4, H, interleaved=True) if kind.rope else None,
        )
        for kind in layers
    )
    return model.Config(**dict(D=D, V=V, layers=kinds, norm=norm, max_positions=4096) | changes)


def llama3_config(D=32, K=8, G=1, H=8, F=64, V=101, depth=2, **changes) -> model.Config:
    norm, rope = model.Norm(1e-5), model.Rope(1e4, H, Llama3Scaling(8.0, 1.0, 4.0, 16.0))
    kind = model.LayerKind(model.Attention(K, G, H), model.MLP(F), norm, rope=rope)
    sizes = dict(D=D, V=V, layers=(kind,) * depth, norm=norm, max_positions=4096)
    return model.Config(**sizes | changes)


def with_masks(cfg: model.Config, change) -> model.Config:
    """The same model with change(mask) in each layer."""
    kinds = (dataclasses.replace(kind, mask=change(kind.mask)) for kind in cfg.layers)
    return dataclasses.replace(cfg, layers=tuple(kinds))


def with_short_rings(cfg: model.Config) -> model.Config:
    """The same model: windows have hardly any room beside them, states a little for drafts and prefixes."""
    windows = with_masks(
        cfg, lambda mask: dataclasses.replace(mask, spare=6) if isinstance(mask, model.Window) else mask
    )
    return with_room(windows, drafts=6, kept=2)


def with_chunks(cfg: model.Config, size: int) -> model.Config:
    """The same model with other chunks."""
    return with_masks(cfg, lambda mask: model.BlockLocal(size) if mask.ring else mask)


def rings(masks) -> set[int]:
    """The sizes of those that are rings."""
    return {mask.ring for mask in masks if getattr(mask, "ring", None)}


@functools.cache
def weights_of_one_device(cfg: model.Config, format: Format | None) -> model.Weights:
    return jax.tree.map(np.asarray, model.init_weights(jax.random.key(0), cfg, mesh_of(cfg), format=format))


def random_weights(cfg: model.Config, mesh, format: Format | None = None) -> model.Weights:
    """model.init_weights of key 0, which takes long to compile for each mesh: computed on one device, and put
    between the zeros of the others.
    """

    def place(x: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
        padded = np.pad(x, [(0, n) for n in np.subtract(like.shape, x.shape)])
        return jax.device_put(padded, like.sharding)

    stages, weights = mesh.shape["stage"], weights_of_one_device(cfg, format)
    if stages > 1:
        n = len(cfg.layers) // stages
        layers = [jax.tree.map(lambda *x: np.stack(x), *weights.layers[i::n]) for i in range(n)]
        weights = dataclasses.replace(weights, layers=layers)
    tree = abstract(in_stages(model.weight_infos(cfg, format), stages), mesh, jnp.float32)
    return jax.tree.map(place, weights, tree)


def dequantize(x, axes) -> np.ndarray:
    """What a QuantizedArray stands for, in float32: its values times its scale, by numpy."""
    return np.asarray(x.values, np.float32) * np.expand_dims(np.asarray(x.scale, np.float32), axes)


@pytest.fixture
def compiled():
    """The list of jax's events of tracing and compiling, as they happen in this thread.

    A server that another test has ended may still be compiling in its own thread.
    """
    events, thread = [], threading.get_ident()

    def hear(event: str, *_, **__) -> None:
        if event.startswith("/jax/core/compile") and threading.get_ident() == thread:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(hear)
    jax.jit(lambda: 0)()
    assert events  # or the fixture does not see what it is to see
    yield events
    jax.monitoring.unregister_event_duration_listener(hear)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """name -> (folder of a random model of this family, the model)."""
    from test_transformers import reference_model  # here, so that few tests wait for transformers

    @functools.cache
    def make(name: str):
        folder, reference = tmp_path_factory.mktemp(name), reference_model(name)
        reference.save_pretrained(folder)
        return folder, reference

    return make


@pytest.fixture
def own_cache(monkeypatch, tmp_path) -> None:
    """A cache of files that is empty, and warnings that are given once are given again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    warn.cache_clear()


@pytest.fixture(params=("tiny-llama3", "tiny-llama4"))
def tiny(request) -> pathlib.Path:
    return CHECKPOINTS / request.param


@pytest.fixture
def interpret(monkeypatch) -> pltpu.InterpretParams:
    """A CPU interprets TPU kernels: unwritten memory is NaN, a race or a read out of bounds is a failure."""
    states, state = [], interpret_pallas_call.RaceDetectionState

    def recorded(**options):
        states.append(state(**options))
        return states[-1]

    monkeypatch.setattr(interpret_pallas_call, "RaceDetectionState", recorded)
    yield pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
    assert states and not any(x.races_found for x in states)


def engine_of(programs, requests, longest=0, option_sets=(), **options) -> Engine:
    """An engine with all programs that such requests need, and none of them is left to compile."""
    demand, limits = demand_of(requests, longest, option_sets), options.get("limits", PrefillLimits())
    needed = needed_programs(programs, demand, None, limits, "prefix_cache_bytes" in options)
    warm_up(programs, needed)
    return Engine(programs, needed, **options)


def generate(
    weights, prompts, cfg, mesh, new, max_len, kv_dtype, stop=frozenset(), score=False, **options
) -> list[Answer]:
    """The answers to prompts (token ids) of up to `new` tokens, of all or of each; greedy."""
    new = [new] * len(prompts) if isinstance(new, int) else new
    requests = [Request(prompt, n, stop=stop, score=score) for prompt, n in zip(prompts, new, strict=True)]
    programs = Programs(weights, cfg, mesh, min(len(requests), 16), max_len, kv_dtype, **options)
    engine = engine_of(programs, requests)
    answers = [engine.add(request) for request in requests]
    while engine.busy:
        engine.advance()
    return answers


# Options of main.py for the 8 virtual devices: each holds the whole model.
ONE_EACH = ["--dp", "8", "--tp", "1"]


def invoke(monkeypatch, capsys, program, *arguments) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command, run in this process."""
    monkeypatch.setattr(sys, "argv", [program.__file__, *map(str, arguments)])
    # jax.distributed.initialize would have to come before the first use of jax, which is long past.
    monkeypatch.setattr(program, "join_hosts", lambda args: None, raising=False)
    code = 0
    try:
        run(program.main)
    except SystemExit as e:
        code = e.code
    return code, *capsys.readouterr()


@pytest.fixture
def client(server):
    """OpenAI's client of the server that the module's own fixture `server` starts."""
    import openai  # takes a second, which most tests need not spend

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
