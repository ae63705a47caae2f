"""The lanes of requests that are tokenized: one after another, not too many, and none that was cancelled."""

import asyncio
import threading

import pytest

from server.lanes import LARGE_BODY, Lane, Lanes
from server.loop import Refused


class Calls:
    """Calls that last until `gate` is set: how many run, and which have run."""

    def __init__(self):
        self.gate, self.lock = threading.Event(), threading.Lock()
        self.running, self.most, self.ran = 0, 0, []

    def __call__(self, name: str) -> str:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.ran.append(name)
        self.gate.wait(30)
        with self.lock:
            self.running -= 1
        if name == "wrong":
            raise ValueError("its result")
        return name.upper()


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def begin(lane: Lane, calls: Calls, *names: str) -> list[asyncio.Task]:
    """The tasks of these calls, when the first runs and the others wait."""
    tasks = [asyncio.create_task(lane.run(calls, name)) for name in names]
    await until(lambda: calls.running and lane.waiting == len(names) - 1)
    return tasks


def test_one_by_one():
    async def main():
        lane, calls = Lane(1, 4), Calls()
        tasks = await begin(lane, calls, "a", "b", "wrong", "c")
        calls.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert results[:2] + results[3:] == ["A", "B", "C"] and str(results[2]) == "its result"
        assert calls.ran == ["a", "b", "wrong", "c"] and calls.most == 1 and not lane.waiting

    asyncio.run(main())


def test_a_full_lane():
    async def main():
        lane, calls = Lane(1, 2), Calls()
        tasks = await begin(lane, calls, "a", "b", "c")
        with pytest.raises(Refused, match="2 requests wait to be tokenized") as refused:
            await lane.run(calls, "d")
        assert refused.value.retry_after > 0
        calls.gate.set()
        assert await asyncio.gather(*tasks) == ["A", "B", "C"]
        assert await lane.run(calls, "d") == "D"

    asyncio.run(main())


def test_cancelled_calls():
    """One that waits leaves its place and never runs; one that runs keeps its thread until it has ended."""

    async def main():
        lane, calls = Lane(1, 2), Calls()
        first, second, third = await begin(lane, calls, "a", "b", "c")
        second.cancel()
        await until(lambda: lane.waiting == 1)
        fourth = asyncio.create_task(lane.run(calls, "d"))
        await until(lambda: lane.waiting == 2)
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert first.cancelled() and second.cancelled() and lane.waiting == 2 and calls.ran == ["a"]
        calls.gate.set()
        assert await asyncio.gather(third, fourth) == ["C", "D"]
        assert calls.ran == ["a", "c", "d"] and calls.most == 1

    asyncio.run(main())


def test_lane_of_a_request():
    lanes = Lanes(8)
    assert lanes.choose(b"x" * LARGE_BODY) is lanes.short
    assert lanes.choose(b"x" * LARGE_BODY + b"response_format") is lanes.large
    for body in (b'{"response_format": {}}', b'{"text": {"format": {}}}'):
        assert lanes.choose(body) is lanes.grammars
    lanes.short.waiting, lanes.grammars.waiting, lanes.large.waiting = 1, 2, 4
    assert lanes.waiting == 7
