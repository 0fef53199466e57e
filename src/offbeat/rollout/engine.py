"""The engine protocol: a replica that generates. Implementations know no Ray.

An engine is started by an awaited `start()`, generates for many requests at once (continuous
batching), and swaps weights between two decode steps without losing a request. `load` returning
is the acknowledgement: every token emitted after it is made by the new version.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from offbeat.records import (
    Completion,
    EngineHealth,
    GenerateRequest,
    Manifest,
    PolicyVersion,
    Progress,
    Span,
)


class Engine(Protocol):
    """One replica that generates."""

    async def start(self) -> None:
        """Loads the model; returns when requests are taken."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Completion | Progress, None]:
        """Yields each of the request's completions as it ends, in order of ending, and between
        them the `Progress` that the request asks for.

        A sample that is resumed is given whole: its earlier tokens with the log-probs and versions
        that they were made with, then the new ones. One that the engine gives up ends with
        finish_reason "aborted" and the tokens that it has.

        Raises `RequestRefused` when prompt + max_tokens do not fit the context; only this request
        is touched. Closing the iterator early cancels what still runs.
        """
        ...

    async def load(self, manifest: Manifest) -> PolicyVersion:
        """Swaps weights between two decode steps and acknowledges by returning the version."""
        ...

    async def health(self) -> EngineHealth:
        """Answers within milliseconds, also while a decode step runs."""
        ...

    async def drain_spans(self) -> list[Span]:
        """Compute spans since the last call."""
        ...

    async def stop(self) -> None:
        """Frees the model; running requests end as "aborted"."""
        ...
