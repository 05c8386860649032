"""FaultInjectingConnector: wraps any KV connector and breaks loads at the boundary between it and vLLM.

The scheduler side learns from each request what to break and which block ids vLLM gave to the load; the
worker side lets the inner connector load, changes the bytes of the chosen blocks, and adds their ids to what
the inner connector reports. Everything else goes to the inner connector untouched. Every decode engine runs
behind it, the baseline too (with `allow_faults` false), so that a fault is the only difference between them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from services.fault_injecting.loads import Load
from services.fault_injecting.scheduler import SchedulerSide
from services.fault_injecting.worker import WorkerSide
from services.journal import Journal
from services.vllm_compat import forward_to_inner

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
class FaultInjectingConfig:
    """`kv_connector_extra_config` of this connector. `inner` is a kv-transfer config of its own
    (`kv_connector`, and where needed `kv_connector_module_path` and `kv_connector_extra_config`)."""

    evidence_dir: str
    service: str
    allow_faults: bool
    inner: Mapping[str, Any]

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> FaultInjectingConfig:
        """Raises ValueError naming unknown and missing keys."""
        known = {f.name for f in fields(cls)}
        if set(raw) != known:
            raise ValueError(
                f"FaultInjectingConnector: unknown keys {sorted(set(raw) - known)}, missing keys "
                f"{sorted(known - set(raw))} in kv_connector_extra_config"
            )
        return cls(**raw)


@dataclass
class FaultInjectingMetadata(KVConnectorMetadata):
    """The inner connector's metadata, and the loads that start in this step."""

    inner: KVConnectorMetadata
    loads: tuple[Load, ...] = ()


@forward_to_inner
class FaultInjectingConnector(KVConnectorBase_V1):
    """See the module's first lines. Methods of the base class that are not here go to `inner`."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        config = FaultInjectingConfig.parse(self._kv_transfer_config.kv_connector_extra_config)
        inner_config = inner_vllm_config(vllm_config, config.inner)
        self.inner: KVConnectorBase_V1 = inner_class(inner_config)(inner_config, role, kv_cache_config)
        journal = Journal(Path(config.evidence_dir), config.service)
        block_size = vllm_config.cache_config.block_size
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(self.inner, journal, block_size, config.allow_faults)
        else:
            self._worker = WorkerSide(self.inner, journal, kv_cache_config.num_blocks)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """What the inner connector requires."""
        inner = inner_vllm_config(vllm_config, vllm_config.kv_transfer_config.kv_connector_extra_config["inner"])
        layout: str | None = inner_class(inner).get_required_kvcache_layout(inner)
        return layout

    # Scheduler side.

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """What the inner connector offers, cut to the request's `offer_blocks`; nothing with load `off`."""
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Note which block ids the load goes to, and decide what will happen to them."""
        self.inner.update_state_after_alloc(request, blocks, num_external_tokens)
        self._scheduler.plan_load(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> FaultInjectingMetadata:
        return FaultInjectingMetadata(self.inner.build_connector_meta(scheduler_output), self._scheduler.take_loads())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Tell the inner connector what its workers reported, except for failures that it is not to know of."""
        self.inner.update_connector_output(self._scheduler.without_untold(connector_output))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.forget(request)
        answer: tuple[bool, dict[str, Any] | None] = self.inner.request_finished(request, block_ids)
        return answer

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)
        self.inner.register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, FaultInjectingMetadata)
        self.inner.handle_preemptions(kv_connector_metadata.inner)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, FaultInjectingMetadata)
        super().bind_connector_metadata(connector_metadata)
        self.inner.bind_connector_metadata(connector_metadata.inner)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self.inner.clear_connector_metadata()

    def has_connector_metadata(self) -> bool:
        return self._connector_metadata is not None

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Let the inner connector load, then break this step's sync loads. Raises InjectedError for the fault
        `raise`; the inner connector then loads nothing in this step.

        A connector that loads layer by layer during the forward pass is not covered: it would load over
        what was broken here.
        """
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, FaultInjectingMetadata)
        self._worker.before(metadata.loads)
        self.inner.start_load_kv(forward_context, **kwargs)
        self._worker.after_start(metadata.loads)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The inner connector's, with broken or delayed loads; what vLLM up to 0.26 calls."""
        sending, receiving = self.inner.get_finished(finished_req_ids)
        return sending, self._worker.finish(receiving or ()) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """As `get_finished`, for the versions that ask for all results in one snapshot."""
        results = self.inner.get_transfer_results(finished_req_ids)
        return replace(results, finished_recving=self._worker.finish(results.finished_recving))

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_reported()


def inner_class(inner_config: VllmConfig) -> type[KVConnectorBase_V1]:
    """The connector class that an inner config names."""
    found: type[KVConnectorBase_V1] = KVConnectorFactory.get_connector_class(inner_config.kv_transfer_config)
    return found


def inner_vllm_config(vllm_config: VllmConfig, inner: Mapping[str, Any]) -> VllmConfig:
    """The engine's config as the inner connector sees it: role, policy and engine id are the outer ones."""
    outer = vllm_config.kv_transfer_config
    config = copy.copy(vllm_config)
    config.kv_transfer_config = KVTransferConfig(
        **{
            "engine_id": outer.engine_id,
            "kv_role": outer.kv_role,
            "kv_load_failure_policy": outer.kv_load_failure_policy,
            **inner,
        }
    )
    return config
