"""When another process is gone, jax's C++ runtime prints stack traces and aborts.

Here what it prints is withheld, and its abort calls a Python function instead.
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

# Gloo's greetings, the coordination service's errors, and their stack traces. Gloo's threads print a greeting
# piece by piece, so that a line may begin in the middle of one. In jax 0.12 an error also lists the source
# locations that its status passed through.
ABOUT_PEERS = re.compile(
    rb"\[Gloo\]|[\d ]*(is connected to|peer ranks|Expected number of connected|$)"
    rb"|[EFW]\d{4} .*(coordination_|distributed service|distributed_runtime)|Additional GRPC"
    rb"|:[A-Z_]+:|RPC: /xla|RPC: /tensorflow|\*\*\* Check failure|\s+@ |\s*$"
    rb"|=== Source Location Trace|\S*/distributed\S*:\d+\s*$"
)
_withheld: collections.deque[bytes] = collections.deque(maxlen=200)  # lines
_callbacks: list = []  # they must not be garbage collected while C may call them


def withhold_output() -> Callable[[], None]:
    """Redirect what C++ prints: lines about other processes are withheld, all others go to stderr.

    What Python prints goes to stdout and stderr as before. Returns a function that undoes all this.
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
                if ABOUT_PEERS.match(line):
                    _withheld.append(line)
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
    """Call this function when C++ aborts, in the thread that aborts.

    function: its argument says whether the coordination service is the reason. Call this once more when there
    are devices: the TPU runtime installs a signal handler of its own.
    """

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def handler(_) -> None:
        time.sleep(0.2)  # until `pass_on` has read the last lines
        function(any(b"distributed service" in line for line in _withheld))

    _callbacks.append(handler)
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes = ctypes.c_int, ctypes.c_void_p
    set_handler(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))


def withheld_output() -> str:
    """The latest lines that were withheld."""
    return b"".join(_withheld).decode(errors="replace")
