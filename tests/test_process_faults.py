"""Striking simulated engines, step by step: what must be there before, and what is there afterwards."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from harness.errors import LeverMissing, StackError
from harness.faults import process_faults
from harness.faults.process_faults import ProcessFaults
from harness.faults.process_kinds import ProcessKind
from harness.records import NOTHING, Cell, Completion, Prompt
from harness.running.runner import PREFILL
from harness.stack import AttachStack
from services.faults import LoadControl
from services.journal import EventName, journal_path, read_events
from services.signals import PAUSE_ENGINE, RESUME_ENGINE
from tests.process_builders import process_cell
from tests.simulated_processes import Failing, SignalledStack, mortal_stack
from tests.simulated_requests import BLOCK_SIZE, tokenize
from tests.simulated_storage import block_names

TOKENS = tokenize(" red" * (4 * BLOCK_SIZE + 1))
PROMPT = Prompt("victim", TOKENS, "", 4)
KEYS = block_names(TOKENS)
MIDDLE = 2
KILLED, PAUSED, LOADING = (
    process_cell(kind)
    for kind in (
        ProcessKind.PREFILL_KILLED_SAVING,
        ProcessKind.PREFILL_PAUSED_SAVING,
        ProcessKind.DECODE_KILLED_LOADING,
    )
)


@dataclass(frozen=True)
class Bench:
    stack: SignalledStack
    faults: ProcessFaults

    def saved(self) -> Completion:
        return self.stack.client(PREFILL).complete(
            PROMPT, LoadControl(tag="prefill.victim"), max_tokens=1, stream=True, deadline_s=10
        )

    def files(self) -> list[Path]:
        assert self.stack.kv_dir
        return sorted(path for path in self.stack.kv_dir.rglob("*") if path.is_file())

    def names(self) -> list[EventName]:
        return [event.name for event in read_events(journal_path(self.stack.evidence_dir, PREFILL))[0]]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Engines that are up, with the prompt saved."""
    with mortal_stack(tmp_path, Failing.NOTHING) as stack:
        bench = Bench(stack, ProcessFaults(stack, PREFILL, lambda _: None))
        assert bench.saved().status_code == 200
        yield bench


@pytest.mark.parametrize("of", [KILLED, PAUSED])
def test_the_prompt_is_saved_anew_and_whole_afterwards(bench: Bench, of: Cell) -> None:
    whole = bench.files()
    with bench.faults.struck(of, PROMPT, KEYS) as strike:
        there = {path.name[:64] for path in bench.files() if path.suffix != ".tmp"}
        assert there == set(KEYS[:MIDDLE])
    volume = strike.volume()
    assert bench.files() == whole
    assert {damage.block for damage in volume.damages if damage.during != NOTHING} == set(range(MIDDLE))
    assert [damage for damage in volume.damages if damage.after != damage.before] == []
    assert (len(volume.damages), len(volume.before), len(volume.after)) == (8, 8, 8)
    assert [answer.status_code for answer in strike.record().saves] == [0, 200] if of is KILLED else [200]


def test_what_a_cell_before_left_cut_off_is_saved_first(bench: Bench) -> None:
    whole = bench.files()
    for path in whole[3:]:
        path.unlink()
    with bench.faults.struck(PAUSED, PROMPT, KEYS) as strike:
        pass
    assert {damage.before for damage in strike.volume().damages if damage.before == NOTHING} == set()
    assert bench.files() == whole


def test_a_paused_engine_goes_on_whatever_happens(bench: Bench) -> None:
    with pytest.raises(ZeroDivisionError), bench.faults.struck(PAUSED, PROMPT, KEYS):
        raise ZeroDivisionError
    assert bench.names()[-3:-1] == [EventName.ENGINE_RESUMED, EventName.SAVED]
    assert bench.saved().status_code == 200


def test_a_pause_that_is_not_confirmed_is_taken_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[signal.Signals] = []

    def send(number: signal.Signals) -> None:
        sent.append(number)
        if number != PAUSE_ENGINE:
            bench.stack.engines[PREFILL].signal(number)

    monkeypatch.setattr(process_faults, "STRUCK_DEADLINE_S", 0.2)
    monkeypatch.setattr(bench.stack, "lever", lambda _: send)
    with pytest.raises(StackError, match="no engine_paused"), bench.faults.struck(PAUSED, PROMPT, KEYS):
        pass
    assert sent == [PAUSE_ENGINE, RESUME_ENGINE]


def test_a_block_beyond_the_prompt_strikes_nobody(bench: Bench) -> None:
    of = process_cell(ProcessKind.PREFILL_KILLED_SAVING, (9,))
    with bench.faults.struck(of, PROMPT, KEYS):
        pass
    assert not {EventName.HELD, EventName.ENGINE_EXITED} & set(bench.names())


# Before anything is done.


@pytest.mark.parametrize("of", [KILLED, PAUSED, LOADING])
def test_what_a_stack_lacks(bench: Bench, of: Cell) -> None:
    whole, urls = bench.files(), {service: bench.stack.url(service) for service in bench.stack.services}
    without_lever = AttachStack(urls, bench.stack.kv_dir, bench.stack.evidence_dir)
    lacking = {"cannot be killed or paused": without_lever}
    for said, stack in lacking.items():
        faults = ProcessFaults(stack, PREFILL, lambda _: None)
        with pytest.raises(LeverMissing, match=said), faults.struck(of, PROMPT, KEYS):
            pass
    with pytest.raises(LeverMissing, match="need kvproof's own connector"), bench.faults.struck(of, PROMPT, KEYS[:3]):
        pass
    bench.stack.kv_dir = None
    with pytest.raises(LeverMissing, match="give the folder with --kv-dir"), bench.faults.struck(of, PROMPT, KEYS):
        pass
    bench.stack.kv_dir = without_lever.kv_dir
    assert bench.files() == whole


def test_one_cell_at_a_time_has_the_producer(bench: Bench) -> None:
    with bench.faults.turn(KILLED):
        assert bench.faults._producer_in_use.locked()
        with bench.faults.turn(LOADING), bench.faults.turn(replace(KILLED, process=None)):
            pass
    assert not bench.faults._producer_in_use.locked()
