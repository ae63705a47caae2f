"""Threads that parse and tokenize requests, apart from the event loop, and apart by what may take long.

A long prompt takes seconds to tokenize, and a grammar to compile: each of the two has a thread of its own, in
which one such request follows another, so that short requests never wait for them. Python's threads share one
core as far as they run Python; tokenizers and llguidance run their own code beside it.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any

from server.formats import FORMAT_FIELDS
from server.loop import Refused

GRAMMAR_FIELDS = FORMAT_FIELDS | {"tools", "format"}  # with which a request may need a grammar
LARGE_BODY = 64 << 10  # bytes of a request; larger ones are parsed one by one
MAX_LARGE_WAITING = 16  # large bodies that wait for their thread, each of up to server.app.MAX_BODY bytes
RETRY_SECONDS = 5  # after which a client of a full lane is asked to try again


class Lane:
    """Threads, and a bounded queue of calls that wait for one of them. All come from one event loop.

    waiting: how many calls wait. They wait here, not in the queue of a ThreadPoolExecutor, which keeps calls
    that have been cancelled.
    """

    def __init__(self, threads: int, max_waiting: int):
        self.pool = concurrent.futures.ThreadPoolExecutor(threads)
        self.free, self.waiting, self.max_waiting = asyncio.Semaphore(threads), 0, max_waiting

    async def run(self, function: Callable, *arguments: Any) -> Any:
        """Call the function in a thread. Raises Refused if too many calls wait.

        If this coroutine is cancelled, a call that waits is removed; one that runs is left to end, and keeps
        its thread until then.
        """
        if self.free.locked() and self.waiting >= self.max_waiting:
            raise Refused(f"{self.waiting} requests wait to be tokenized", RETRY_SECONDS)
        self.waiting += 1
        try:
            await self.free.acquire()
        finally:
            self.waiting -= 1
        call = asyncio.get_running_loop().run_in_executor(self.pool, function, *arguments)
        call.add_done_callback(lambda call: self.free.release())
        return await asyncio.shield(call)


class Lanes:
    """The lanes of a server: for short requests, for those with a grammar, and for large ones."""

    def __init__(self, max_waiting: int):
        """max_waiting: requests of a lane that may wait; of the large ones at most MAX_LARGE_WAITING."""
        self.short, self.grammars = Lane(2, max_waiting), Lane(1, max_waiting)
        self.large = Lane(1, min(max_waiting, MAX_LARGE_WAITING))

    @property
    def waiting(self) -> int:
        return sum(lane.waiting for lane in (self.short, self.grammars, self.large))

    def choose(self, body: bytes) -> Lane:
        """The lane of a request with this body."""
        if len(body) > LARGE_BODY:
            return self.large
        has_grammar = any(f'"{name}"'.encode() in body for name in GRAMMAR_FIELDS)
        return self.grammars if has_grammar else self.short
