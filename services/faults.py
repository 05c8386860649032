"""Faults at the connector boundary, and the pure decision what happens to each block of one KV load.

The harness writes a `LoadControl` into a request's `kv_transfer_params`; vLLM hands it unchanged to the
scheduler-side connector, which parses it here. Nothing in this module does I/O or touches a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import Literal, TypeVar, get_args

Choice = TypeVar("Choice", bound=StrEnum)

ALWAYS = sys.maxsize
"""As `Fault.times`: every load of the request is broken."""

ALL_BLOCKS = sys.maxsize
"""As `LoadControl.offer_blocks`: everything the store holds is offered."""

PARAMS_KEY = "kvproof"
"""The key in `kv_transfer_params` under which a control travels."""

HOLD_S_MAX = 60.0
"""Longest `Hold.wait_s`: whatever becomes of the harness, an engine that it stopped goes on."""

SelectorName = Literal["first", "middle", "last", "all"]
SELECTOR_NAMES: tuple[SelectorName, ...] = get_args(SelectorName)

BlockSelector = SelectorName | tuple[int, ...]
"""One of SELECTOR_NAMES, or logical block indices counted from 0 inside the loaded prefix."""


class LoadMode(StrEnum):
    """How the victim's KV is loaded; OFF means that nothing is offered, so everything is computed."""

    SYNC = "sync"
    ASYNC = "async"
    OFF = "off"


class FaultKind(StrEnum):
    """What goes wrong with one load, as seen by the engine."""

    NONE = "none"
    """Nothing; no fault is a fault too."""
    REPORT = "report"
    """The blocks hold garbage and are reported as failed: what an honest connector does after a bad read."""
    DROP = "drop"
    """The blocks keep what was in them before the load and are reported as failed."""
    SILENT = "silent"
    """The blocks hold garbage and nothing is reported: the control that the harness must catch."""
    DELAY = "delay"
    """The load is right but ends `delay_s` late."""
    PENDING = "pending"
    """The lookup answers "not yet" for `delay_s` seconds, counted from the first time; then all is right."""
    UNANSWERED = "unanswered"
    """The lookup answers "not yet" for ever; nothing is loaded."""
    HANG = "hang"
    """An async load that never ends; nothing is reported, neither blocks nor that it finished."""
    RAISE = "raise"
    """The connector's load hook raises before anything is loaded."""
    REOFFER = "reoffer"
    """As REPORT, but the connector's scheduler side is not told of it, and so offers the same blocks again."""

    # Breaches of the connector's contract: what vLLM makes of them is robustness, not recovery.
    REPORT_LATE = "report_late"
    """As REPORT, one step later than the contract allows."""
    REPORT_STALE = "report_stale"
    """The load is right, and one step later its blocks are reported as failed all the same."""
    FINISH_MISSING = "finish_missing"
    """As REPORT, but the async load is never reported as finished."""
    FINISH_TWICE = "finish_twice"
    """The async load is right, and reported as finished in two steps, one after the other."""
    FINISH_SYNC = "finish_sync"
    """As REPORT, and the sync load is reported as finished, which only async loads may be."""
    UNKNOWN_BLOCK = "unknown_block"
    """The load is right, and a block id is reported as failed that belongs to nobody."""


BREACH_KINDS = frozenset(
    {
        FaultKind.REPORT_LATE,
        FaultKind.REPORT_STALE,
        FaultKind.FINISH_MISSING,
        FaultKind.FINISH_TWICE,
        FaultKind.FINISH_SYNC,
        FaultKind.UNKNOWN_BLOCK,
    }
)
"""Kinds in which the connector breaks its contract (vLLM's `KVConnectorBase_V1`). An engine may be excused for
what it does then; reports keep these cells apart."""

REPORTED_KINDS = frozenset(
    {
        FaultKind.REPORT,
        FaultKind.DROP,
        FaultKind.REOFFER,
        FaultKind.REPORT_LATE,
        FaultKind.REPORT_STALE,
        FaultKind.FINISH_MISSING,
        FaultKind.FINISH_SYNC,
    }
)
"""Faults that tell vLLM which blocks are bad; it has to believe that."""

