"""Opens the models of a command and loads them into an engine."""

import argparse
import dataclasses
import gc
import pathlib

import jax

from conversation.templates import replace_template
from deployment.ahead import ProgramsOnShapes, compile_programs
from deployment.deploy import (
    ModelOptions,
    load_while_compiling,
    make_programs,
    open_models,
    programs_on_shapes,
)
from deployment.memory import Deployment
from distributed.exchange import gather
from feedback.errors import UserError
from generation.request_builder import RequestBuilder
from serving.engine import Engine
from serving.needed import Demand, faster_programs, needed_programs, warm_up
from serving.scheduler import PrefillLimits
from terminal.launch import Startup, log_if_slow, log_once
from terminal.prompts import make_builder


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
        demand: Demand,
        prefix_cache_bytes: int = 0,
        limits: PrefillLimits = PrefillLimits(),  # noqa: B008  immutable
        general: bool = False,
    ) -> tuple[Engine, ProgramsOnShapes]:
        """Load the models, and compile the programs that the demand needs meanwhile.

        general: of the decode programs only the one that can take the place of all others, see
        needed.faster_programs. -> (the engine, the same programs on shapes).
        """
        self.startup.show()
        options, show = model_options(self.args), jax.process_index() == 0
        stage, shapes = self.startup.stage, programs_on_shapes(options, self.models, rows, max_len)
        needed = needed_programs(shapes, demand, limits=limits, prefix_cache=bool(prefix_cache_bytes))
        if general:
            left_out = faster_programs(shapes, demand)
            needed = [program for program in needed if program not in left_out]

        def compile_ahead() -> None:
            kept = f"the programs are kept in {jax.config.jax_compilation_cache_dir}"
            with stage("compile"), log_if_slow(f"compiling, which takes less time at later starts: {kept}"):
                compile_programs(shapes, needed)

        weights = load_while_compiling(self.models, shapes, compile_ahead, show, stage("load"))
        with stage("warm"):
            programs = make_programs(options, self.models, weights, rows, max_len)
            gather("compiled")  # else one process could wait in a collective until another has compiled
            warm_up(programs, needed)
            engine = Engine(programs, needed, limits, prefix_cache_bytes)
        if not gc.isenabled():  # main.py disables garbage collection, which took 0.7 s and found nothing
            gc.freeze()  # never examine the objects that exist by now
            gc.enable()
        return engine, shapes


def model_options(args: argparse.Namespace) -> ModelOptions:
    return ModelOptions(
        **{field.name: getattr(args, field.name) for field in dataclasses.fields(ModelOptions)}
    )


def replace_chat_template(tokenizer, name: str) -> None:
    """Give the tokenizer the chat template of --chat-template. Raises UserError if the file holds none."""
    where = f"--chat-template {name}"
    try:
        template = pathlib.Path(name).expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{where}: not a UTF-8 text file") from None
    except OSError as e:
        raise UserError(f"{where}: {e.strerror}") from None
    if not template.strip():
        raise UserError(f"{where}: the file is empty")
    replace_template(tokenizer, template, where)


def open_session(args: argparse.Namespace, n_devices: int, startup: Startup) -> Session:
    models = open_models(model_options(args), n_devices, log_once)
    checkpoint = models[0].checkpoint
    tokenizer = models[0].tokenizer
    if args.chat_template is not None:
        replace_chat_template(tokenizer, args.chat_template)
    builder = make_builder(args, checkpoint, tokenizer, [x.cfg for x in models])
    return Session(args, models, builder, startup)
