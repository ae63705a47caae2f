"""What each row of a batch does in each turn of the engine, recorded from a run of a tiny model.

`python3 -m images.batching` runs the engine again and writes images/batching.csv. The length of an answer
depends on its request alone, so every machine records the same.
"""

import csv
from typing import NamedTuple

import numpy as np

from checkpoints.checkpoint import open_checkpoint
from checkpoints.loading import load
from images.drawing import IMAGES, pyplot, tidy
from serving.engine import Engine, InFlight
from serving.needed import demand_of, needed_programs
from serving.programs import Programs
from serving.requests import Request
from sharding.mesh import make_mesh

RECORD = IMAGES / "batching.csv"
CHECKPOINT = IMAGES.parent / "tests" / "checkpoints" / "tiny-llama3"
ROWS, SYSTEM_PROMPT = 4, 60  # rows of the batch; tokens of the prompt that some requests begin with
# Of each request: whether it begins with the system prompt, tokens of its own prompt, tokens of the answer.
REQUESTS = (
    (True, 12, 18), (False, 1180, 9), (False, 20, 7), (False, 1, 12), (True, 9, 8), (False, 30, 14),
    (True, 25, 6), (False, 90, 10), (True, 4, 11), (False, 16, 5), (False, 150, 8), (True, 12, 7),
)  # fmt: skip
COLORS = {"prefill": "#fdae6b", "decode": "#9ecae1"}


class Event(NamedTuple):
    """What a row did in a turn.

    kind: admit (tokens: how many of the prompt came from a cached prefix), prefill or decode.
    """

    turn: int
    row: int
    request: int
    kind: str
    tokens: int


def requests() -> list[Request]:
    rng = np.random.default_rng(0)
    system = rng.integers(7, 500, SYSTEM_PROMPT).tolist()
    return [
        Request(system * begins + rng.integers(7, 500, own).tolist(), new) for begins, own, new in REQUESTS
    ]


class Recorded(Engine):
    """An engine that writes down what it plans."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.events: list[Event] = []

    def _plan_turn(self) -> InFlight:
        turn, rows = self.turns, self.scheduler.rows
        before = [row.number for row in rows]
        step = super()._plan_turn()
        for i, row in enumerate(rows):
            if row.number != before[i]:
                self.events.append(Event(turn, i, row.number, "admit", row.reused))
        if chunk := step.plan.chunk:
            for i, count in zip(chunk.rows.tolist(), chunk.count.tolist(), strict=True):
                if count:
                    self.events.append(Event(turn, i, rows[i].number, "prefill", count))
        self.events += [Event(turn, i, number, "decode", 1) for i, _, number in step.stepped]
        return step


def record() -> list[Event]:
    """Answer the requests, and return what happened."""
    checkpoint = open_checkpoint(str(CHECKPOINT))
    mesh, asked = make_mesh(checkpoint.config), requests()
    weights = load(checkpoint, mesh, "float32")
    longest = max(request.positions for request in asked)
    programs = Programs(weights, checkpoint.config, mesh, ROWS, longest, "float32")
    engine = Recorded(programs, needed_programs(programs, demand_of(asked)))
    for request in asked:
        engine.add(request)
    while engine.busy:
        engine.advance()
    return engine.events


def write(events: list[Event]) -> None:
    with RECORD.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerows([Event._fields, *events])


def read() -> list[Event]:
    with RECORD.open(newline="") as file:
        lines = csv.DictReader(file)
        return [
            Event(**{name: x if name == "kind" else int(x) for name, x in line.items()}) for line in lines
        ]


def draw():
    events = read()
    figure, axes = pyplot().subplots(figsize=(9.5, 3.4))
    for event in events:
        if event.kind == "admit":
            continue
        # A row that prefills the last chunk of its prompt decodes in the same turn: two halves of a cell.
        both = {x.kind for x in events if (x.turn, x.row) == (event.turn, event.row)} >= {"prefill", "decode"}
        left, width = (event.turn + 0.5 * (event.kind == "decode"), 0.5) if both else (event.turn, 1)
        axes.barh(
            event.row, width, left=left, height=0.72, color=COLORS[event.kind], edgecolor="white", lw=0.5
        )
    for number in range(len(REQUESTS)):
        own = [event for event in events if event.request == number]
        row, first, last = own[0].row, own[0].turn, own[-1].turn
        rectangle = pyplot().Rectangle((first, row - 0.36), last + 1 - first, 0.72, fill=False, lw=1)
        axes.add_patch(rectangle)
        prompt = sum(event.tokens for event in own if event.kind == "prefill")
        reused = own[0].tokens  # it was admitted in its first turn
        axes.text(
            (first + last + 1) / 2, row - 0.1, f"request {number}", ha="center", va="center", fontsize=7.5
        )
        tokens = f"prefills {prompt}" + (f", reuses {reused}" if reused else "")
        axes.text((first + last + 1) / 2, row + 0.18, tokens, ha="center", va="center", fontsize=6.5)
    turns = max(event.turn for event in events) + 1
    axes.set(xlim=(-0.1, turns + 0.1), ylim=(ROWS - 0.5, -0.5), xlabel="turn of the engine")
    axes.set_yticks(range(ROWS), [f"row {row}" for row in range(ROWS)])
    patch = pyplot().Rectangle
    handles = [
        patch((0, 0), 1, 1, facecolor=color, edgecolor="#999") for color in (*COLORS.values(), "#ffffff")
    ]
    labels = "a prefill chunk", "a decode step, one token", "nothing: the row waits"
    axes.legend(
        handles, labels, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False, fontsize=8
    )
    tidy(figure)
    return figure


if __name__ == "__main__":
    write(record())