LOST_KINDS = frozenset({FaultKind.UNANSWERED, FaultKind.HANG, FaultKind.RAISE})
"""Faults after which vLLM has to see for itself that a load did not end; none of its blocks can be used then."""

BROKEN_KINDS = REPORTED_KINDS | LOST_KINDS
"""Faults that vLLM can know of, and has to answer as its policy says: repair, or an error."""

BAD_BLOCK_KINDS = BROKEN_KINDS | {FaultKind.SILENT}
"""Faults after which a block is not to be used: it does not hold what the store holds, or is said not to."""

WHOLE_LOAD_KINDS = frozenset(
    {
        FaultKind.DELAY,
        FaultKind.PENDING,
        FaultKind.UNANSWERED,
        FaultKind.HANG,
        FaultKind.RAISE,
        FaultKind.FINISH_TWICE,
        FaultKind.UNKNOWN_BLOCK,
    }
)
"""Kinds that strike a load as a whole; `Fault.blocks` says nothing to them."""

LOOKUP_KINDS = frozenset({FaultKind.PENDING, FaultKind.UNANSWERED})
"""Kinds that strike the lookup: before there is a load, which they leave alone."""

DELAY_KINDS = frozenset({FaultKind.DELAY, FaultKind.PENDING})
"""Kinds that take `Fault.delay_s`."""

ASYNC_KINDS = frozenset({FaultKind.HANG, FaultKind.REOFFER, FaultKind.FINISH_MISSING, FaultKind.FINISH_TWICE})
"""Kinds that only an async load can have. A sync load that hangs stops the whole engine, by design; and vLLM never
asks again for a sync load."""

SYNC_KINDS = frozenset({FaultKind.FINISH_SYNC})
"""Kinds that only a sync load can have."""


class HoldPoint(StrEnum):
    """Where kvproof's own connector stops and waits, in the middle of moving one block."""

    PAYLOAD = "payload"
    """Half of the block's payload is written; the block has neither a place nor an index entry."""
    INDEX = "index"
    """The payload is whole, durable and in its place; its index entry does not exist."""
    LOAD = "load"
    """The blocks before it are in the KV cache; it has been read, and is not."""


class ControlError(ValueError):
    """A `kv_transfer_params["kvproof"]` value that is not a control; the text says which field and why."""


@dataclass(frozen=True)
class Fault:
    """One fault: what breaks, which blocks of the loaded prefix, and how many loads of the request."""

    kind: FaultKind = FaultKind.NONE
    blocks: BlockSelector = "all"
    times: int = 1
    delay_s: float = 0.0


NO_FAULT = Fault()


@dataclass(frozen=True)
class Hold:
    """A stop in the middle of a save or load, at `point` of logical block `block`: the connector journals it and goes
    on after `wait_s` seconds, unless its process is killed meanwhile. Time counts on while the process is paused."""

    block: int
    point: HoldPoint
    wait_s: float


@dataclass(frozen=True)
class LoadControl:
    """What one request asks of the connector.

    `tag` names the request in journals (the harness's own id). `offer_blocks` caps the number of leading
    prompt blocks that may come from the store. `hold` is for faults of the process; None: no stop.
    """

    tag: str = ""
    load: LoadMode = LoadMode.SYNC
    offer_blocks: int = ALL_BLOCKS
    fault: Fault = NO_FAULT
    hold: Hold | None = None


DEFAULT_CONTROL = LoadControl()


@dataclass(frozen=True)
class Breakage:
    """What happens to one load.

    `garbage`, `withheld`, `reported`: logical block indices inside the loaded prefix. `late`: reported one step too
    late. `untold`: the inner connector does not learn what was reported. `unknown_count`: how many block ids that
    belong to nobody are reported. `extra_finishes`: how often more (or, negative, less) than it should the load is
    reported as finished. `raises`: the load hook raises.
    """

    garbage: tuple[int, ...] = ()
    withheld: tuple[int, ...] = ()
    reported: tuple[int, ...] = ()
    delay_s: float = 0.0
    late: bool = False
    untold: bool = False
    unknown_count: int = 0
    extra_finishes: int = 0
    raises: bool = False

    @property
    def fires(self) -> bool:
        return self != NO_BREAKAGE


