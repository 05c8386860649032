"""One interface over running services, whoever runs them: containers, plain processes, or somebody else."""

from harness.stack.attach import AttachStack
from harness.stack.base import Stack
from harness.stack.compose import ComposeStack
from harness.stack.processes import ProcessStack

__all__ = ["AttachStack", "ComposeStack", "ProcessStack", "Stack"]
