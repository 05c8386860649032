"""A stack that runs elsewhere and is only talked to: URLs, and the folders where its evidence and KV can be read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from harness.errors import LeverMissing, StackError, UsageError
from harness.stack.base import Lever, Stack


class AttachStack(Stack):
    """`urls`: service name -> base URL. `kv_dir` None: cells that break stored KV are skipped."""

    name = "attach"

    def __init__(self, urls: Mapping[str, str], kv_dir: Path | None, evidence_dir: Path) -> None:
        """Raises UsageError when a folder is missing; without journals nothing can be proven."""
        for label, folder in (("evidence", evidence_dir), ("KV", kv_dir)):
            if folder is not None and not folder.is_dir():
                raise UsageError(
                    f"{folder}: the {label} folder is missing; give the one the services write to "
                    f"(KVPROOF_{label.upper()}_DIR of the engines), as it is mounted on this machine"
                )
        super().__init__(tuple(urls), kv_dir, evidence_dir)
        self._urls = dict(urls)

    def start(self) -> None:
        """Raises StackError naming each service that nobody answers for."""
        problems = [problem for service in self.services if (problem := self._unreachable(service))]
        if problems:
            raise StackError("\n".join(problems))

    def stop(self) -> None:
        """Nothing: the services belong to somebody else."""

    def url(self, service: str) -> str:
        return self._urls[service]

    def lever(self, service: str) -> Lever:
        raise LeverMissing(
            f"{service}: engines that run elsewhere cannot be killed or paused from here (--stack attach)"
        )

    def _unreachable(self, service: str) -> str:
        try:
            self.client(service).check_listening()
        except StackError as error:
            return f"{service}: {error}; is it running, and is the URL right?"
        return ""
