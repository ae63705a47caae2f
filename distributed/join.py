"""How the processes of a computation find one another."""

import os
import signal
import socket
import sys
import threading

import jax
from jax._src.distributed import global_state  # see exchange.py

from checkpoints.errors import UserError
from distributed import runtime, watch
from distributed.exchange import hostname

TIMEOUT = 60  # seconds, unless the user says otherwise,
LEAST = 3  # but not less: a process that is busy gives a sign of life every second or two
SILENCE = 0.9  # of this time: when it is over, all have ended
PATIENCE = 5  # seconds, after which the user is told what this process waits for


def join(coordinator: str | None, count: int | None, index: int | None, seconds: int) -> None:
    """Join the other processes, if there are any, and watch them from then on; alone, do nothing.

    coordinator: HOST:PORT at which process 0 is to be reached. count, index: how many processes there are,
    and which this is. What is None comes from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID,
    or from what jax finds out on TPU pods and from Slurm, Open MPI and Kubernetes. seconds: to wait for a
    process that does not come, or later does not answer; then this process ends. Raises UserError.
    """
    if seconds < LEAST:
        raise UserError(f"--timeout {seconds}: at least {LEAST} s, for processes to give signs of life")
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    count, index = _number(count, "JAX_NUM_PROCESSES"), _number(index, "JAX_PROCESS_ID")
    if coordinator and index == 0:
        _check_port(coordinator)
    jax.config.update("jax_enable_preemption_service", False)  # it takes a SIGTERM, and goes on
    joined, undo = threading.Event(), runtime.keep_back_words()
    threading.Thread(target=_wait, args=(joined, seconds), daemon=True).start()
    runtime.call_on_abort(lambda _: _nobody_came(seconds))
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator,
            num_processes=count,
            process_id=index,
            initialization_timeout=seconds + 10,  # `_wait` and watch.py give up first, and say more
            heartbeat_timeout_seconds=2 * seconds + 10,
            shutdown_timeout_seconds=seconds,
        )
    except (ValueError, IndexError, RuntimeError) as e:
        undo()
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        if "coordinator_address" in str(e) and count in (None, 1) and index in (None, 0):
            return  # jax knows of no others
        given = (
            "--coordinator (HOST:PORT), --num-processes and --process-id, or the variables "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        )
        raise UserError(f"could not join other processes ({e}); check {given}") from None
    finally:
        joined.set()
    if global_state.num_processes == 1:
        undo()
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        return
    here = global_state.process_id, global_state.num_processes, hostname()
    watch.start(global_state.client, *here, SILENCE * seconds)
    watch_aborts()


def watch_aborts() -> None:
    """To be called once more when the devices are there: the runtime of TPUs has a handler of its own."""
    if watch.watch:
        runtime.call_on_abort(_aborted)


def _aborted(because_of_peers: bool) -> None:
    if because_of_peers:  # the coordination service is in process 0
        watch.watch.blame(0, "has ended")
    sys.stderr.write(runtime.words())
    watch.leave(1, "error: jax's runtime aborted, see above", "has crashed")


def _number(given: int | None, variable: str) -> int | None:
    if given is not None or variable not in os.environ:
        return given
    try:
        return int(os.environ[variable])
    except ValueError:
        raise UserError(f"{variable}={os.environ[variable]!r} is not a number") from None


def _address(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"--coordinator {coordinator}: not HOST:PORT")
    return host.strip("[]"), int(port)


def _check_port(coordinator: str) -> None:
    """jax's service would share a port that is in use, or crash. Raises UserError."""
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    address = _address(bind) if bind else ("", _address(coordinator)[1])
    try:
        socket.create_server(address).close()
    except OSError as e:
        raise UserError(f"--coordinator {coordinator}: {os.strerror(e.errno)}; try another port") from None


def _wait(joined: threading.Event, seconds: int) -> None:
    patience = min(PATIENCE, seconds)
    if joined.wait(patience):
        return
    state = global_state
    where = f"process 0 is at {state.coordinator_address}"
    print(f"process {state.process_id} of {state.num_processes} waits for others; {where}", file=sys.stderr)
    if not joined.wait(seconds - patience):
        _nobody_came(seconds)


def _nobody_came(seconds: int) -> None:
    """End this process with a line that says what it waited for in vain."""
    address, count = global_state.coordinator_address, global_state.num_processes
    if global_state.process_id == 0:
        what = f"not all {count} processes came to process 0 (on {hostname()})"
    elif _listens(address):
        what = f"process 0 at {address} is stopped, or not all {count} processes came to it"
    else:
        what = f"process 0 of {count} did not answer at {address}"
    print(f"error: {what} in {seconds} s; start the same command on every host", file=sys.stderr)
    os._exit(1)


def _listens(address: str) -> bool:
    try:
        socket.create_connection(_address(address), timeout=2).close()
    except OSError:
        return False
    return True
