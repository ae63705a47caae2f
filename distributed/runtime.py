"""What jax's C++ runtime does when another process is gone: it prints stack traces, and aborts.

Here these words are kept back, and the abort becomes a call of ours.
"""

import collections
import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable

# Gloo's greetings; the coordination service's errors, and the stack traces that go with them.
WORDS_ON_PEERS = re.compile(
    rb"\[Gloo\]|[EFW]\d{4} .*(coordination_|distributed service|distributed_runtime)|Additional GRPC"
    rb"|:UNKNOWN:Error|RPC: /xla|RPC: /tensorflow|\*\*\* Check failure|\s+@ |\s*$"
)
_kept_back: collections.deque[bytes] = collections.deque(maxlen=200)
_callbacks: list = []  # as long as C may call them


def keep_back_words() -> Callable[[], None]:
    """Take what C++ writes to stdout and stderr; pass on to stderr what is not about other processes.

    What Python prints goes on as before. -> a function that undoes this.
    """
    standard = {1: sys.stdout, 2: sys.stderr}
    originals = {descriptor: os.dup(descriptor) for descriptor in standard}
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", errors=sys.stdout.errors)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors=sys.stderr.errors)
    reading, writing = os.pipe()
    for descriptor in standard:
        os.dup2(writing, descriptor)
    os.close(writing)

    def pass_on() -> None:
        with open(reading, "rb") as lines:
            for line in lines:
                if WORDS_ON_PEERS.match(line):
                    _kept_back.append(line)
                else:
                    os.write(originals[2], line)

    reader = threading.Thread(target=pass_on, daemon=True)
    reader.start()

    def undo() -> None:
        for descriptor, original in originals.items():
            os.dup2(original, descriptor)
        for file in (sys.stdout, sys.stderr):
            file.close()
        sys.stdout, sys.stderr = standard.values()
        reader.join()
        for original in originals.values():
            os.close(original)

    return undo


def call_on_abort(function: Callable[[bool], None]) -> None:
    """Call this function when C++ aborts, in the thread that does, with whether the words are about peers.

    To be called once more when devices are there: the runtime of TPUs installs a handler of its own.
    """

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def handler(_) -> None:
        time.sleep(0.2)  # until the last words have been read
        function(any(b"distributed service" in line for line in _kept_back))

    _callbacks.append(handler)
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes = ctypes.c_int, ctypes.c_void_p
    set_handler(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))


def words() -> str:
    """What was kept back, the latest."""
    return b"".join(_kept_back).decode(errors="replace")
