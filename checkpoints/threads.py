"""Threads that read or convert one weight each."""

import collections
import concurrent.futures
import contextlib
import gc
import os
from collections.abc import Callable, Iterable, Iterator

WORKERS = min(os.cpu_count() or 1, 8)  # threads, and so the number of weights that are in memory at a time


def in_order(function: Callable, items: Iterable, ahead: int) -> Iterator:
    """The results of function(item), in order; threads compute at most `ahead` of them in advance."""
    pending: collections.deque = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


@contextlib.contextmanager
def no_garbage_collection():
    """jax 0.10.2 crashes if Python collects garbage, which calls jax, while several threads make arrays."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
