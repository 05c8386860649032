"""SharedVolumeConnector: vLLM's KV-connector calls -> blocks on a shared volume.

A producer saves every whole prompt block at the end of the step that completed it; a consumer offers the
longest prefix found in the index and loads it, in the step itself (sync) or in a thread (async). What cannot
be read is reported to vLLM by block id, never hidden. vLLM creates two instances: one beside the scheduler,
which decides, and one in each worker, which moves bytes; they talk through `SharedVolumeMetadata`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from services.faults import DEFAULT_CONTROL, ControlError, LoadControl, LoadMode, parse_control
from services.journal import EventName, Journal
from services.kv_blocks import KVBlocks
from services.store import BlockStore, FailureReason, ReadFailure, Shard, block_keys, fingerprint, hash_files, root_key

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvproof.shared_volume")

LOADER_THREADS = 4
"""Async loads in progress at a time."""
READER_THREADS = 8
"""Block files read at a time, over all loads."""


@dataclass(frozen=True)
class SharedVolumeConfig:
    """`kv_connector_extra_config` of this connector."""

    kv_dir: str
    evidence_dir: str
    service: str
    read_deadline_s: float = 5.0
    verify_checksum: bool = True

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> SharedVolumeConfig:
        """Raises ValueError naming unknown and missing keys: a mistyped key must not mean the default."""
        known = {f.name for f in fields(cls)}
        unknown, missing = set(raw) - known, {"kv_dir", "evidence_dir", "service"} - set(raw)
        if unknown or missing:
            raise ValueError(
                f"SharedVolumeConnector: unknown keys {sorted(unknown)}, missing keys {sorted(missing)} in "
                f"kv_connector_extra_config; known are {sorted(known)}"
            )
        return cls(**raw)


@dataclass(frozen=True)
class LoadJob:
    """Blocks to load for one request: `keys[i]` goes into `block_ids[i]`, logical block `first_block + i`."""

    request_id: str
    tag: str
    mode: LoadMode
    first_block: int
    keys: tuple[str, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class SaveJob:
    """Blocks to save for one request: `block_ids[i]` goes under `keys[i]`, logical block `first_block + i`."""

    request_id: str
    tag: str
    first_block: int
    keys: tuple[str, ...]
    block_ids: tuple[int, ...]


@dataclass
class SharedVolumeMetadata(KVConnectorMetadata):
    """What the scheduler side asks of the workers in one step."""

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()


@dataclass
class _RequestState:
    """What the scheduler side remembers of a request until vLLM finishes it."""

    control: LoadControl
    keys: tuple[str, ...]
    prompt_token_count: int
    block_ids: list[int] = field(default_factory=list)
    saved_block_count: int = 0
    matched_block_count: int = -1
    first_block: int = 0
    load: LoadJob | None = None
    failed_keys: set[str] = field(default_factory=set)


class SharedVolumeConnector(KVConnectorBase_V1):
    """See the module's first lines. Thread use: vLLM calls from one thread; loads run in the connector's own."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        config = SharedVolumeConfig.parse(self._kv_transfer_config.kv_connector_extra_config)
        store = BlockStore(Path(config.kv_dir), verify_checksum=config.verify_checksum)
        journal = Journal(Path(config.evidence_dir), config.service)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = _SchedulerSide(vllm_config, kv_cache_config, store, journal)
        else:
            self._worker = _WorkerSide(vllm_config, kv_cache_config, store, journal, config.read_deadline_s)

    # Scheduler side, once per request and step, in vLLM's engine-core process.

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Whole blocks beyond `num_computed_tokens` that the index has, at most prompt length - 1 tokens."""
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Plan the load of `num_external_tokens` tokens, where there are any."""
        self._scheduler.plan_load(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> SharedVolumeMetadata:
        """Hand the planned loads, and the saves of what this step will have computed, to the workers."""
        return self._scheduler.take_jobs(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Learn which blocks failed: they are not offered to that request again."""
        self._scheduler.note_failures(connector_output.invalid_block_ids or ())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:  # noqa: ARG002
        """Forget the request. Saves are done when their step ends, so its blocks may be freed at once."""
        self._scheduler.forget(request.request_id)
        return False, None

    # Worker side, once per step, in each worker process.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ARG002
        """Do this step's sync loads, start its async ones."""
        self._worker.start_loads(self._metadata().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: sync loads ended in start_load_kv."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing per layer: blocks are saved whole when the step ends."""

    def wait_for_save(self) -> None:
        """Save this step's blocks, except in a step whose load failed: they may be computed from bad KV."""
        self._worker.save(self._metadata().saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:  # noqa: ARG002
        """Async loads that ended since the last step; their failed blocks are due in the same step."""
        return None, self._worker.take_finished() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_block_ids()

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            self._worker.shutdown()

    def _metadata(self) -> SharedVolumeMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, SharedVolumeMetadata)
        return metadata


class _SchedulerSide:
    """Decides what is offered, loaded and saved."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, store: BlockStore, journal: Journal
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        self._block_size = vllm_config.cache_config.block_size
        self._shard_count = vllm_config.parallel_config.tensor_parallel_size
        self._loads_allowed, self._saves_allowed = transfer.is_kv_consumer, transfer.is_kv_producer
        self._fingerprint = engine_fingerprint(vllm_config, kv_cache_config)
        self._store, self._journal = store, journal
        self._requests: dict[str, _RequestState] = {}
        self._planned: list[LoadJob] = []

    def match(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        state = self._state(request)
        if not self._loads_allowed or state.control.load is LoadMode.OFF:
            return 0, False
        state.first_block = num_computed_tokens // self._block_size
        count = self._found(state) - state.first_block
        return count * self._block_size, count > 0 and state.control.load is LoadMode.ASYNC

    def plan_load(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        state = self._state(request)
        if num_external_tokens <= 0:
            return
        first, end = state.first_block, state.first_block + num_external_tokens // self._block_size
        state.load = LoadJob(
            request.request_id,
            _tag(state.control, request.request_id),
            state.control.load,
            first,
            state.keys[first:end],
            tuple(block_ids[first:end]),
        )
        self._planned.append(state.load)

    def take_jobs(self, output: SchedulerOutput) -> SharedVolumeMetadata:
        loads, self._planned = tuple(self._planned), []
        saves = tuple(self._saves(output)) if self._saves_allowed else ()
        return SharedVolumeMetadata(loads, saves)

    def note_failures(self, invalid_block_ids: Iterable[int]) -> None:
        invalid = set(invalid_block_ids)
        for state in self._requests.values():
            if state.load and invalid:
                state.failed_keys.update(
                    key
                    for key, block_id in zip(state.load.keys, state.load.block_ids, strict=True)
                    if block_id in invalid
                )

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def _state(self, request: Request) -> _RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = self._new_state(request)
        return state

    def _new_state(self, request: Request) -> _RequestState:
        token_ids = request.prompt_token_ids or []
        lora = request.lora_request
        root = root_key(
            self._fingerprint,
            request.cache_salt or "",
            f"{lora.lora_name}:{lora.lora_path}" if lora else "",
            tuple(f"{f.identifier}@{f.mm_position.offset}" for f in request.mm_features),
        )
        return _RequestState(_control(request), block_keys(root, token_ids, self._block_size), len(token_ids))

    def _found(self, state: _RequestState) -> int:
        """The number of leading blocks that are local or in the index; journals when it changes."""
        limit = (state.prompt_token_count - 1) // self._block_size
        found = state.first_block
        while found < limit and self._offers(state, state.keys[found]):
            found += 1
        if found != state.matched_block_count:
            state.matched_block_count = found
            self._journal.write(
                EventName.LOOKUP, request=state.control.tag, blocks=tuple(range(state.first_block, found))
            )
        return max(found, state.first_block)

    def _offers(self, state: _RequestState, key: str) -> bool:
        return key not in state.failed_keys and self._store.contains(key, self._shard_count)

    def _saves(self, output: SchedulerOutput) -> Iterable[SaveJob]:
        for new in output.scheduled_new_reqs:
            state = self._requests[new.req_id]
            state.block_ids, state.saved_block_count = list(new.block_ids[0]), 0
            yield from self._save(new.req_id, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id])
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            state = self._requests[request_id]
            computed = cached.num_computed_tokens[index]
            if request_id in cached.resumed_req_ids:
                state.block_ids = []
            state.block_ids += (cached.new_block_ids[index] or ([],))[0]
            # A request that was rewound after a failed load computes, and saves, those blocks again.
            state.saved_block_count = min(state.saved_block_count, computed // self._block_size)
            yield from self._save(request_id, computed + output.num_scheduled_tokens[request_id])

    def _save(self, request_id: str, computed_token_count: int) -> Iterable[SaveJob]:
        state = self._requests[request_id]
        first = state.saved_block_count
        end = min(computed_token_count, state.prompt_token_count) // self._block_size
        if end > first:
            state.saved_block_count = end
            tag = _tag(state.control, request_id)
            yield SaveJob(request_id, tag, first, state.keys[first:end], tuple(state.block_ids[first:end]))


class _WorkerSide:
    """Moves bytes between the volume and the KV cache of one worker."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        store: BlockStore,
        journal: Journal,
        read_deadline_s: float,
    ) -> None:
        parallel = vllm_config.parallel_config
        self._shard = Shard(parallel.rank % parallel.tensor_parallel_size, parallel.tensor_parallel_size)
        self._block_count = kv_cache_config.num_blocks
        self._store, self._journal, self._read_deadline_s = store, journal, read_deadline_s
        self._loaders = ThreadPoolExecutor(LOADER_THREADS, "kv-load")
        self._readers = ThreadPoolExecutor(READER_THREADS, "kv-read")
        self._lock = threading.Lock()
        self._ended: list[tuple[str, set[int]]] = []
        self._failed_block_ids: set[int] = set()
        self._step_failed = False

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._blocks = KVBlocks(kv_caches, self._block_count)

    def start_loads(self, loads: tuple[LoadJob, ...]) -> None:
        self._step_failed = False
        for job in loads:
            if job.mode is LoadMode.ASYNC:
                self._loaders.submit(self._load_in_thread, job, _DeviceOrder.after_now(self._blocks))
            else:
                failed = self._load(job)
                self._failed_block_ids |= failed
                self._step_failed |= bool(failed)

    def save(self, saves: tuple[SaveJob, ...]) -> None:
        for job in saves:
            if self._step_failed:
                self._journal_save(EventName.SAVE_FAILED, job, 0, len(job.keys), "a load failed in this step")
            else:
                self._save(job)

    def take_finished(self) -> set[str]:
        """Requests whose async load ended; moves their failed blocks to this step's report."""
        with self._lock:
            ended, self._ended = self._ended, []
        for _, failed in ended:
            self._failed_block_ids |= failed
        return {request_id for request_id, _ in ended}

    def take_failed_block_ids(self) -> set[int]:
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def shutdown(self) -> None:
        self._loaders.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _load_in_thread(self, job: LoadJob, order: _DeviceOrder) -> None:
        """Whatever happens, the load ends: a request whose load is never reported waits for ever."""
        failed = set(job.block_ids)
        try:
            with order:
                failed = self._load(job)
        except Exception:
            logger.exception("Load of %s failed; all its blocks are reported", job.tag)
        finally:
            with self._lock:
                self._ended.append((job.request_id, failed))

    def _load(self, job: LoadJob) -> set[int]:
        """Read the job's blocks into the KV cache; the ids of those that could not be read."""
        deadline_s = time.monotonic() + self._read_deadline_s
        reads = [
            self._readers.submit(self._store.read, key, self._shard, self._blocks.layout, deadline_s)
            for key in job.keys
        ]
        failed = set()
        for index, read in enumerate(reads):
            payload = _result(read, deadline_s)
            if isinstance(payload, ReadFailure):
                failed.add(job.block_ids[index])
                self._journal_read_failure(job, index, payload)
            else:
                self._blocks.write(job.block_ids[index], payload)
        return failed

    def _save(self, job: SaveJob) -> None:
        for index, (key, block_id) in enumerate(zip(job.keys, job.block_ids, strict=True)):
            try:
                self._store.publish(key, self._shard, self._blocks.layout, self._parts(block_id))
            except OSError as error:
                logger.warning("KV of %s not saved: %s", job.tag, error)
                self._journal_save(EventName.SAVE_FAILED, job, index, len(job.keys), str(error))
                self._journal_save(EventName.SAVED, job, 0, index, "")
                return
        self._journal_save(EventName.SAVED, job, 0, len(job.keys), "")

    def _parts(self, block_id: int) -> Iterator[memoryview]:
        """The bytes of a block, copied only when asked for: a block that is in the store already is not."""
        yield from self._blocks.read(block_id)

    def _journal_save(self, name: EventName, job: SaveJob, first: int, end: int, reason: str) -> None:
        if end > first:
            blocks = tuple(range(job.first_block + first, job.first_block + end))
            self._journal.write(
                name,
                request=job.tag,
                blocks=blocks,
                block_ids=job.block_ids[first:end],
                reason=reason,
                keys=job.keys[first:end] if name is EventName.SAVED else (),
            )

    def _journal_read_failure(self, job: LoadJob, index: int, failure: ReadFailure) -> None:
        logger.warning("KV block %d of %s: %s", job.first_block + index, job.tag, failure.detail)
        self._journal.write(
            EventName.READ_FAILED,
            request=job.tag,
            mode=job.mode,
            blocks=(job.first_block + index,),
            block_ids=(job.block_ids[index],),
            reason=failure.reason,
        )


class _DeviceOrder:
    """Runs a thread's copies on their own stream, after what the engine had queued; nothing on the CPU."""

    def __init__(self, device: torch.device, ready: torch.cuda.Event | None) -> None:
        self._device, self._ready = device, ready

    @classmethod
    def after_now(cls, blocks: KVBlocks) -> _DeviceOrder:
        device = blocks.layers[0].tensor.device
        if device.type != "cuda":
            return cls(device, None)
        ready = torch.cuda.Event()
        ready.record()
        return cls(device, ready)

    def __enter__(self) -> None:
        if self._ready is not None:
            torch.cuda.set_device(self._device)
            self._stream = torch.cuda.Stream(self._device)
            self._stream.wait_event(self._ready)
            self._context = torch.cuda.stream(self._stream)
            self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._ready is not None:
            self._context.__exit__(*error)
            self._stream.synchronize()


def engine_fingerprint(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Everything besides the tokens that decides the bytes of a block, as one hash.

    Model config and weight files (by content, so a copy of a folder is the same model and a new revision is
    not), dtypes, block size, layers and their KV shapes, tensor and pipeline parallelism.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    model_config = model.hf_config.to_dict()
    model_config.pop("_name_or_path", None)
    groups = [(sorted(g.layer_names), repr(g.kv_cache_spec)) for g in kv_cache_config.kv_cache_groups]
    return fingerprint(
        {
            "model_config": repr(sorted(model_config.items(), key=lambda item: item[0])),
            "weights": hash_files(_weight_files(model.model, model.revision)),
            "dtype": str(model.dtype),
            "cache_dtype": str(cache.cache_dtype),
            "block_size": str(cache.block_size),
            "layers": repr(groups),
            "parallel": f"{parallel.tensor_parallel_size}x{parallel.pipeline_parallel_size}",
        }
    )


def _weight_files(model: str, revision: str | None) -> list[Path]:
    """The weight files of a local folder or of a hub model that vLLM has already fetched."""
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
    return [p for pattern in ("*.safetensors", "*.bin", "*.pt", "*.gguf") for p in folder.glob(pattern)]


def _control(request: Request) -> LoadControl:
    """The request's control; a malformed one counts as none (the fault injector journals why)."""
    try:
        return parse_control(request.kv_transfer_params)
    except ControlError:
        return DEFAULT_CONTROL


def _tag(control: LoadControl, request_id: str) -> str:
    return control.tag or request_id


def _result(read: Future[bytearray | ReadFailure], deadline_s: float) -> bytearray | ReadFailure:
    """A read's result, or TIMEOUT when the file system itself hangs (its thread is then lost, not the load)."""
    try:
        return read.result(timeout=max(0.0, deadline_s - time.monotonic()) + 0.1)
    except FutureTimeout:
        return ReadFailure(FailureReason.TIMEOUT, "the read did not return before its deadline")
