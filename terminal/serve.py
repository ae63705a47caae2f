"""--serve: the OpenAI API on a port of the first host, until the server is told to end."""

import argparse
import dataclasses
import ipaddress
import os
import pathlib
import socket
import threading
import time
from functools import partial

import jax

from checkpoints.errors import UserError
from distributed.exchange import flag, wait_for_flag
from model import Sampling
from serving.memory import Deployment, fit_cache
from serving.requests import Request
from sharding.sampling import NEUTRAL
from terminal import command_line
from terminal.launch import Startup, log
from terminal.models import start_engine
from terminal.prompts import Asker

try:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from server.app import make_app
    from server.loop import EngineLoop, follow
    from server.metrics import Metrics
    from server.questions import Served
    from serving.grammar import make_grammar, token_bytes
except ImportError as e:
    raise UserError(f"--serve needs the package {e.name}: pip install -e '.[serve]'") from None

POSITIONS = 4096  # of a row, unless --max-len or the model say otherwise
CPU_ROWS = 8  # where idle rows cost as much as others, unless --rows says otherwise
ROWS = 32
HEADER_SECONDS = 20.0  # for the head of a request to arrive on a new connection
KEY = "LLAMA_JAX_API_KEY"
DRAWING = frozenset(("seed", "temperature", "top_k", "top_p", "min_p"))
# A program for each: most requests ask for no more than the second, and none for more than the last.
OPTION_SETS = frozenset(), DRAWING, frozenset(vars(NEUTRAL))


class Protocol(H11Protocol):
    """Closes connections on which no request comes."""

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self.loop.call_later(HEADER_SECONDS, self._end_if_silent)

    def _end_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.close()


def serve(args: argparse.Namespace, models: list[Deployment], asker: Asker, startup: Startup) -> None:
    """Answer until SIGTERM or Ctrl-C; then what has been asked before, and no more."""
    if args.max_len is None:
        asker.limit, asker.why = min(asker.limit, POSITIONS), "--max-len"
    rows = args.rows or (CPU_ROWS if jax.default_backend() == "cpu" else ROWS)
    rows, max_len = fit_cache(models, [asker.limit] * rows, args.rows, asker.limit)
    tokens = token_bytes(asker.tokenizer, asker.vocabulary, asker.stop)
    first = jax.process_index() == 0
    if first:
        loop = EngineLoop(rows, args.max_queue, args.request_timeout, Metrics())
        app, address = listen(args, loop)
        command_line.before_leaving(loop.drain)
        threading.Thread(target=wait_for_flag, args=("drain", loop.drain), daemon=True).start()
    else:
        command_line.before_leaving(partial(flag, "drain"))
    like = [Request([0], 1), Request([0], 1, Sampling(top_logprobs=1), score=True)]
    engine = start_engine(args, models, rows, max_len, like, startup, max_len, OPTION_SETS)
    if not first:
        return follow(engine, partial(make_grammar, tokens))
    app.state.served = served(args, models[0], asker, tokens, max_len)
    loop.rows = engine.programs.rows
    log(f"serving {app.state.served.names[0]} at http://{address}: {loop.rows} rows of {max_len} positions")
    loop.run(engine)


def served(args: argparse.Namespace, model: Deployment, asker: Asker, tokens, max_len: int) -> Served:
    name = pathlib.Path(args.checkpoint).name if os.path.exists(args.checkpoint) else args.checkpoint
    sampling = asker.sampling
    if sampling.temperature is None:  # as in OpenAI's API
        sampling = dataclasses.replace(sampling, temperature=1.0)
    return Served(
        (name, args.checkpoint), asker.tokenizer, tokens, asker.vocabulary, max_len, asker.stop,
        dataclasses.replace(sampling, seed=None), asker.encode, tuple(args.stop), args.max_new_tokens,
        int(time.time()),
    )  # fmt: skip


def listen(args: argparse.Namespace, loop: EngineLoop):
    """Open the port, and answer from a thread of its own: -> (the application, its address)."""
    key = read_key(args)
    try:
        ip = ipaddress.ip_address(socket.getaddrinfo(args.host, args.port, type=socket.SOCK_STREAM)[0][4][0])
        family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
        listener = socket.create_server((str(ip), args.port), family=family, backlog=2048)
    except OSError as e:
        why = e.strerror if isinstance(e, socket.gaierror) else os.strerror(e.errno)
        raise UserError(f"--host {args.host} --port {args.port}: {why}; choose another") from None
    app = make_app(loop, key, args.cors, ip.is_loopback)
    config = uvicorn.Config(
        app, http=Protocol, ws="none", lifespan="off", log_config=None, log_level="critical",
        access_log=False, server_header=False, timeout_keep_alive=30, timeout_graceful_shutdown=5,
    )  # fmt: skip
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, kwargs=dict(sockets=[listener]), daemon=True).start()
    name = f"[{args.host}]" if ":" in args.host else args.host
    if not key and not ip.is_loopback:
        log(f"anyone who reaches {args.host} can ask: --api-key-file or {KEY} would guard it")
    return app, f"{name}:{listener.getsockname()[1]}"


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
