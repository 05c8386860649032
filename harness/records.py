"""The types that cross the harness's modules; frozen, without logic.

Direction of the data: matrix file -> Cell -> Observation -> Verdict -> report. Everything here can be written
as JSON and read back (harness/run_folder.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from annotated_types import Interval, Len

from harness.faults.process_kinds import ProcessFault
from harness.faults.storage_kinds import StorageFault
from services.faults import NO_FAULT, Fault, LoadMode
from services.journal import Event, Seconds

SCHEMA_VERSION = 1

CELL_ID_BYTES_MAX = 200
"""A cell's evidence lies in a folder that is named like it."""

BASELINE = "decode-baseline"
"""The engine without faults, on which the oracles of all engines with the same settings are measured."""


class Outcome(StrEnum):
    """What happened in a cell."""

    LOADED = "loaded"
    """No load failed: what the store had was used, and everything equals its oracle."""
    RECOVERED = "recovered"
    """The failure was reported and every completion equals its oracle."""
    FAILED_CLEANLY = "failed-cleanly"
    """The failure was reported and the affected requests got an error and no text. Where the engine itself was killed
    or paused: no answer at all, and everything was right afterwards."""
    CAUGHT = "caught"
    """Silent control: the comparison saw the wrong KV."""

    WRONG_OUTPUT = "wrong-output"
    """The victim's completion is neither its oracle's nor the clean error that was promised."""
    CRASHED = "crashed"
    """The engine died."""
    HUNG = "hung"
    """A request had no answer before its deadline."""
    POISONED = "poisoned"
    """The same prompt, sent again without a fault, is wrong, or files on the volume are not what they were."""
    COLLATERAL = "collateral"
    """A request that ran beside the victim is wrong."""
    LEAKED = "leaked"
    """Requests or KV blocks are still held when everything is over."""
    UNREPORTED = "unreported"
    """A load failed and vLLM was not told which blocks."""

    MISSED = "missed"
    """Silent control that the comparison did not see."""
    UNPROVEN = "unproven"
    """A precondition does not hold (nothing loaded, fault did not fire, oracle unstable): no claim is made."""
    NOT_RUN = "not-run"
    """The stack lacks what the cell needs, or the harness could not run it."""


class Status(StrEnum):
    """What the outcome means for the run."""

    PASS = "pass"
    FAIL = "fail"
    KNOWN = "known"
    FIXED = "fixed"
    INCONCLUSIVE = "inconclusive"
    ERROR = "error"
    SKIPPED = "skipped"


class Role(StrEnum):
    """What a request is in its cell."""

    VICTIM = "victim"
    """Its load is broken (or, in a no-fault cell, watched)."""
    SHARER = "sharer"
    """Its prompt shares the victim's first blocks; it runs beside the victim."""
    BYSTANDER = "bystander"
    """Shares nothing with the victim; runs beside it."""
    CANARY = "canary"
    """The victim's prompt again, after the fault, without a fault and without clearing the prefix cache."""
    RELOAD = "reload"
    """After a fault in storage or of a process: the same prompt once more, with the files put back (or saved again) and
    the prefix cache cleared."""


class OracleKind(StrEnum):
    """reuse: everything offered is loaded. recompute: nothing is. partial: only the first `blocks` blocks."""

    REUSE = "reuse"
    RECOMPUTE = "recompute"
    PARTIAL = "partial"


class Moment(StrEnum):
    """A moment of a cell, seen in the engine's journal or metrics, at which a request is sent or its client leaves."""

    AHEAD = "ahead"
    """Before the victim, which is sent once the engine has every request that is ahead."""
    START = "start"
    """The cell begins, or the engine has those ahead."""
    LOADING = "loading"
    """vLLM has given blocks to the victim's load, or was told to ask for it later."""
    REPAIR = "repair"
    """vLLM has been told that blocks of the victim's load are bad."""
    GONE = "gone"
    """The victim's client has its answer, or has left."""


