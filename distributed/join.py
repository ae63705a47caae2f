"""How the processes of a computation find one another."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax
from jax._src.clusters import ClusterEnv  # jax has no public name for this, nor for the next
from jax._src.distributed import global_state

from distributed import runtime, watch
from distributed.exchange import hostname
from distributed.roll_call import REMEDY, address_of, call_roll, can_connect
from feedback.errors import UserError

TIMEOUT = 60  # seconds, unless the user says otherwise
MIN_TIMEOUT = 3  # seconds: the heartbeats of a busy process are a second or two apart
GIVE_UP = 0.9  # of the timeout, without a heartbeat: a process is given up, and all end in the rest
PATIENCE = 5  # seconds after which the user is told what this process waits for
OPTIONS = (
    "--coordinator (HOST:PORT), --num-processes and --process-id, or the variables "
    "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
)


def join(coordinator: str | None, count: int | None, index: int | None, seconds: int) -> None:
    """Join the other processes, if there are any, and watch them from then on; alone, do nothing.

    From then on no process ends alone. One that comes to its end waits there until all have come to theirs,
    and an exception that nothing handles ends them all.

    coordinator: HOST:PORT at which process 0 can be reached. count: the number of processes. index: which of
    them this is. Each that is None is taken from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES or
    JAX_PROCESS_ID, or from what jax finds out on TPU pods and from Slurm, Open MPI and Kubernetes. seconds:
    how long to wait for a process that does not come, or later does not answer, before this process ends.
    Raises UserError.
    """
    if seconds < MIN_TIMEOUT:
        why = "heartbeats that are a second or two apart"
        raise UserError(f"--timeout {seconds}: at least {MIN_TIMEOUT} s, for {why}")
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    count, index = _number(count, "JAX_NUM_PROCESSES"), _number(index, "JAX_PROCESS_ID")
    try:
        coordinator, count, index, _ = ClusterEnv.auto_detect_unset_distributed_params(
            coordinator, count, index, None, None, seconds
        )
    except (ValueError, IndexError, RuntimeError) as e:
        raise UserError(f"could not find out about other processes ({e}); give {OPTIONS}") from None
    if coordinator is None and count in (None, 1) and index in (None, 0):
        return  # jax knows of no others
    if coordinator:
        address_of(coordinator)  # or it is refused
    options = {"--coordinator": coordinator, "--num-processes": count, "--process-id": index}
    if missing := [name for name, value in options.items() if value is None]:
        raise UserError(f"{' and '.join(missing)}: not given, and not known from a cluster; give {OPTIONS}")
    if not 0 <= index < count:
        raise UserError(f"--process-id {index}: not one of the {count} processes 0 to {count - 1}")
    waiting = f"process {index} of {count} waits for others; process 0 is at {coordinator}"
    with _unless_done_in(min(PATIENCE, seconds / 2), lambda: print(waiting, file=sys.stderr)):
        hosts = call_roll(coordinator, index, count, hostname(), seconds)
    _initialize(coordinator, index, hosts, seconds)
    if count > 1:
        watch.begin(global_state.client, index, hosts, GIVE_UP * seconds)
        watch_aborts()


def _initialize(coordinator: str, index: int, hosts: list[str], seconds: int) -> None:
    """jax.distributed.initialize, once all processes have come. Raises UserError."""

    def give_up(*_) -> None:
        _not_joined(coordinator, index, hosts)

    def undo() -> None:
        stop_withholding()
        signal.signal(signal.SIGABRT, signal.SIG_DFL)

    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM and go on
    stop_withholding = runtime.withhold_output()
    runtime.call_on_abort(give_up)
    try:
        with _unless_done_in(seconds, give_up):
            while index and not can_connect(coordinator):
                time.sleep(0.02)  # jax itself would try again after a second
            jax.distributed.initialize(
                coordinator_address=coordinator,
                num_processes=len(hosts),
                process_id=index,
                initialization_timeout=seconds + 10,  # `give_up` and watch.py are earlier, and say more
                heartbeat_timeout_seconds=2 * seconds + 10,
                shutdown_timeout_seconds=seconds,
            )
    except (ValueError, RuntimeError) as e:
        undo()
        raise UserError(f"could not join other processes ({e}); check {OPTIONS}") from None
    if len(hosts) == 1:
        undo()


def watch_aborts() -> None:
    """Call this once more when there are devices: the TPU runtime installs a signal handler of its own."""
    if watch.watch:
        runtime.call_on_abort(_aborted)


def _aborted(because_of_peers: bool) -> None:
    if because_of_peers:  # the coordination service is in process 0
        watch.watch.blame(0, "has ended")
    sys.stderr.write(runtime.withheld_output())
    watch.leave(1, "error: jax's runtime aborted, see above", "has crashed")


def _number(given: int | None, variable: str) -> int | None:
    if given is not None or variable not in os.environ:
        return given
    try:
        return int(os.environ[variable])
    except ValueError:
        raise UserError(f"{variable}={os.environ[variable]!r} is not a number") from None


@contextlib.contextmanager
def _unless_done_in(seconds: float, function: Callable[[], None]) -> Iterator[None]:
    """Call this function, in a thread of its own, if what is done takes longer."""
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _not_joined(coordinator: str, index: int, hosts: list[str]) -> None:
    """End this process: another one came, and was killed or stopped before jax had joined it."""
    count, names = len(hosts), ", ".join(f"{i} (on {host})" for i, host in enumerate(hosts))
    what = f"not all of the processes {names} joined, though all {count} came: one is stopped, or dead"
    if index and not can_connect(coordinator):
        first = f"process 0 of {count} (on {hosts[0]})"
        what = f"{first} does not answer at {coordinator}: it is stopped, or dead"
    print(f"error: {what}; {REMEDY}", file=sys.stderr)
    os._exit(1)
