"""--serve: the OpenAI API on a port of the first host, until the server is told to end."""

import argparse
import dataclasses
import os
import pathlib
import threading
import time
from functools import partial

import jax

from checkpoints.errors import UserError
from distributed.exchange import flag, wait_for_flag
from serving.memory import DEFAULT_ROWS, Deployment, fit_cache
from serving.requests import RANDOM_OPTIONS, Request
from sharding.sampling import NEUTRAL, Sampling
from terminal.command_line import before_leaving
from terminal.launch import Startup, log
from terminal.models import start_engine
from terminal.prompts import Asker

try:
    from server.api_requests import ServedModel
    from server.app import make_app
    from server.http import Port
    from server.loop import EngineLoop, follow
    from server.metrics import Metrics
    from serving.grammar import grammar_tokenizer, make_grammar
except ImportError as e:
    raise UserError(f"--serve needs the package {e.name}: pip install -e '.[serve]'") from None

POSITIONS = 4096  # of a row, unless --max-len or the model say otherwise
CPU_ROWS = 8  # where idle rows cost as much as others, unless --rows says otherwise
KEY = "LLAMA_JAX_API_KEY"
# A program for each: most requests ask for no more than the second, and none for more than the last.
OPTION_SETS = frozenset(), frozenset(RANDOM_OPTIONS), frozenset(vars(NEUTRAL))


def serve(args: argparse.Namespace, models: list[Deployment], asker: Asker, startup: Startup) -> None:
    """Answer until SIGTERM or Ctrl-C; then what has been asked before, and no more."""
    if args.max_len is None:
        asker.limit, asker.why = min(asker.limit, POSITIONS), "--max-len"
    rows = args.rows or (CPU_ROWS if jax.default_backend() == "cpu" else DEFAULT_ROWS)
    rows, max_len = fit_cache(models, [asker.limit] * rows, args.rows, asker.limit)
    tokens = grammar_tokenizer(asker.tokenizer, asker.vocabulary, asker.stop)
    like = [Request([0], 1), Request([0], 1, Sampling(top_logprobs=1), score=True)]
    start = partial(start_engine, args, models, rows, max_len, like, startup, max_len, OPTION_SETS)
    if jax.process_index() > 0:
        engine = start()
        before_leaving(partial(flag, "drain"))
        return follow(engine, partial(make_grammar, tokens))

    loop, key = EngineLoop(rows, args.max_queue, args.request_timeout, Metrics()), read_key(args)
    port = Port(args.host, args.port)
    app = make_app(loop, key, args.cors, port.local)
    port.serve(app)  # until the model is loaded, its answer is that it is not ready
    if not key and not port.local:
        log(f"anyone who reaches {args.host} can ask: --api-key-file or {KEY} would guard it")
    engine = start()
    loop.rows, app.state.served = engine.programs.rows, served(args, asker, tokens, max_len)
    before_leaving(loop.drain)
    threading.Thread(target=wait_for_flag, args=("drain", loop.drain), daemon=True).start()
    name = app.state.served.names[0]
    log(f"serving {name} at http://{port.address}: {loop.rows} rows of {max_len} positions")
    try:
        loop.run(engine)
    finally:
        port.close()


def served(args: argparse.Namespace, asker: Asker, tokens, max_len: int) -> ServedModel:
    name = pathlib.Path(args.checkpoint).name if os.path.exists(args.checkpoint) else args.checkpoint
    sampling = asker.sampling
    if sampling.temperature is None:  # as in OpenAI's API
        sampling = dataclasses.replace(sampling, temperature=1.0)
    return ServedModel(
        (name, args.checkpoint), asker.tokenizer, tokens, asker.vocabulary, max_len, asker.stop,
        dataclasses.replace(sampling, seed=None), asker.encode, tuple(args.stop), args.max_new_tokens,
        int(time.time()),
    )  # fmt: skip


def read_key(args: argparse.Namespace) -> str | None:
    """The API key: of --api-key, a file, or the environment. UserError if it is empty."""
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
