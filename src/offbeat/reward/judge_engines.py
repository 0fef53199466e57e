"""Verdicts from engines on the source's own pool."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from offbeat.config import RewardSourceSection
from offbeat.errors import RequestRefused, UserError
from offbeat.records import Completion, GenerateRequest, Progress, Sampling, Span
from offbeat.reward.judge import Verdict
from offbeat.reward.pool import CallFailed
from offbeat.reward.structure import check_spelling, structure_of
from offbeat.reward.template import TemplateFailed, encode, encode_chat, load_tokenizer

SUSPECT_SECONDS = 0.5
SUSPECT_LIMIT_SECONDS = 30.0


class Generator(Protocol):
    """What a judge needs of an engine (`offbeat.rollout.engine.Engine` has it)."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Completion | Progress]:
        """Yields the completions of a request."""
        ...

    async def drain_spans(self) -> list[Span]:
        """Compute spans since the last call."""
        ...


class _Replica:
    """An engine and how it fares: calls outstanding, failures on end, avoided until."""

    def __init__(self, engine: Generator) -> None:
        self.engine = engine
        self.outstanding = 0
        self.failures = 0
        self.avoided_until = 0.0

    def failed(self) -> None:
        pause = min(SUSPECT_LIMIT_SECONDS, SUSPECT_SECONDS * 2.0 ** min(self.failures, 20))
        self.failures += 1
        self.avoided_until = time.monotonic() + pause


class EngineBackend:
    """Verdicts from engines: the least busy one is asked, a failing one is avoided for a while.

    At temperature 0 identical texts in flight are judged once. Whoever placed the engines starts
    them before and stops them after.
    """

    def __init__(
        self,
        engines: Sequence[Generator],
        tokenizer: Any,
        section: RewardSourceSection,
        *,
        name: str = "genrm",
    ) -> None:
        """`tokenizer` is the judge's, or the directory that `start` loads it from."""
        if not engines:
            raise UserError(f"reward.{name}.replicas: a judge needs at least one engine")
        self._replicas = [_Replica(engine) for engine in engines]
        self._tokenizer, self._section, self._name = tokenizer, section, name
        self._ids = count()
        self._encoding = threading.Lock()
        self._seats = asyncio.Semaphore(section.concurrency)
        self._shared: dict[str, asyncio.Task[Verdict]] = {}
        self._readers: dict[str, int] = {}
        self._sampling = Sampling(
            section.max_tokens,
            section.temperature,
            tuple(section.stop),
            structure=structure_of(section),
        )

    async def start(self) -> None:
        """Loads the tokenizer if a directory was given; it must spell the verdict's form."""
        if isinstance(self._tokenizer, str | Path):
            setting = f"reward.{self._name}.model"
            self._tokenizer = await asyncio.to_thread(
                load_tokenizer, self._tokenizer, setting, chat=self._section.chat
            )
        check_spelling(self._sampling.structure, self._tokenizer, self._name)

    async def verdict(self, text_prompt: str) -> Verdict:
        """The judge's words; raises `CallFailed`."""
        if self._section.temperature > 0:
            return await self._judge(text_prompt)
        task = self._shared.get(text_prompt)
        if task is None:
            task = asyncio.create_task(self._judge(text_prompt), name=f"judge/{self._name}")
            self._shared[text_prompt] = task
        self._readers[text_prompt] = self._readers.get(text_prompt, 0) + 1
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if task.cancelled() and me is not None and not me.cancelling():
                raise CallFailed("unavailable", "the judge was stopped") from None
            raise
        finally:
            self._readers[text_prompt] -= 1
            if not self._readers[text_prompt]:
                del self._readers[text_prompt], self._shared[text_prompt]
                task.cancel()

    async def drain_spans(self) -> list[Span]:
        """The engines' spans, numbered by replica."""
        drains = [replica.engine.drain_spans() for replica in self._replicas]
        return [
            replace(span, replica=number)
            for number, drained in enumerate(await asyncio.gather(*drains, return_exceptions=True))
            if not isinstance(drained, BaseException)  # a dead one has none
            for span in drained
        ]

    async def stop(self) -> None:
        """Ends the verdicts that are under way."""
        for task in self._shared.values():
            task.cancel()

    async def _judge(self, text: str) -> Verdict:
        ids = await asyncio.to_thread(self._encode, text)
        if len(ids) + self._section.max_tokens > self._section.max_context:
            raise CallFailed(
                "too_long",
                f"{len(ids)} tokens and a verdict of {self._section.max_tokens} exceed "
                f"max_context = {self._section.max_context}",
            )
        request = GenerateRequest(
            f"{self._name}-{next(self._ids)}", np.asarray(ids, np.int32), 1, self._sampling
        )
        async with self._seats:
            now = time.monotonic()
            replica = min(
                self._replicas, key=lambda r: (max(0.0, r.avoided_until - now), r.outstanding)
            )
            replica.outstanding += 1
            try:
                return await self._ask(replica, request)
            finally:
                replica.outstanding -= 1

    async def _ask(self, replica: _Replica, request: GenerateRequest) -> Verdict:
        deadline = self._section.deadline_seconds
        try:
            async with asyncio.timeout(deadline):
                completion = await _only(replica.engine.generate(request))
        except RequestRefused as refused:
            raise CallFailed("too_long", str(refused)) from refused
        except TimeoutError as late:
            replica.failed()
            raise CallFailed("timeout", f"no verdict within {deadline:g} s") from late
        except Exception as error:
            replica.failed()
            raise CallFailed("unavailable", f"{type(error).__name__}: {error}") from error
        if completion is None or completion.finish_reason == "aborted":
            replica.failed()
            raise CallFailed("unavailable", "the engine gave up the request")
        replica.failures, replica.avoided_until = 0, 0.0
        return Verdict(completion.text, completion.finish_reason)

    def _encode(self, text: str) -> list[int]:
        """Runs on a thread; a fast tokenizer must not be used by two at a time."""
        with self._encoding:
            if not self._section.chat:
                return encode(self._tokenizer, text, ask=True)
            message = {"role": "user", "content": text}
            try:
                return encode_chat(self._tokenizer, [message], ask=True)
            except TemplateFailed as failed:
                raise CallFailed("template_error", str(failed)) from failed


async def _only(completions: AsyncIterator[Completion | Progress]) -> Completion | None:
    last = None
    async for completion in completions:
        if isinstance(completion, Completion):
            last = completion
    return last
