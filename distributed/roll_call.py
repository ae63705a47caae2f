"""Which processes have come, and on which hosts: found out before jax joins them.

jax.distributed.initialize waits until all processes have come, and cannot say which of them has not. So
process 0 first listens at the coordinator's address itself. Every other process connects, and sends its index
and the name of its host. Process 0 tells all of them which processes have come, whenever one more comes.
"""

import contextlib
import errno
import json
import os
import selectors
import socket
import time
from collections.abc import Iterator

from feedback.errors import UserError

RETRY = 0.1  # seconds between two attempts to connect to process 0
REMEDY = "start the same command on every host"


def address_of(coordinator: str) -> tuple[str, int]:
    """(host, port). Raises UserError."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"--coordinator {coordinator}: not HOST:PORT")
    return host.strip("[]"), int(port)


def call_roll(coordinator: str, index: int, count: int, host: str, seconds: int) -> list[str]:
    """The host of each process, as soon as all have come. All processes must call this.

    host: of this process. seconds: to wait. Raises UserError.
    """
    if index == 0:
        return _wait_for_others(_listener(coordinator), count, host, seconds)
    return _wait_with_process_0(coordinator, index, count, host, seconds)


def can_connect(coordinator: str) -> bool:
    try:
        socket.create_connection(address_of(coordinator), timeout=2).close()
    except OSError:
        return False
    return True


def _listener(coordinator: str) -> socket.socket:
    """At the address at which jax's service will listen. Raises UserError."""
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    host, port = address_of(bind) if bind else ("", address_of(coordinator)[1])
    dualstack = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dualstack or ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=dualstack)
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            what_to_do = "stop it, or wait for it, or give --coordinator another port"
            raise UserError(f"another run is using this machine (port {port}); {what_to_do}") from None
        raise UserError(f"--coordinator {coordinator}: {os.strerror(e.errno)}; try another port") from None


def _wait_for_others(listener: socket.socket, count: int, host: str, seconds: int) -> list[str]:
    """In process 0. listener: it is closed."""
    late = time.monotonic() + seconds
    hosts, left = {0: host}, {}  # of the processes that are here, and of those that came and left
    indices = {}  # of the process at the other end of each connection
    with listener, selectors.DefaultSelector() as selector, contextlib.ExitStack() as connections:
        selector.register(listener, selectors.EVENT_READ)
        while len(hosts) < count:
            ready = selector.select(max(0, late - time.monotonic()))
            if not ready or time.monotonic() > late:
                raise UserError(_missing(count, hosts, left, f"in {seconds} s"))
            for connection in (key.fileobj for key, _ in ready):
                if connection is listener:
                    connection = connections.enter_context(listener.accept()[0])
                    selector.register(connection, selectors.EVENT_READ)
                elif message := _receive(connection):
                    index = indices[connection] = _check(message, count, hosts)
                    hosts[index] = message["host"]
                else:  # the other end was closed, or is not a process of this computation
                    selector.unregister(connection)
                    connection.close()
                    if index := indices.pop(connection, None):
                        left[index] = hosts.pop(index)
            if len(hosts) == count:
                listener.close()  # before the others hear of it, and connect to jax's service at this address
            for connection in indices:
                with contextlib.suppress(OSError):  # the other end was closed; it is read next time
                    connection.sendall(json.dumps(list(hosts.items())).encode() + b"\n")
    return [hosts[index] for index in range(count)]


def _wait_with_process_0(coordinator: str, index: int, count: int, host: str, seconds: int) -> list[str]:
    address, late, hosts = address_of(coordinator), time.monotonic() + seconds, {}
    message = json.dumps(dict(index=index, count=count, host=host)).encode()
    while not hosts and time.monotonic() < late:
        for hosts in _listen(address, message, late):
            if len(hosts) == count:
                return [hosts[index] for index in range(count)]
        time.sleep(RETRY)
    if not hosts:
        raise UserError(f"process 0 of {count} did not answer at {coordinator} in {seconds} s; {REMEDY}")
    if time.monotonic() < late:
        raise UserError(_missing(count, hosts, {}, f"before process 0 (on {hosts[0]}) ended"))
    raise UserError(_missing(count, hosts, {}, f"in {seconds} s"))


def _listen(address: tuple[str, int], message: bytes, late: float) -> Iterator[dict[int, str]]:
    """Send process 0 the message; yield the hosts of the processes that have come, whenever it sends them.

    The iterator ends when it is late, when process 0 ends, and when another program listens at the address.
    """
    with contextlib.suppress(OSError, ValueError, TypeError):
        with socket.create_connection(address, timeout=max(RETRY, late - time.monotonic())) as connection:
            connection.sendall(message)
            for line in connection.makefile():
                yield dict(json.loads(line))
                connection.settimeout(max(RETRY, late - time.monotonic()))


def _receive(connection: socket.socket) -> dict | None:
    """The message of a process, which is short enough to arrive as one piece."""
    with contextlib.suppress(OSError, ValueError):
        message = json.loads(connection.recv(4096))
        if isinstance(message, dict) and message.keys() == {"index", "count", "host"}:
            return message
    return None


def _check(message: dict, count: int, hosts: dict[int, str]) -> int:
    """The index of the process that sent this. Raises UserError."""
    index, host = message["index"], message["host"]
    if message["count"] != count:
        theirs = f"{message['count']} in process {index} (on {host})"
        raise UserError(f"--num-processes is {count} in process 0 (on {hosts[0]}) and {theirs}; {REMEDY}")
    if index in hosts:
        where = f"one on {hosts[index]}, one on {host}"
        raise UserError(f"two processes have --process-id {index}: {where}; give each process its own")
    return index


def _missing(count: int, hosts: dict[int, str], left: dict[int, str], when: str) -> str:
    """An error: which processes have not come, and which have."""
    absent = [i for i in range(count) if i not in hosts]
    missing = ", ".join(f"{i} (it came from {left[i]}, and left)" if i in left else str(i) for i in absent)
    came = ", ".join(f"{i} (on {host})" for i, host in sorted(hosts.items()))
    noun = "process" if len(absent) == 1 else "processes"
    return f"{noun} {missing} of {count} did not come {when}; those that came are {came}; {REMEDY}"
