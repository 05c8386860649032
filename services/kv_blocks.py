"""Whole blocks of the engine's paged KV cache as bytes: read, write, overwrite, digest.

Used by both connectors on the worker side. It knows nothing of requests, files or faults; it only relies on
every KV tensor having one dimension that counts blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import xxhash

GARBAGE_SCALE = 8.0
"""Standard deviation of the noise that replaces KV; far outside what a model writes, and finite."""


class KVLayoutError(ValueError):
    """A KV tensor has no dimension, or several, that could count blocks."""


@dataclass(frozen=True)
class LayerBlocks:
    """One layer's KV tensor, and the dimension of it that counts blocks."""

    name: str
    tensor: torch.Tensor
    block_dim: int

    def block(self, block_id: int) -> torch.Tensor:
        """A view of one block; not contiguous where the block dimension is not the first."""
        return self.tensor.select(self.block_dim, block_id)


class KVBlocks:
    """The KV cache of one worker, addressed by block id.

    `layout` describes the bytes of a block (layer names, dtypes, shapes without the block dimension); two
    workers with equal layouts can exchange blocks. `block_bytes` is the size of one block over all layers.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], block_count: int) -> None:
        """`kv_caches`: layer name -> KV tensor, as vLLM passes to register_kv_caches.

        Raises KVLayoutError when a tensor's block dimension cannot be told.
        """
        self.layers = tuple(
            LayerBlocks(name, tensor, block_dimension(name, tensor, block_count))
            for name, tensor in sorted(kv_caches.items())
        )
        self.layout = ";".join(_layer_layout(layer) for layer in self.layers)
        self.block_bytes = sum(_byte_count(layer) for layer in self.layers)

    def read(self, block_id: int) -> list[memoryview]:
        """The bytes of a block, one buffer per layer; waits for the device where there is one."""
        return [_bytes_of(layer.block(block_id)) for layer in self.layers]

    def write(self, block_id: int, payload: bytearray | memoryview) -> None:
        """Replace a block by `payload`: `block_bytes` bytes in the order of `read`."""
        offset = 0
        for layer in self.layers:
            block = layer.block(block_id)
            size = block.numel() * block.element_size()
            source = torch.frombuffer(payload, dtype=torch.uint8, count=size, offset=offset)
            block.copy_(source.view(block.dtype).view(block.shape))
            offset += size

    def write_garbage(self, block_id: int) -> None:
        """Replace a block by noise that depends on the block id and layer only."""
        for index, layer in enumerate(self.layers):
            block = layer.block(block_id)
            generator = torch.Generator().manual_seed(block_id * len(self.layers) + index)
            noise = torch.randn(block.shape, generator=generator) * GARBAGE_SCALE
            block.copy_(noise.to(block.dtype))

    def digest(self, block_id: int) -> str:
        """xxh3_64 of the bytes of a block, in hex."""
        hasher = xxhash.xxh3_64()
        for part in self.read(block_id):
            hasher.update(part)
        return hasher.hexdigest()


def block_dimension(name: str, tensor: torch.Tensor, block_count: int) -> int:
    """The one dimension of `tensor` whose size is `block_count`. Raises KVLayoutError otherwise."""
    if not isinstance(tensor, torch.Tensor):
        raise KVLayoutError(f"KV cache of layer {name} is a {type(tensor).__name__}, not one tensor per layer")
    matches = [dim for dim, size in enumerate(tensor.shape) if size == block_count]
    if len(matches) != 1:
        raise KVLayoutError(
            f"KV cache of layer {name} has shape {tuple(tensor.shape)}; exactly one dimension should be the "
            f"{block_count} blocks of the cache, found {len(matches)}"
        )
    return matches[0]


def _layer_layout(layer: LayerBlocks) -> str:
    shape = list(layer.tensor.shape)
    shape[layer.block_dim] = -1
    return f"{layer.name}:{layer.tensor.dtype}:{shape}"


def _byte_count(layer: LayerBlocks) -> int:
    count: int = layer.tensor.numel() // layer.tensor.shape[layer.block_dim] * layer.tensor.element_size()
    return count


def _bytes_of(block: torch.Tensor) -> memoryview:
    flat = block.contiguous().view(-1).view(torch.uint8)
    return memoryview(flat.cpu().numpy()).cast("B")
