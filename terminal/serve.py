"""--serve: the OpenAI-compatible server, which the first process runs until SIGTERM or Ctrl-C."""

import argparse
import dataclasses
import os
import pathlib
import threading
import time
from functools import partial

import jax

from distributed.exchange import flag, wait_for_flag
from feedback.errors import UserError
from serving.memory import CPU_ROWS, DEFAULT_ROWS, fit_cache
from serving.requests import OPTION_SETS, Request
from sharding.sampling import Sampling
from terminal.command_line import on_first_signal
from terminal.launch import log
from terminal.models import Session

try:
    from server.api_requests import ServedModel
    from server.app import make_app
    from server.http import Port
    from server.loop import EngineLoop, follow
    from server.metrics import Metrics
    from serving.grammar import grammar_tokenizer, make_grammar
except ImportError as e:
    raise UserError(f"--serve needs the package {e.name}: pip install -e '.[serve]'") from None

KEY = "LLAMA_JAX_API_KEY"


def serve(session: Session) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish the open requests."""
    args, builder = session.args, session.builder
    rows = args.rows or (CPU_ROWS if jax.default_backend() == "cpu" else DEFAULT_ROWS)
    rows, max_len = fit_cache(session.models, [builder.limit] * rows, args.rows, builder.limit)
    tokenizer = grammar_tokenizer(builder.tokenizer, builder.vocabulary, builder.stop)
    like = [Request([0], 1), Request([0], 1, Sampling(top_logprobs=1), score=True)]
    start = partial(session.start_engine, rows, max_len, like, max_len, OPTION_SETS)
    if jax.process_index() > 0:
        engine = start()
        on_first_signal(partial(flag, "drain"))
        return follow(engine, partial(make_grammar, tokenizer))

    loop, key = EngineLoop(rows, args.max_queue, args.request_timeout, Metrics()), read_key(args)
    port = Port(args.host, args.port)
    app = make_app(loop, key, args.cors, port.local)
    port.serve(app)  # until the model is loaded, its answer is that it is not ready
    if not key and not port.local:
        log(f"anyone who reaches {args.host} can ask: --api-key-file or {KEY} would guard it")
    engine = start()
    loop.rows, app.state.served = engine.programs.rows, served_model(session, tokenizer, max_len)
    on_first_signal(loop.drain)
    threading.Thread(target=wait_for_flag, args=("drain", loop.drain), daemon=True).start()
    name = app.state.served.names[0]
    log(f"serving {name} at http://{port.address}: {loop.rows} rows of {max_len} positions")
    try:
        loop.run(engine)
    finally:
        port.close()


def served_model(session: Session, tokenizer, max_len: int) -> ServedModel:
    args, builder = session.args, session.builder
    name = pathlib.Path(args.checkpoint).name if os.path.exists(args.checkpoint) else args.checkpoint
    sampling = builder.sampling
    if sampling.temperature is None:  # the default of OpenAI's API
        sampling = dataclasses.replace(sampling, temperature=1.0)
    return ServedModel(
        (name, args.checkpoint), builder.tokenizer, tokenizer, builder.vocabulary, max_len, builder.stop,
        dataclasses.replace(sampling, seed=None), builder.encode, tuple(args.stop), args.max_new_tokens,
        int(time.time()),
    )  # fmt: skip


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
