"""From the name of a checkpoint to the programs of a batch: what main.py and generation/llm.py share.

`open_models` opens the checkpoint (and that of a draft model) and chooses its mesh and number formats;
`load_while_compiling` loads the weights, and `make_programs` makes the Programs of models and weights.
"""

import concurrent.futures
import contextlib
import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.loading import load
from conversation.text import has_vocabulary
from deployment.ahead import ProgramsOnShapes
from deployment.chips import topology_of
from deployment.job import Job
from deployment.memory import CPU_ROWS, DEFAULT_ROWS, ROW_POSITIONS, Deployment, device_memory
from deployment.placement import (
    choose_dtypes,
    choose_format,
    choose_mesh,
    rank_meshes,
    set_precision,
    slice_count,
)
from distributed.exchange import agree, process_count
from feedback.errors import UserError
from model import Weights
from serving.programs import Programs
from serving.reuse import with_room
from serving.speculation import DraftModel, PromptLookup, mesh_for_draft
from sharding.mesh import STAGE, degrees

COMPARED_TENSORS = 256  # of a checkpoint, whose bytes all processes compare
SPARE = 1  # tokens that states can take back without drafts: a row with a grammar goes back by one
WORTH_SAYING = 1.1  # how much longer a step takes on the user's mesh than on another one
Log = Callable[[str], None]
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Which model to run, and how. The fields are the options of main.py with the same names."""

    checkpoint: str
    dtype: str | None = None
    quantize: str | None = None
    kv_cache_dtype: str | None = None
    dp: int | None = None
    ep: int | None = None
    tp: int | None = None
    pp: int | None = None
    draft: str | None = None
    lookup: bool = False
    guesses: int = 4
    kept_states: int = 2
    rows: int | None = None
    max_len: int | None = None


def open_models(options: ModelOptions, n_devices: int, log: Log) -> list[Deployment]:
    """The model on a mesh of the first n_devices, and after it the draft model, if there is one.

    Lets matmuls be as exact as the models' dtype. Raises UserError if an option does not suit the model, or
    if the checkpoints of several processes differ.
    """
    checkpoint = open_agreed(options, "checkpoint")
    models = [deploy(options, checkpoint, partial(mesh_for, options, n_devices, log=log), log)]
    if options.draft:
        draft, mesh = open_draft(options, models[0])
        models.append(deploy(options, draft, lambda job: mesh, log))
    for x in models:
        set_precision(x.dtype)
        types = f"activations {x.dtype}, weights {x.format or x.dtype}, cache {x.kv_dtype}"
        logger.info("%s: mesh %s, %s", x.checkpoint.folder, degrees(x.mesh), types)
    return models


def mesh_for(options: ModelOptions, n_devices: int, job: Job, log: Log) -> Mesh:
    """The mesh for a job on the first n_devices, of the degrees that the user gives, else the best.

    `log` is told which one it is, and what would be better than what the user gives.
    """
    slices, have = slice_count(), device_memory()
    topology = topology_of(jax.devices()[:n_devices], slices)
    one_stage = options.draft or options.lookup
    any_stages = (1,) if one_stage else tuple(sorted({1, slices}))
    given = options.dp, options.ep, options.tp
    stages = (options.pp,) if options.pp else any_stages
    mesh, placed = choose_mesh(job, topology, given, stages, have)
    if process_count() > 1 or (topology.chip and n_devices > 1):
        where = f" in {slices} slices that a slower network joins" * (slices > 1)
        copies = f", {mesh.copies} copies of each cache" * (mesh.copies > 1)
        log(f"mesh of {n_devices} devices{where}: {mesh}{copies}")
    if topology.chip and (any(given) or options.pp):
        best = rank_meshes(placed, topology, stages=any_stages, have=have)[0]
        if best.fits and best.cost < mesh.cost / WORTH_SAYING:
            log(f"{best} would take an estimated {1 - best.cost / mesh.cost:.0%} less time in each step")
    return mesh.make(job.cfg, topology)


def open_agreed(options: ModelOptions, option: str) -> Checkpoint:
    """The checkpoint that an option names. Raises UserError if it differs between the processes."""
    checkpoint = open_checkpoint(getattr(options, option))
    if process_count() > 1:
        checksums = checkpoint.checksums(COMPARED_TENSORS)
        agree(
            {f"the checksum of --{option}'s {what}": x for what, x in checksums.items()}, "copy one of them"
        )
    return checkpoint


def open_draft(options: ModelOptions, target: Deployment) -> tuple[Checkpoint, Mesh]:
    """The draft model's checkpoint and mesh. Raises UserError if it does not suit the model."""
    draft, folder = open_agreed(options, "draft"), target.checkpoint.folder
    if draft.config.V != target.cfg.V or not has_vocabulary(draft.folder, target.tokenizer, folder):
        raise UserError(f"--draft {options.draft}: its tokenizer is not that of {options.checkpoint}")
    try:
        return draft, mesh_for_draft(draft.config, target.mesh)
    except ValueError as e:
        raise UserError(f"--draft {options.draft}: {e}") from None


