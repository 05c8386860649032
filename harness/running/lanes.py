"""Work in lanes: one piece at a time in each lane, in order, the lanes side by side.

session.py gives each engine a lane of oracles, and then of cells.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, Queue
from typing import TypeVar

QUEUE_POLL_S = 0.2
"""How long a lane that broke may go unnoticed."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def by_engine(items: Iterable[Item], engine: Callable[[Item], str]) -> tuple[Sequence[Item], ...]:
    """A lane for each engine."""
    of_engine: dict[str, list[Item]] = {}
    for item in items:
        of_engine.setdefault(engine(item), []).append(item)
    return tuple(of_engine.values())


def side_by_side(
    lanes: Sequence[Sequence[Item]], work: Callable[[Item], Result]
) -> Generator[tuple[Item, Result], None, None]:
    """Call `work` for each item and yield what it returns, as each ends. Raises what `work` raises.

    What ends after the caller has left the loop is lost: then the engines are being stopped, and what an item shows
    is our doing.
    """
    ended: Queue[tuple[Item, Result]] = Queue()
    stopping = threading.Event()

    def run_lane(lane: Sequence[Item]) -> None:
        for item in lane:
            if stopping.is_set():
                return
            ended.put((item, work(item)))

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
