"""Verdicts from engines on the source's own pool."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from offbeat.config import RewardSourceSection
from offbeat.errors import OffbeatError, RequestRefused, UserError
from offbeat.records import Completion, GenerateRequest, Progress, Sampling, Span
from offbeat.reward.judge import Verdict, Weighed
from offbeat.reward.pool import CallFailed
from offbeat.reward.replicas import Replicas
from offbeat.reward.structure import check_spelling, structure_of
from offbeat.reward.template import TemplateFailed, encode, encode_chat, load_tokenizer


class Generator(Protocol):
    """What a judge needs of an engine (`offbeat.rollout.engine.Engine` has it)."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Completion | Progress, None]:
        """Yields the completions of a request."""
        ...

    async def health(self) -> Any:
        """Raises what ended the engine."""
        ...

    async def drain_spans(self) -> list[Span]:
        """Compute spans since the last call."""
        ...

    async def stop(self) -> None:
        """Ends the engine."""
        ...


class EngineBackend:
    """Verdicts from engines, routed by `Replicas`; at most `concurrency` calls in flight.

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
        replace_engine: Callable[[int], Awaitable[Generator]] | None = None,
        start_deadline_seconds: float = 600.0,
    ) -> None:
        """`tokenizer` is the judge's, or the directory that `start` loads it from.

        `replace_engine` ends an engine that died and starts another in its place (`Replicas`).
        """
        if not engines:
            raise UserError(f"reward.{name}.replicas: a judge needs at least one engine")
        self._replicas: Replicas[Generator] = Replicas(
            name,
            engines,
            deadline_seconds=section.deadline_seconds,
            start_deadline_seconds=start_deadline_seconds,
            replace=replace_engine,
        )
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

    async def verdict(self, text_prompt: str, *, vote: int = 0, criteria: int = 0) -> Verdict:
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

    @property
    def special_tokens(self) -> Sequence[str]:
        """The judge's special tokens as text."""
        return ()

    @property
    def identity(self) -> str:
        """The model."""
        return str(self._section.model)

    @property
    def down_since(self) -> float | None:
        """Since when there is nobody to ask."""
        return None

    def facts(self) -> Mapping[str, float]:
        """Running numbers for metrics."""
        return {}

    async def weigh(self, text_prompt: str, verdicts: Sequence[str]) -> Weighed:
        """The probability of each of the verdicts."""
        raise NotImplementedError

    async def drain_spans(self) -> list[Span]:
        """The engines' spans, numbered by replica."""
        serving = self._replicas.serving
        drains = [engine.drain_spans() for engine in serving.values()]
        spans = await asyncio.gather(*drains, return_exceptions=True)
        return [
            replace(span, replica=number)
            for number, drained in zip(serving, spans, strict=True)
            if not isinstance(drained, BaseException)  # a dead one has none
            for span in drained
        ]

    async def stop(self) -> None:
        """Ends the verdicts and the restarts that are under way."""
        for task in self._shared.values():
            task.cancel()
        await self._replicas.stop()

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
            try:
                completion = await self._replicas.call(lambda engine: _only(engine, request))
            except RequestRefused as refused:
                raise CallFailed("too_long", str(refused)) from refused
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


async def _only(engine: Generator, request: GenerateRequest) -> Completion:
    last = None
    async with contextlib.aclosing(engine.generate(request)) as completions:
        async for completion in completions:
            if isinstance(completion, Completion):
                last = completion
    if last is None or last.finish_reason == "aborted":
        raise OffbeatError("the engine gave up the request")
    return last
