"""Threads that read or convert one weight each."""

import collections
import concurrent.futures
import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterable, Iterator

WORKERS = min(os.cpu_count() or 1, 8)  # threads, and so the number of weights that are in memory at a time
WAITING = 32  # threads that most of the time wait for a network or a disk


def in_order(
    function: Callable,
    items: Iterable,
    ahead: int,
    workers: int = WORKERS,
    size: Callable[..., int] = lambda item: 0,
    most: int = 0,
) -> Iterator:
    """The results of function(item), in order; threads compute at most `ahead` of them in advance.

    size, most: the sizes of the items whose results are computed in advance are `most` together, unless there
    is but one.
    """
    pending: collections.deque = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                while pending and (len(pending) > ahead or sum(x for x, _ in pending) + size(item) > most):
                    yield pending.popleft()[1].result()
                pending.append((size(item), pool.submit(function, item)))
            while pending:
                yield pending.popleft()[1].result()
        finally:
            for _, future in pending:
                future.cancel()


@functools.cache
def _waiting_pool() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(WAITING)


def together(functions: Iterable[Callable]) -> list:
    """The results of functions that wait for a network, which threads call at the same time.

    None of them may call this function, or all threads could wait for one another.
    """
    return list(_waiting_pool().map(lambda function: function(), functions))


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
