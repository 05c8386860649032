"""What differs between the vLLM versions that the connectors load on (0.26 to 0.33), in one place.

- Results of async transfers: up to 0.26 vLLM calls `get_finished`; later versions call
  `get_transfer_results`, whose default calls `get_finished`.
- Newer base classes have more hooks; a wrapper forwards whatever the base class of this version has.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable
from typing import TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

Wrapper = TypeVar("Wrapper", bound=type[KVConnectorBase_V1])


def forward_to_inner(wrapper: Wrapper) -> Wrapper:
    """Class decorator: every public method and property of the base class that `wrapper` does not define
    itself goes to `self.inner`, so that vLLM sees the wrapped connector."""
    for name, member in vars(KVConnectorBase_V1).items():
        if name.startswith("_") or name in vars(wrapper) or name == "role":
            continue
        if isinstance(member, property):
            setattr(wrapper, name, property(_reader(name)))
        elif inspect.isfunction(member):
            setattr(wrapper, name, _caller(name))
    abc.update_abstractmethods(wrapper)
    return wrapper


def _reader(name: str) -> Callable[[object], object]:
    return lambda self: getattr(self.inner, name)  # type: ignore[attr-defined]


def _caller(name: str) -> Callable[..., object]:
    def forward(self: object, *args: object, **kwargs: object) -> object:
        return getattr(self.inner, name)(*args, **kwargs)  # type: ignore[attr-defined]

    forward.__name__ = name
    return forward
