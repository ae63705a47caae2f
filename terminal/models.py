"""Opens the models of a command, places them on devices and loads them into an engine."""

import argparse
import dataclasses
import gc
import time
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.loading import load
from distributed.exchange import agree, process_count
from feedback.errors import UserError
from serving.engine import Engine
from serving.memory import HEADROOM, Deployment, device_memory
from serving.placement import choose_dtypes, choose_format, choose_mesh, set_precision, slice_count
from serving.programs import Programs
from serving.requests import Request
from serving.speculation import DraftModel, PromptLookup, mesh_for_draft
from serving.text import load_tokenizer
from sharding.mesh import degrees
from terminal.launch import Startup, log, log_if_slow, log_once
from terminal.prompts import RequestBuilder

COMPARED_TENSORS = 256  # of a checkpoint, whose bytes all processes compare


@dataclasses.dataclass(frozen=True)
class Session:
    """What the ways to use a model share. models: the model, and the draft model if there is one."""

    args: argparse.Namespace
    models: list[Deployment]
    builder: RequestBuilder
    startup: Startup

    def start_engine(
        self,
        rows: int,
        max_len: int,
        requests: list[Request],
        longest: int = 0,
        option_sets: Sequence[frozenset[str]] = (),
    ) -> Engine:
        """Load the models and compile their programs. requests, longest, option_sets: see Engine."""
        show, args = jax.process_index() == 0, self.args
        weights = [load(x.checkpoint, x.mesh, x.dtype, x.format, show=show) for x in self.models]
        self.startup.lap("weights")

        def programs(i: int, speculation=None) -> Programs:
            x = self.models[i]
            return Programs(weights[i], x.cfg, x.mesh, rows, max_len, x.kv_dtype, speculation)

        speculation, start = None, time.perf_counter()
        kept = f"the programs are kept in {jax.config.jax_compilation_cache_dir}"
        with log_if_slow(f"compiling, which takes less time at later starts: {kept}"):
            if args.lookup:
                speculation = PromptLookup(args.guesses)
            if args.draft:
                speculation = DraftModel(programs(1), args.guesses)
            engine = Engine(programs(0, speculation), requests, longest, option_sets)
        log(f"compiled in {time.perf_counter() - start:.1f} s")
        self.startup.lap("compilation")
        if not gc.isenabled():  # main.py disables garbage collection, which took 0.7 s and found nothing
            gc.freeze()  # never examine the objects that exist by now
            gc.enable()
        return engine


def open_session(args: argparse.Namespace, n_devices: int, startup: Startup) -> Session:
    checkpoint = open_agreed(args, "checkpoint")
    tokenizer = load_tokenizer(checkpoint.folder)
    models = [deploy(args, checkpoint, mesh_for(args, checkpoint, n_devices))]
    if args.draft:
        models.append(deploy(args, *open_draft(args, models[0], tokenizer)))
    for x in models:
        set_precision(x.dtype)
    builder = RequestBuilder(args, checkpoint, tokenizer, [x.cfg for x in models])
    return Session(args, models, builder, startup)


def mesh_for(args: argparse.Namespace, checkpoint: Checkpoint, n_devices: int) -> Mesh:
    """The mesh that the user asks for, or one that suits the model and the network."""

    def fits(mesh: Mesh) -> bool:
        return deploy(args, checkpoint, mesh).weight_bytes() <= have * (1 - HEADROOM)

    have, slices = device_memory(), slice_count()
    stages = args.pp or (1 if args.draft or args.lookup else None)
    asked = args.dp, args.ep, args.tp, n_devices, stages
    mesh = choose_mesh(checkpoint.config, *asked, slices, fits)
    if process_count() > 1:
        what = f"{n_devices} devices" + f" in {slices} slices that a slower network joins" * (slices > 1)
        log(f"mesh of {what}: " + ", ".join(f"{name} {n}" for name, n in degrees(mesh).items()))
    return mesh


def open_agreed(args: argparse.Namespace, option: str) -> Checkpoint:
    """The checkpoint that an option names. Raises UserError if it differs between the processes."""
    checkpoint = open_checkpoint(getattr(args, option))
    if process_count() > 1:
        checksums = checkpoint.checksums(COMPARED_TENSORS)
        agree(
            {f"the checksum of --{option}'s {what}": x for what, x in checksums.items()}, "copy one of them"
        )
    return checkpoint


def open_draft(args: argparse.Namespace, target: Deployment, tokenizer) -> tuple[Checkpoint, Mesh]:
    """The draft model's checkpoint and mesh. Raises UserError if it does not suit the model."""
    draft = open_agreed(args, "draft")
    same = load_tokenizer(draft.folder).get_vocab() == tokenizer.get_vocab()
    if not same or draft.config.V != target.cfg.V:
        raise UserError(f"--draft {args.draft}: its tokenizer is not that of {args.checkpoint}")
    try:
        return draft, mesh_for_draft(draft.config, target.mesh)
    except ValueError as e:
        raise UserError(f"--draft {args.draft}: {e}") from None


def deploy(args: argparse.Namespace, checkpoint: Checkpoint, mesh: Mesh) -> Deployment:
    """The model in the number formats that the user asks for, or else in the default ones."""
    format = choose_format(args.quantize, checkpoint, log_once)
    dtype, kv_dtype = choose_dtypes(args.dtype, args.kv_cache_dtype, format)
    return Deployment(checkpoint.config, mesh, dtype, format, kv_dtype, checkpoint)
