"""One interface over running services, whoever runs them: containers, plain processes, or somebody else."""

from harness.stack.attach import AttachStack
from harness.stack.base import Stack
from harness.stack.compose import ComposeStack
from harness.stack.definition import COMPOSE_FILE, cell_engines, read_engines
from harness.stack.processes import ProcessStack

__all__ = ["COMPOSE_FILE", "AttachStack", "ComposeStack", "ProcessStack", "Stack", "cell_engines", "read_engines"]
