"""SharedVolumeConnector: vLLM's KV-connector calls -> blocks on a shared volume.

A producer saves every whole prompt block at the end of the step that completed it; a consumer offers the
longest prefix found in the index and loads it, in the step itself (sync) or in a thread (async). What cannot
be read is reported to vLLM by block id, never hidden. vLLM creates two instances: one beside the scheduler,
which decides, and one in each worker, which moves bytes; they talk through `SharedVolumeMetadata`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from services.journal import Journal
from services.shared_volume.jobs import LoadJob, SaveJob
from services.shared_volume.scheduler import SchedulerSide
from services.shared_volume.worker import WorkerSide
from services.store import BlockStore

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass(frozen=True)
class SharedVolumeConfig:
    """`kv_connector_extra_config` of this connector. `allow_faults`: requests may ask for a stop in the middle of
    their save or load."""

    kv_dir: str
    evidence_dir: str
    service: str
    read_deadline_s: float = 5.0
    verify_checksum: bool = True
    allow_faults: bool = False

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


@dataclass
class SharedVolumeMetadata(KVConnectorMetadata):
    """What the scheduler side asks of the workers in one step."""

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()


class SharedVolumeConnector(KVConnectorBase_V1):
    """See the module's first lines. Thread use: vLLM calls from one thread; loads run in the connector's own."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        config = SharedVolumeConfig.parse(self._kv_transfer_config.kv_connector_extra_config)
        store = BlockStore(Path(config.kv_dir), verify_checksum=config.verify_checksum)
        journal = Journal(Path(config.evidence_dir), config.service)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(vllm_config, kv_cache_config, store, journal, config.allow_faults)
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config, store, journal, config.read_deadline_s)

    # Scheduler side, once per request and step, in vLLM's engine-core process.

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Whole blocks beyond `num_computed_tokens` that the index has, at most prompt length - 1 tokens."""
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Plan the load of `num_external_tokens` tokens, where there are any."""
        self._scheduler.plan_load(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> SharedVolumeMetadata:
        """Hand the planned loads, and the saves of what this step will have computed, to the workers."""
        return SharedVolumeMetadata(self._scheduler.take_loads(), self._scheduler.saves(scheduler_output))

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