@dataclass(frozen=True)
class Engine:
    """An engine that runs cells. `policy`: its kv_load_failure_policy. `oracle_engine`: where its oracles are measured,
    with the same settings."""

    service: str
    policy: str
    oracle_engine: str


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids. `full_block_count`: whole blocks that can be loaded, i.e. (len - 1) // block size.
    `secret`: a word that occurs in no other prompt, or empty. `message`: what a user says so that the model's chat
    template gives just these tokens; empty for a prompt that is no chat. `unstored`: it has no block on purpose."""

    id: str
    token_ids: tuple[int, ...]
    text: str
    full_block_count: Annotated[int, Interval(ge=0, le=10**9)]
    secret: str = ""
    message: str = ""
    unstored: bool = False


@dataclass(frozen=True)
class PromptSpec:
    """A prompt before it is tokenised. `text` is used as it is when `token_count` is 0; otherwise it is
    repeated or cut at token level to exactly `token_count` tokens. `share_with`/`shared_blocks`: the first
    `shared_blocks` blocks are those of that other prompt. `chat`: the text is a user's message, and the model's chat
    template makes the prompt of it. `unstored`: shorter than a block on purpose, so that nothing of it is stored."""

    id: str
    text: str
    token_count: int = 0
    secret: str = ""
    share_with: str = ""
    shared_blocks: int = 0
    chat: bool = False
    unstored: bool = False


@dataclass(frozen=True)
class PlannedRequest:
    """One request of a cell. `sent`: when. `gives_up`: when its client closes the connection; None: it stays.
    `deadline_s`: 0 for the cell's. `chat`: through the chat API."""

    role: Role
    prompt_id: str
    load: LoadMode
    fault: Fault = NO_FAULT
    stream: bool = False
    sent: Moment = Moment.START
    gives_up: Moment | None = None
    deadline_s: Seconds = 0.0
    chat: bool = False


@dataclass(frozen=True)
class Cell:
    """One experiment. `engine` is a service name; `policy` its kv_load_failure_policy; its oracles are measured on
    `oracle_engine`. `requests` are in the order in which they are sent. `preempts`: the engine has to run out of
    blocks during it and preempt a request, or the cell proves nothing. `control`: this cell shows that the test itself
    works. `group`: reports keep these cells apart; empty for most. `storage`: what is done to the files of the victim's
    blocks, `process`: which process is struck; then no request has a fault of its own."""

    id: str
    engine: str
    policy: str
    load: LoadMode
    requests: Annotated[tuple[PlannedRequest, ...], Len(1)]
    expected: Outcome
    why: str
    max_tokens: int = 8
    deadline_s: Seconds = 60.0
    control: bool = False
    report: str = ""
    storage: StorageFault | None = None
    group: str = ""
    oracle_engine: str = BASELINE
    preempts: bool = False
    process: ProcessFault | None = None

    @property
    def fault(self) -> Fault:
        """The victim's fault; NO_FAULT in a cell without one."""
        return next((r.fault for r in self.requests if r.fault != NO_FAULT), NO_FAULT)


