"""Cells in lanes: one at a time in each lane, in order, the lanes side by side.

phases.py calls it and saves each observation as it comes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, Queue

from harness.records import Cell, Observation

QUEUE_POLL_S = 0.2
"""How long a lane that broke may go unnoticed."""

Lane = Sequence[Cell]


def by_engine(cells: Iterable[Cell]) -> tuple[Lane, ...]:
    """A lane for each engine."""
    of_engine: dict[str, list[Cell]] = {}
    for cell in cells:
        of_engine.setdefault(cell.engine, []).append(cell)
    return tuple(of_engine.values())


def side_by_side(
    lanes: Sequence[Lane], observe: Callable[[Cell], Observation]
) -> Generator[tuple[Cell, Observation], None, None]:
    """Call `observe` for each cell and yield what it returns, as each ends. Raises what `observe` raises.

    What ends after the caller has left the loop is lost: then the engines are being stopped, and what a cell shows is
    our doing.
    """
    ended: Queue[tuple[Cell, Observation]] = Queue()
    stopping = threading.Event()

    def run_lane(lane: Lane) -> None:
        for cell in lane:
            if stopping.is_set():
                return
            ended.put((cell, observe(cell)))

    pool = ThreadPoolExecutor(max(1, len(lanes)))
    running = [pool.submit(run_lane, lane) for lane in lanes]
    try:
        while not all(future.done() for future in running) or not ended.empty():
            with contextlib.suppress(Empty):
                yield ended.get(timeout=QUEUE_POLL_S)
        for future in running:
            future.result()
    finally:
        stopping.set()
        pool.shutdown(wait=False)
