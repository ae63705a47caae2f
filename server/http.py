"""A listening socket, and the thread in which uvicorn serves it."""

import ipaddress
import os
import socket
import threading

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from feedback.errors import UserError

HEAD_SECONDS = 20.0  # within which the head of a request must arrive
IDLE_SECONDS = 30  # after which a connection without a request is closed
LINGER = 60  # seconds that clients have for reading the rest of their responses when the server ends


class Protocol(H11Protocol):
    """uvicorn's HTTP/1.1, with a time limit for the head of each request."""

    timer = None

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for_head()

    def _wait_for_head(self) -> None:
        waiting = self.conn.their_state is h11.IDLE
        if waiting and not self.timer:
            self.timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)
        elif self.timer and not waiting:
            self.timer.cancel()
            self.timer = None

    def connection_lost(self, exc) -> None:
        super().connection_lost(exc)
        if self.timer:
            self.timer.cancel()


class Port:
    """A listening socket. address: HOST:PORT, for a URL. local: whether only this machine can reach it."""

    def __init__(self, host: str, port: int):
        """port: 0 for any free one. Raises UserError if the address cannot be bound."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
            ip = ipaddress.ip_address(found)
            family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
            self.socket = socket.create_server((found, port), family=family, backlog=2048)
        except OSError as e:
            why = e.strerror if isinstance(e, socket.gaierror) else os.strerror(e.errno)
            raise UserError(f"--host {host} --port {port}: {why}; choose another") from None
        self.local = ip.is_loopback
        name = f"[{host}]" if ":" in host else host
        self.address = f"{name}:{self.socket.getsockname()[1]}"

    def serve(self, app) -> None:
        """Serve the application in a thread of its own, until `close`."""
        config = uvicorn.Config(
            app, http=Protocol, ws="none", lifespan="off", log_config=None, log_level="critical",
            access_log=False, server_header=False, timeout_keep_alive=IDLE_SECONDS,
        )  # fmt: skip
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(
            target=self.server.run, kwargs=dict(sockets=[self.socket]), daemon=True
        )
        self.thread.start()

    def close(self, seconds: int = LINGER) -> None:
        """Stop, when clients have read their responses or these seconds are over."""
        self.server.config.timeout_graceful_shutdown = seconds
        self.server.should_exit = True
        self.thread.join(seconds + min(seconds, 5))