def deploy(
    options: ModelOptions, checkpoint: Checkpoint, place: Callable[[Job], Mesh], log: Log
) -> Deployment:
    """The model in the number formats that the user asks for, or else in the default ones.

    place: chooses its mesh, for the rows that are planned.
    """
    step_tokens = 1 + options.guesses if options.draft or options.lookup else 1
    cfg = with_room(checkpoint.config, max(step_tokens - 1, SPARE), options.kept_states)
    format = choose_format(options.quantize, checkpoint, log)
    dtype, kv_dtype = choose_dtypes(options.dtype, options.kv_cache_dtype, format)
    rows = options.rows or (CPU_ROWS if jax.default_backend() == "cpu" else DEFAULT_ROWS)
    positions = min(options.max_len or ROW_POSITIONS, cfg.max_positions)
    mesh = place(Job(cfg, rows, positions, format, kv_dtype, dtype))
    if mesh.shape[STAGE] > 1:
        cfg = with_room(cfg, kept=0)  # as in Programs
    return Deployment(cfg, mesh, dtype, format, kv_dtype, checkpoint, step_tokens)


def load_while_compiling(
    models: list[Deployment],
    shapes: ProgramsOnShapes,
    compile_programs: Callable[[], Any],
    show: bool,
    loading: contextlib.AbstractContextManager = contextlib.nullcontext(),  # noqa: B008  it has no state
) -> list[Weights]:
    """Load the weights of the models, while a thread calls `compile_programs`: -> the weights of each model.

    compile_programs: compiles programs of `shapes`. If it fails, loading ends with its exception; if loading
    fails, no more programs are compiled. show: progress, on stderr. loading: surrounds the loading.
    """
    compiling = concurrent.futures.ThreadPoolExecutor(1).submit(compile_programs)

    def check() -> None:
        """Let loading end at once with what is wrong with the programs."""
        if compiling.done():
            compiling.result()

    try:
        with loading:
            weights = [load(x.checkpoint, x.mesh, x.dtype, x.format, show, check) for x in models]
    except BaseException:
        shapes.give_up()  # what is wrong with the weights is told at once
        raise
    compiling.result()
    return weights


def make_programs(
    options: ModelOptions,
    models: list[Deployment],
    weights: list[Weights],
    rows: int,
    max_len: int,
    kind: type[Programs] = Programs,
) -> Programs:
    """The Programs of a batch, with the speculation that the user asks for. weights: of each model."""

    def programs(i: int, speculation=None) -> Programs:
        x = models[i]
        return kind(weights[i], x.cfg, x.mesh, rows, max_len, x.kv_dtype, speculation)

    speculation = PromptLookup(options.guesses) if options.lookup else None
    if options.draft:
        speculation = DraftModel(programs(1), options.guesses)
    return programs(0, speculation)


def programs_on_shapes(
    options: ModelOptions, models: list[Deployment], rows: int, max_len: int
) -> ProgramsOnShapes:
    """The same programs, to be compiled before there are weights."""
    weights = [x.abstract_weights() for x in models]
    return make_programs(options, models, weights, rows, max_len, ProgramsOnShapes)