@dataclass(frozen=True)
class Plan:
    """A matrix file, expanded: what to measure, in order."""

    name: str
    prompts: tuple[PromptSpec, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class TokenChoice:
    """One entry of a top-k list."""

    token_id: int
    logprob: float


@dataclass(frozen=True)
class Completion:
    """What the client saw of one request. `status_code` 0: no HTTP answer (`error` says why, e.g. connection
    reset or deadline). `error` is also the engine's error body, or the error event of a stream. `broken_off`: the
    engine did not say that error, the answer just did not come, end or make sense. `gave_up`: the client closed the
    connection on purpose before the answer was whole.
    `top` has, per generated token, the top-k list in descending order. `ttft_s` is 0 for a plain request."""

    status_code: int
    error: str = ""
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = ""
    top: tuple[tuple[TokenChoice, ...], ...] = ()
    prompt_token_count: int = 0
    ttft_s: Seconds = 0.0
    duration_s: Seconds = 0.0
    timed_out: bool = False
    broken_off: bool = False
    gave_up: bool = False


@dataclass(frozen=True)
class OracleKey:
    """Which oracle: `blocks` is k for partial(k), 0 otherwise. `max_tokens` as in the cell. `engine`: where it is
    measured."""

    prompt_id: str
    kind: OracleKind
    blocks: int = 0
    max_tokens: int = 8
    engine: str = BASELINE


@dataclass(frozen=True)
class OracleRun:
    """One measurement of an oracle on `key.engine`, with the journal events of that request."""

    key: OracleKey
    completion: Completion
    events: tuple[Event, ...] = ()


@dataclass(frozen=True)
class EngineState:
    """From the engine's /health and /metrics and the supervisor's journal. `cache_usage` is the share of KV
    blocks held by requests, 0..1. `restart_count` counts engine exits so far, `preemption_count` preempted requests
    since the engine started."""

    healthy: bool
    running_count: int
    waiting_count: int
    cache_usage: float
    restart_count: int
    preemption_count: int = 0


@dataclass(frozen=True)
class RequestRecord:
    """A planned request, the tag it was sent with, when (seconds after the cell began), and its completion."""

    planned: PlannedRequest
    tag: str
    sent_s: Seconds
    completion: Completion


NOTHING = "nothing"
"""In a Damage, where no file lies."""


@dataclass(frozen=True)
class Damage:
    """One file that was damaged (or, with a fault of a process, watched): the victim's logical block it belongs to, its
    name on the volume, and what lay there before, during and after the fault, in words. `held_s`: how long the first
    who opened it had to wait."""

    block: int
    file: str
    before: str
    during: str
    after: str = ""
    held_s: Seconds = 0.0


@dataclass(frozen=True)
class VolumeFile:
    """A file on the KV volume; what is no regular file says so in its name."""

    name: str
    size_bytes: int


@dataclass(frozen=True)
class VolumeRecord:
    """What a fault in storage did, and everything on the volume before it and after the cell. With a fault of a process
    only the files of the victim's blocks: others may be busy with the rest."""

    damages: tuple[Damage, ...] = ()
    before: tuple[VolumeFile, ...] = ()
    after: tuple[VolumeFile, ...] = ()


@dataclass(frozen=True)
class ProcessRecord:
    """What the producer did in a cell that has the victim's prompt saved anew. `events`: its journal meanwhile.
    `saves`: its answers to the save that was disturbed and, where it was killed, to the one after that."""

    events: tuple[Event, ...] = ()
    saves: tuple[Completion, ...] = ()


@dataclass(frozen=True)
class Observation:
    """Everything recorded for one cell, saved before anyone judges it. `events`: the engine's journal while
    the cell ran. `after`: the engine once its queues were empty, or when waiting for that was given up (`settled`
    False; also where it would not empty its prefix cache at the end). `error`: the harness could not run the cell, and
    why. `skipped`: the stack lacks what the cell needs, and what that is. `volume`: empty in a cell without a fault in
    storage or of a process, `process` where the prompt was not saved anew. `session`: which start of the
    stack this was, 0 the first; a run that was resumed has several."""

    cell_id: str
    requests: tuple[RequestRecord, ...]
    before: EngineState
    after: EngineState
    settled: bool
    events: tuple[Event, ...]
    log_lines: tuple[str, ...]
    started_at_s: Seconds
    duration_s: Seconds
    error: str = ""
    skipped: str = ""
    volume: VolumeRecord = VolumeRecord()
    process: ProcessRecord = ProcessRecord()
    session: int = 0


@dataclass(frozen=True)
class Finding:
    """One check and its result. `check` is a stable name such as `fault-fired` or `victim-equals-oracle`."""

    check: str
    ok: bool
    detail: str = ""
    request: str = ""
    expected: str = ""
    got: str = ""


@dataclass(frozen=True)
class Difference:
    """Where a completion leaves its oracle: index of the first differing token, both tokens' top-k lists, and
    both whole completions as token ids."""

    request: str
    oracle: str
    index: int
    expected_token_id: int
    got_token_id: int
    expected_top: tuple[TokenChoice, ...]
    got_top: tuple[TokenChoice, ...]
    expected_text: str
    got_text: str
    near_tie: bool
    expected_token_ids: tuple[int, ...] = ()
    got_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """Counts that back a verdict: blocks loaded, failed inside the inner connector, reported to vLLM; how often
    the fault fired."""

    loaded_blocks: int = 0
    failed_blocks: int = 0
    reported_blocks: int = 0
    fault_fired: int = 0


@dataclass(frozen=True)
class Verdict:
    """The judge's answer for one cell."""

    cell_id: str
    outcome: Outcome
    status: Status
    findings: tuple[Finding, ...]
    evidence: Evidence
    differences: tuple[Difference, ...] = ()
    link: str = ""


@dataclass(frozen=True)
class SecondAttempt:
    """A cell that was not green, run once more with nothing beside it, and judged by itself; the first verdict is the
    one that counts."""

    observation: Observation
    verdict: Verdict


@dataclass(frozen=True)
class Versions:
    """Of what ran inside the engines; empty where nobody said."""

    vllm: str = ""
    torch: str = ""
    python: str = ""
    model: str = ""
    connector: str = ""


@dataclass(frozen=True)
class EngineInfo:
    """What an engine was started with: environment names and their values, and vLLM's command line."""

    versions: Versions
    settings: dict[str, str]
    command: tuple[str, ...]


@dataclass(frozen=True)
class Failure:
    """Why a run did not come to its end, and the exit code that this has."""

    text: str
    exit_code: int


@dataclass(frozen=True)
class RunInfo:
    """What a run is: stored as run.json when it begins, and again once its engines are ready. Times are Unix seconds.

    `seed`: of the order of the cells and the salt of the prompts; 0 for neither. `versions`, `engines` and
    `block_size` (tokens in one KV block, 0 for unknown) are the engines'; `engines`, by service name, has only those
    that describe themselves. `resumed_at_s`: when the run was taken up again. `replay_of`: the run folder whose cells
    are repeated, or empty; `differences` says in what this run is not like that one. `failure`: None unless the run
    ended too early. To repeat it: `stack_options` of the command line, and the `variables` that compose.yaml passed
    on; `in_compose`: the harness was a container of the Compose project, so that `make up` started all of it."""

    run_id: str
    matrix: str
    stack: str
    command: str
    started_at_s: Seconds
    seed: int = 0
    versions: Versions = Versions()
    engines: dict[str, EngineInfo] = field(default_factory=dict)
    block_size: int = 0
    resumed_at_s: tuple[Seconds, ...] = ()
    replay_of: str = ""
    differences: tuple[str, ...] = ()
    failure: Failure | None = None
    schema_version: int = SCHEMA_VERSION
    stack_options: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    in_compose: bool = False


@dataclass(frozen=True)
class Timing:
    """Seconds spent: per phase in order (name, seconds), and in all; of every session of the run together."""

    phases: tuple[tuple[str, float], ...]
    duration_s: Seconds


@dataclass(frozen=True)
class Report:
    """Everything a report is written from. `cells` are all that were planned, in order; `observations` and
    `verdicts` may be fewer. `again`: the second attempts of cells that were not green. `exit_code` is the judge's, or
    that of the run's failure. `folder` is the run folder as the reader reaches it. `prompts` and
    `oracles` as the run had them."""

    info: RunInfo
    timing: Timing
    cells: tuple[Cell, ...]
    observations: tuple[Observation, ...]
    verdicts: tuple[Verdict, ...]
    exit_code: int
    folder: str
    prompts: tuple[Prompt, ...] = ()
    oracles: tuple[OracleRun, ...] = ()
    again: tuple[SecondAttempt, ...] = ()
