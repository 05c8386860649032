"""What decides the bytes of a KV block besides the tokens, as one hash; part of every key."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from services.store import fingerprint, hash_files

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


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
