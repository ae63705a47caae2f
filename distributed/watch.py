"""No process waits for one that is gone: they watch one another, and end together.

Every second a thread writes a sign of life into the key-value store of jax's coordination service, and reads
those of the others. A process that is silent for too long is gone; one that must leave says why before it
does. Then all leave, with one line that names it and its host. The store is in process 0: if that does not
answer, process 0 is gone.

Nothing here takes long to import: a command may have to leave before it has imported jax.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import NoReturn

INTERVAL = 1.0  # seconds between two signs of life
SUSPICIOUS = 5.0  # seconds of silence that say enough when a computation with the others has failed
DAY = 24 * 60 * 60  # seconds

watch: "Watch | None" = None  # of this process, once it has joined others


class Watch:
    """What a process knows of the others.

    client: of jax's coordination service. hosts: the host of each process. seconds: how long a process may be
    silent.
    """

    def __init__(self, client, index: int, hosts: list[str], seconds: float):
        self.client, self.index, self.hosts, self.seconds = client, index, hosts, seconds
        self.answered = time.monotonic()  # when the store, which is in process 0, last answered
        # The last sign of life of each other process, and when it was first seen.
        self.signs = {i: ("", self.answered) for i in range(len(hosts)) if i != index}
        self.ended, self.leaving = threading.Event(), threading.Lock()
        self.threads = [threading.Thread(target=f, daemon=True) for f in (self._exchange_signs, self._judge)]
        for thread in self.threads:
            thread.start()

    def _exchange_signs(self) -> None:
        number = 0
        while not self.ended.wait(INTERVAL if number else 0):
            number += 1
            try:
                self.client.key_value_set(f"sign/{self.index}", str(number), allow_overwrite=True)
                signs = self.client.key_value_dir_get("sign/")
                reasons = self.client.key_value_dir_get("reason/")
            except Exception:  # of a type of jaxlib's: nobody listens where process 0 did
                self.blame(0, "has ended")
            self.answered = time.monotonic()
            for index, sign in _by_index(signs):
                if index != self.index and sign != self.signs[index][0]:
                    self.signs[index] = sign, self.answered
            for index, reason in _by_index(reasons):
                if index != self.index:
                    self.blame(index, reason)

    def _judge(self) -> None:
        """In a thread of its own: while process 0 is stopped, whoever asks its store waits."""
        while not self.ended.wait(INTERVAL / 2):
            seen = [(0, self.answered), *((index, since) for index, (_, since) in self.signs.items())]
            for index, since in seen:
                if since < time.monotonic() - self.seconds:
                    self.blame(index, f"has not answered for {self.seconds:.0f} s: it is stopped, or dead")

    def blame(self, index: int, reason: str) -> NoReturn:
        """Leave because of another process, and say so once more for those who did not hear it."""
        process = f"process {index} of {len(self.hosts)} (on {self.hosts[index]})"
        self.leave(1, f"\nerror: {process} {reason}", index, reason)

    def leave(self, code: int, line: str, index: int, reason: str) -> NoReturn:
        """End this process, whatever its threads do, and so all. index: of the process that is the reason."""
        if not self.leaving.acquire(blocking=False):
            time.sleep(DAY)  # another thread is about to end this process
        with contextlib.suppress(Exception):
            if line:
                print(line, file=sys.stderr, flush=True)
                _silence_stderr()  # where a progress bar would go on
            sys.stdout.flush()
        telling = threading.Thread(target=self._tell, args=(index, reason), daemon=True)
        telling.start()
        telling.join(2 * INTERVAL)  # the store may not answer
        if self.index == 0:
            time.sleep(2 * INTERVAL)  # the others read the reason from this process
        os._exit(code)

    def _tell(self, index: int, reason: str) -> None:
        with contextlib.suppress(Exception):
            self.client.key_value_set(f"reason/{index}", reason, allow_overwrite=True)

    def failed(self) -> NoReturn:
        """Leave because of the exception that is being handled, unless another process is gone: a computation
        with it fails, too.
        """
        # What is read three intervals from now was written after the failure.
        seen, self.seconds = time.monotonic() + 3 * INTERVAL, min(self.seconds, SUSPICIOUS)
        while any(since < seen for _, since in self.signs.values()):  # `_judge` does not wait for ever
            time.sleep(INTERVAL / 2)
        reason = " ".join(str(sys.exception()).split()) or type(sys.exception()).__name__
        self.leave(1, traceback.format_exc().rstrip(), self.index, f"has failed: {reason}")

    def finish(self) -> None:
        """Wait until all have come to their end, and part from them."""
        import jax

        self.client.wait_at_barrier("finish", DAY * 1000)
        self.ended.set()
        for thread in self.threads:
            thread.join()
        jax.distributed.shutdown()


def _silence_stderr() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stderr.fileno())
    os.close(null)


def _by_index(entries: list[tuple[str, str]]) -> Iterator[tuple[int, str]]:
    for key, value in entries:
        yield int(key.rpartition("/")[2]), value


def start(client, index: int, hosts: list[str], seconds: float) -> None:
    global watch
    watch = Watch(client, index, hosts, seconds)


def leave(code: int, line: str, reason: str, at_once: bool = False) -> NoReturn:
    """End this process with a line on stderr; others that it has joined end too, with the reason.

    at_once: not by an exception, which only the main thread could raise.
    """
    if watch:
        watch.leave(code, line, watch.index, reason)
    if line:
        print(line, file=sys.stderr, flush=True)
    os._exit(code) if at_once else sys.exit(code)


def failed() -> None:
    """What an exception that no user can mend means to the others, if there are any."""
    if watch:
        watch.failed()


def finish() -> None:
    """Come to the end together with the others, if there are any."""
    if watch:
        watch.finish()
