"""`warmpath quota` as tests call it, and a picker that uses what it writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from click.testing import CliRunner, Result

from picker.cli import main
from picker.config import Quota
from picker.quota.admission import Admission, Ask, Quotas, Refused
from picker.quota.stores import open_store
from picker.usage import Usage

T = TypeVar("T")

DEADLINE = 30.0  # seconds for a store on a busy machine


@dataclass
class Terminal:
    """Where commands are typed."""

    url: str  # of the store
    flags: tuple[str, ...]  # that name it, or a server that has it
    env: Mapping[str, str] = field(default_factory=dict)
    actor: str = "root@laptop"  # whom the audit log names

    def __call__(self, *words: str, code: int = 0, input: str | None = None) -> Result:
        """What `warmpath quota WORDS` does; it must end with an exit code."""
        result = CliRunner().invoke(
            main, ["quota", *self.flags, *words], input=input, env=dict(self.env)
        )
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, (words, result.exit_code, result.output)
        return result

    def data(self, *words: str, code: int = 0) -> Any:
        """What a command prints for programs."""
        return json.loads(self(*words, "-o", "json", code=code).stdout)

    def picker(self, work: Callable[[Quotas], Awaitable[T]]) -> T:
        """Do something as a picker with this store."""

        async def run() -> T:
            quotas = Quotas(open_store(self.url, DEADLINE), Quota(enabled=True))
            await quotas.start()
            try:
                return await work(quotas)
            finally:
                await quotas.close()

        return asyncio.run(run())

    def served(self, subject: str, prompt: int, completion: int, model: str = "llama") -> None:
        """A request that passed, from its start to its end."""

        async def work(quotas: Quotas) -> None:
            answer = await quotas.admit(Ask(subject, model, prompt, completion))
            assert isinstance(answer, Admission), answer
            quotas.settle(answer, Usage(prompt, 0, completion))

        self.picker(work)

    def refused(self, subject: str, prompt: int, model: str = "llama") -> Refused:
        """A request that did not pass."""
        answer = self.picker(lambda quotas: quotas.admit(Ask(subject, model, prompt, 0)))
        assert isinstance(answer, Refused), answer
        return answer

    def running(self, subject: str, prompt: int) -> str:
        """A request that never ends, and its reservation."""
        answer = self.picker(lambda quotas: quotas.admit(Ask(subject, "llama", prompt, 0)))
        assert isinstance(answer, Admission), answer
        return answer.id
