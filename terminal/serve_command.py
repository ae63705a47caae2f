"""--serve: the server, which the first process runs until SIGTERM or Ctrl-C."""

import argparse
import dataclasses
import os
import pathlib
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import jax

from checkpoints.remote.object_storage import is_url
from deployment.memory import CPU_ROWS, DEFAULT_ROWS, fit_cache
from distributed import watch
from distributed.exchange import flag, process_count, wait_for_flag
from feedback.errors import UserError
from serving.needed import demand_of, faster_programs
from serving.requests import OPTION_SETS, SAMPLING_OPTIONS, Request
from serving.scheduler import server_limits
from sharding.sampling import Sampling
from terminal.command_line import OUT_OF_MEMORY, on_first_signal
from terminal.diagnostics import profiled
from terminal.launch import log
from terminal.loaded_models import Session

try:
    from conversation.grammar import grammar_tokenizer, make_grammar
    from server.access_log import LineWriter
    from server.api_requests import ServedModel
    from server.app import make_app
    from server.http import LINGER, Port
    from server.loop import EngineLoop, compile_later, follow
    from server.metrics import Metrics
except ImportError as e:
    raise UserError(f"--serve needs the package {e.name}: pip install -e '.[serve]'") from None

KEY = "LLAMA_JAX_API_KEY"
DEFAULT_PREFIX_CACHE = 1  # GiB
FAILURE_LINGER = 1  # seconds that clients have for reading the error when the engine has failed


def serve(session: Session) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish the open requests."""
    args, builder = session.args, session.builder
    rows = args.rows or (CPU_ROWS if jax.default_backend() == "cpu" else DEFAULT_ROWS)
    saved = int((DEFAULT_PREFIX_CACHE if args.prefix_cache_gib is None else args.prefix_cache_gib) * 2**30)
    lengths = [builder.max_len] * rows
    rows, max_len = fit_cache(session.models, lengths, args.rows, builder.max_len, saved)
    tokenizer = grammar_tokenizer(builder.tokenizer, builder.vocabulary, builder.stop_tokens)
    like = [Request([0], 1), Request([0], 1, Sampling(top_logprobs=1), score=True)]
    limits = server_limits(jax.default_backend(), args.prefill_budget)
    demand = demand_of(like, max_len, OPTION_SETS)
    start = partial(session.start_engine, rows, max_len, demand, saved, limits, general=True)
    if jax.process_index() > 0:
        engine, shapes = start()
        in_background(compile_later, shapes, faster_programs(shapes, demand), None, lambda: None)
        on_first_signal(partial(flag, "drain"))
        follow(engine, partial(make_grammar, tokenizer))
        return shapes.give_up()

    loop, key = EngineLoop(rows, args.max_queue, args.request_timeout, Metrics()), read_key(args)
    port = Port(args.host, args.port)
    writer = None if args.no_access_log else LineWriter()
    app = make_app(loop, key, args.cors, port.local, writer)
    port.serve(app)  # until the model is loaded, its answer is that it is not ready
    if not key and not port.local:
        log(f"anyone who reaches {args.host} can ask: --api-key-file or {KEY} would guard it")
    engine, shapes = start()
    loop.rows, app.state.served = engine.programs.rows, served_model(session, tokenizer)
    on_first_signal(partial(drain, loop))
    in_background(wait_for_flag, "drain", loop.drain)
    cores_are_busy = jax.default_backend() == "cpu" and process_count() == 1
    wait = loop.wait_until_idle if cores_are_busy else lambda: None
    in_background(compile_later, shapes, faster_programs(shapes, demand), loop, wait)
    name = app.state.served.names[0]
    log(f"serving {name} at http://{port.address}: {loop.rows} rows of {max_len} positions")
    failure = None
    try:
        with profiled(engine, args.profile):
            loop.run(engine)
    except Exception as e:
        failure = e
    shapes.give_up()
    port.close(FAILURE_LINGER if failure else LINGER)
    if writer:
        writer.close()
    if failure:
        leave_after(failure)


def drain(loop: EngineLoop) -> None:
    """Finish the open requests, and say so, since that may take minutes."""
    if loop.open_jobs:
        log(f"open requests: {loop.open_jobs}, which are finished first; Ctrl-C again ends at once")
    loop.drain()


def in_background(function: Callable[..., None], *arguments) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()


def leave_after(failure: Exception) -> NoReturn:
    """End the process, whose engine has failed: after the traceback, one line on stderr that says why.

    At once: a thread that still tokenizes a prompt or compiles a grammar would hold up the usual end. Several
    processes end by distributed.watch, which finds out whether another process is to blame.
    """
    from server.loop import ENGINE_FAILED

    if process_count() > 1:
        raise failure
    memory = "RESOURCE_EXHAUSTED" in str(failure)
    if not memory:
        traceback.print_exception(failure)
    what = OUT_OF_MEMORY if memory else f"{type(failure).__name__}: {' '.join(str(failure).split())}"
    watch.leave(1, f"error: {ENGINE_FAILED}: {what}", "", at_once=True)


def served_model(session: Session, tokenizer) -> ServedModel:
    args, builder = session.args, session.builder
    folder = pathlib.Path(args.checkpoint)
    path = folder.exists() or is_url(args.checkpoint)
    names, checkpoint = (folder.name if path else args.checkpoint,), args.checkpoint
    if args.served_model_name:
        names, checkpoint = tuple(dict.fromkeys(args.served_model_name)), ""
    sampling = builder.sampling
    if sampling.temperature is None:  # the default of OpenAI's API
        sampling = dataclasses.replace(sampling, temperature=1.0)
    return ServedModel(
        **vars(builder) | dict(sampling=sampling),
        names=names,
        checkpoint=checkpoint,
        grammar_tokenizer=tokenizer,
        default_sampling=given_options(builder.sampling),
        created=int(time.time()),
        strict_fields=session.args.strict_fields,
    )


def given_options(sampling: Sampling) -> dict[str, float]:
    """The sampling options, by name, that the command line or the checkpoint gives, apart from the seed."""
    options = {name: value for name, value in vars(sampling).items() if name in SAMPLING_OPTIONS}
    return {name: value for name, value in options.items() if name != "seed" and value is not None}


def read_key(args: argparse.Namespace) -> str | None:
    """The API key of --api-key, --api-key-file or the environment. UserError if it is empty."""
    key, where = args.api_key or os.environ.get(KEY), "--api-key" if args.api_key else KEY
    if args.api_key_file:
        where = f"--api-key-file {args.api_key_file}"
        try:
            key = pathlib.Path(args.api_key_file).expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"{where}: {getattr(e, 'strerror', 'not a text')}") from None
    if key is not None and (not key or not key.isascii() or not key.isprintable()):
        raise UserError(f"{where}: a key is one or more printable ASCII characters")
    return key