NO_BREAKAGE = Breakage()


def select(blocks: BlockSelector, loaded_block_count: int) -> tuple[int, ...]:
    """The indices in `range(loaded_block_count)` that a selector names; indices beyond it are left out."""
    if loaded_block_count <= 0:
        return ()
    if isinstance(blocks, tuple):
        return tuple(index for index in blocks if index < loaded_block_count)
    last = loaded_block_count - 1
    return {
        "first": (0,),
        "middle": (loaded_block_count // 2,),
        "last": (last,),
        "all": tuple(range(loaded_block_count)),
    }[blocks]


def breakage(fault: Fault, loaded_block_count: int, earlier_load_count: int) -> Breakage:
    """What `fault` does to a load of `loaded_block_count` blocks that follows `earlier_load_count` loads
    of the same request."""
    chosen = select("all" if fault.kind in WHOLE_LOAD_KINDS else fault.blocks, loaded_block_count)
    if earlier_load_count >= fault.times or not chosen:
        return NO_BREAKAGE
    reported = Breakage(garbage=chosen, reported=chosen)
    return {
        FaultKind.NONE: NO_BREAKAGE,
        FaultKind.REPORT: reported,
        FaultKind.DROP: Breakage(withheld=chosen, reported=chosen),
        FaultKind.SILENT: Breakage(garbage=chosen),
        FaultKind.DELAY: Breakage(delay_s=fault.delay_s),
        FaultKind.PENDING: NO_BREAKAGE,
        FaultKind.UNANSWERED: NO_BREAKAGE,
        FaultKind.HANG: Breakage(extra_finishes=-1),
        FaultKind.RAISE: Breakage(raises=True),
        FaultKind.REOFFER: replace(reported, untold=True),
        FaultKind.REPORT_LATE: replace(reported, late=True),
        FaultKind.REPORT_STALE: Breakage(reported=chosen, late=True),
        FaultKind.FINISH_MISSING: replace(reported, extra_finishes=-1),
        FaultKind.FINISH_TWICE: Breakage(extra_finishes=1),
        FaultKind.FINISH_SYNC: replace(reported, extra_finishes=1),
        FaultKind.UNKNOWN_BLOCK: Breakage(unknown_count=1),
    }[fault.kind]


def lookup_delay_s(fault: Fault, earlier_load_count: int) -> float:
    """How long the lookup of a load that follows `earlier_load_count` loads of the same request answers "not yet";
    infinite for ever."""
    if fault.kind not in LOOKUP_KINDS or earlier_load_count >= fault.times:
        return 0.0
    return fault.delay_s if fault.kind is FaultKind.PENDING else inf


def to_params(control: LoadControl) -> dict[str, object]:
    """The `kv_transfer_params` that carry `control`; `parse_control` is its inverse."""
    fault = control.fault
    return {
        PARAMS_KEY: {
            "tag": control.tag,
            "load": control.load.value,
            "offer_blocks": "all" if control.offer_blocks == ALL_BLOCKS else control.offer_blocks,
            "fault": {
                "kind": fault.kind.value,
                "blocks": list(fault.blocks) if isinstance(fault.blocks, tuple) else fault.blocks,
                "times": "always" if fault.times == ALWAYS else fault.times,
                "delay_s": fault.delay_s,
            },
            **({"hold": _hold_to_json(control.hold)} if control.hold else {}),
        }
    }


def parse_control(params: Mapping[str, object] | None) -> LoadControl:
    """The control in a request's `kv_transfer_params`, or the default where there is none.

    Raises ControlError for an unknown key, kind, selector or a value of the wrong type.
    """
    raw = (params or {}).get(PARAMS_KEY)
    if raw is None:
        return DEFAULT_CONTROL
    fields = _fields(raw, "kvproof", {"tag", "load", "offer_blocks", "fault", "hold"})
    return LoadControl(
        tag=_tag(fields.get("tag", "")),
        load=_choice(LoadMode, fields.get("load", LoadMode.SYNC), "load"),
        offer_blocks=_count(fields.get("offer_blocks", "all"), "all", ALL_BLOCKS, "offer_blocks"),
        fault=_fault(fields.get("fault", {})),
        hold=_hold(fields["hold"]) if "hold" in fields else None,
    )


def _hold_to_json(hold: Hold) -> dict[str, object]:
    return {"block": hold.block, "point": hold.point.value, "wait_s": hold.wait_s}


def _fault(raw: object) -> Fault:
    fields = _fields(raw, "fault", {"kind", "blocks", "times", "delay_s"})
    return Fault(
        kind=_choice(FaultKind, fields.get("kind", FaultKind.NONE), "fault.kind"),
        blocks=_selector(fields.get("blocks", "all")),
        times=_count(fields.get("times", 1), "always", ALWAYS, "fault.times"),
        delay_s=_seconds(fields.get("delay_s", 0.0), "fault.delay_s"),
    )


def _hold(raw: object) -> Hold:
    fields = _fields(raw, "hold", {"block", "point", "wait_s"})
    missing = sorted({"block", "point", "wait_s"} - set(fields))
    if missing:
        raise ControlError(f"hold: {', '.join(missing)} missing")
    return Hold(
        block=_index(fields["block"], "hold.block"),
        point=_choice(HoldPoint, fields["point"], "hold.point"),
        wait_s=_wait(fields["wait_s"]),
    )


def _fields(raw: object, path: str, known: set[str]) -> Mapping[str, object]:
    if not isinstance(raw, Mapping):
        raise ControlError(f"{path}: {raw!r} is not a mapping")
    unknown = sorted(str(key) for key in raw if key not in known)
    if unknown:
        raise ControlError(f"{path}: unknown key {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return raw


def _tag(raw: object) -> str:
    if isinstance(raw, str):
        return raw
    raise ControlError(f"tag: {raw!r} is not a string")


def _choice(kind: type[Choice], raw: object, path: str) -> Choice:
    try:
        return kind(str(raw))
    except ValueError:
        raise ControlError(f"{path}: {raw!r} is not one of {', '.join(kind)}") from None


def _count(raw: object, word: str, meaning: int, path: str) -> int:
    if raw == word:
        return meaning
    if isinstance(raw, int) and not isinstance(raw, bool) and raw >= 0:
        return raw
    raise ControlError(f"{path}: {raw!r} is neither a whole number >= 0 nor {word!r}")


def _index(raw: object, path: str) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool) and raw >= 0:
        return raw
    raise ControlError(f"{path}: {raw!r} is not a whole number >= 0")


def _wait(raw: object) -> float:
    wait_s = _seconds(raw, "hold.wait_s")
    if wait_s > HOLD_S_MAX:
        raise ControlError(f"hold.wait_s: {raw!r} is more than {HOLD_S_MAX:g} seconds")
    return wait_s


def _seconds(raw: object, path: str) -> float:
    # The upper bound is for NaN, infinity and integers that no float can hold.
    if isinstance(raw, int | float) and not isinstance(raw, bool) and 0 <= raw <= sys.float_info.max:
        return float(raw)
    raise ControlError(f"{path}: {raw!r} is not a number of seconds >= 0")


def _selector(raw: object) -> BlockSelector:
    if isinstance(raw, str) and raw in SELECTOR_NAMES:
        return raw
    if isinstance(raw, list | tuple) and all(type(index) is int and index >= 0 for index in raw):
        return tuple(raw)
    raise ControlError(f"fault.blocks: {raw!r} is neither one of {', '.join(SELECTOR_NAMES)} nor a list of indices")
