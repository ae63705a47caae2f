"""Processes watch one another and end together, so that none waits for another that is gone.

Every second each process writes a heartbeat into the key-value store of jax's coordination service, and reads
the heartbeats of the others. A process whose heartbeats stop is given up. A process that must end writes its
reason into the store first. In both cases all processes end, with one line that names that process and its
host. The store is in process 0: if the store does not answer, process 0 is given up. A process that comes to
its end as it should waits there for the others.

This file imports nothing that takes long: a command may have to end before it has imported jax.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import NoReturn

INTERVAL = 1.0  # seconds between two heartbeats
SUSPICIOUS = 5.0  # seconds without a heartbeat, after which another process is to blame for an exception
DAY = 24 * 60 * 60  # seconds

watch: "Watch | None" = None  # this process's own, once it has joined others


class Watch:
    """Two threads: one exchanges heartbeats with the other processes, one decides which process is gone.

    client: jax's client of its coordination service. index: of this process. hosts: the host of each process.
    seconds: without a heartbeat, after which a process is given up.
    """

    def __init__(self, client, index: int, hosts: list[str], seconds: float):
        self.client, self.index, self.hosts, self.seconds = client, index, hosts, seconds
        self.answered = time.monotonic()  # when the store, which is in process 0, last answered
        # The last heartbeat of each other process, and when it was first seen.
        self.heartbeats = {i: ("", self.answered) for i in range(len(hosts)) if i != index}
        self.ended, self.leaving = threading.Event(), threading.Lock()
        loops = self._exchange_heartbeats, self._judge
        self.threads = [threading.Thread(target=loop, daemon=True) for loop in loops]
        for thread in self.threads:
            thread.start()

    def _exchange_heartbeats(self) -> None:
        number = 0
        while not self.ended.wait(INTERVAL if number else 0):
            number += 1
            try:
                self.client.key_value_set(f"heartbeat/{self.index}", str(number), allow_overwrite=True)
                heartbeats = self.client.key_value_dir_get("heartbeat/")
                reasons = self.client.key_value_dir_get("reason/")
            except Exception:  # jaxlib's, whose type is not public: process 0 does not listen any more
                self.blame(0, "has ended")
            self.answered = time.monotonic()
            for index, heartbeat in _by_index(heartbeats):
                if index != self.index and heartbeat != self.heartbeats[index][0]:
                    self.heartbeats[index] = heartbeat, self.answered
            for index, reason in _by_index(reasons):
                if index != self.index:
                    self.blame(index, reason)

    def _judge(self) -> None:
        """Give up processes. The thread that reads the store cannot: it waits while process 0 is stopped."""
        while not self.ended.wait(INTERVAL / 2):
            seen = [(0, self.answered), *((index, since) for index, (_, since) in self.heartbeats.items())]
            for index, since in seen:
                if since < time.monotonic() - self.seconds:
                    self.blame(index, f"has not answered for {self.seconds:.0f} s: it is stopped, or dead")

    def blame(self, index: int, reason: str) -> NoReturn:
        """Leave because of another process, and put the reason into the store for the others to read."""
        process = f"process {index} of {len(self.hosts)} (on {self.hosts[index]})"
        self.leave(1, f"\nerror: {process} {reason}", index, reason)

    def leave(self, code: int, line: str, index: int, reason: str) -> NoReturn:
        """End this process, whatever its threads do, and with it all others.

        line: for stderr. index, reason: which process is to blame, and for what, as the others will say.
        """
        if not self.leaving.acquire(blocking=False):
            time.sleep(DAY)  # another thread is ending this process
        with contextlib.suppress(Exception):
            if line:
                print(line, file=sys.stderr, flush=True)
                _silence_stderr()  # a progress bar of another thread would write after the line
            sys.stdout.flush()
        with contextlib.suppress(RuntimeError):  # a Python that has come to its end may start no thread
            telling = threading.Thread(target=self._tell, args=(index, reason), daemon=True)
            telling.start()
            telling.join(2 * INTERVAL)  # the store may not answer
        if self.index == 0:
            time.sleep(2 * INTERVAL)  # the others read the reason from the store, which is in this process
        os._exit(code)

    def _tell(self, index: int, reason: str) -> None:
        with contextlib.suppress(Exception):
            self.client.key_value_set(f"reason/{index}", reason, allow_overwrite=True)

    def failed(self, _, error: BaseException, __) -> NoReturn:
        """Leave because of an exception that nothing has handled: a `sys.excepthook`.

        The computation also fails if another process is gone, and then that process is to be named. So wait
        until every other process has sent a heartbeat after the failure, or `_judge` has given one up.
        """
        # A heartbeat that is first seen three intervals from now was sent after the failure.
        seen, self.seconds = time.monotonic() + 3 * INTERVAL, min(self.seconds, SUSPICIOUS)
        while any(since < seen for _, since in self.heartbeats.values()):
            time.sleep(INTERVAL / 2)
        reason = " ".join(str(error).split()) or type(error).__name__
        lines = "".join(traceback.format_exception(error)).rstrip()
        self.leave(1, lines, self.index, f"has failed: {reason}")

    def finish(self) -> None:
        """Wait until all processes have come to their end, then disconnect from them."""
        import jax

        self.client.wait_at_barrier("finish", DAY * 1000)
        self.ended.set()
        for thread in self.threads:
            thread.join()
        jax.distributed.shutdown()


def end(code: int = 0) -> NoReturn:
    """End this process as it would end by itself, but without waiting for threads that are still working."""
    if watch:
        watch.finish()
    sys.stdout.flush()
    os._exit(code)


def _silence_stderr() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stderr.fileno())
    os.close(null)


def _by_index(entries: list[tuple[str, str]]) -> Iterator[tuple[int, str]]:
    for key, value in entries:
        yield int(key.rpartition("/")[2]), value


def begin(client, index: int, hosts: list[str], seconds: float) -> None:
    """Watch the other processes from now on, and end with them, whatever ends this one. See Watch."""
    global watch
    watch = Watch(client, index, hosts, seconds)
    atexit.register(watch.finish)
    sys.excepthook = watch.failed


def leave(code: int, line: str, reason: str, at_once: bool = False) -> NoReturn:
    """End this process with a line on stderr; the processes that it has joined end with it.

    reason: what they say of this process. at_once: by os._exit instead of SystemExit, for threads other than
    the main one.
    """
    if watch:
        watch.leave(code, line, watch.index, reason)
    if line:
        print(line, file=sys.stderr, flush=True)
    os._exit(code) if at_once else sys.exit(code)
