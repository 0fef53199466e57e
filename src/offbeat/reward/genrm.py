"""A generative reward model: a language model reads a template and writes a grade.

The text goes to a `VerdictBackend`: engines on the source's own pool (`EngineBackend`), or an
OpenAI-compatible server (`HttpBackend`). What comes back is read by `verdict.parse_verdict`; the
reward is (grade - low) / (high - low), 0 to 1, with the verdict's text as `Reward.raw`.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np

from offbeat.config import RewardSourceSection
from offbeat.errors import RequestRefused, UserError
from offbeat.records import Completion, GenerateRequest, Reward, Sampling, ScoreItem, Span
from offbeat.reward.pool import CallFailed, EndpointPool
from offbeat.reward.template import (
    TemplateFailed,
    TextTemplate,
    encode,
    encode_chat,
    load_tokenizer,
)
from offbeat.reward.verdict import Unread, parse_verdict

RAW_KEPT = 4000
SUSPECT_SECONDS = 0.5
SUSPECT_LIMIT_SECONDS = 30.0

GRADE_TEMPLATE = """\
You are a strict judge. Grade the answer to the question.

Question:
{{ question }}
{% if reference is not none %}
Reference answer:
{{ reference }}
{% endif %}
Answer to grade:
{{ answer }}

{% if parser == "yes_no" %}Is the answer right? Reply with yes or no only.
{% elif parser == "json" %}Reply with JSON only: {"score": n}, where n is a grade from \
{{ low }} (wrong) to {{ high }} (right and complete).
{% else %}Reply with the grade only: one number from {{ low }} (wrong) to {{ high }} \
(right and complete).
{% endif %}Grade:"""
"""The built-in template, with and without a reference."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judge's words, how they ended ("stop", "length"), and the retries they took."""

    text: str
    finish_reason: str = "stop"
    retries: int = 0


class VerdictBackend(Protocol):
    """Whoever gets a verdict on a text; raises `CallFailed` where there is none."""

    async def start(self) -> None:
        """Ready when this returns."""
        ...

    async def verdict(self, text_prompt: str) -> Verdict:
        """The judge's words on one rendered text."""
        ...

    async def drain_spans(self) -> list[Span]:
        """Compute spans since the last call."""
        ...

    async def stop(self) -> None:
        """Ends what was started."""
        ...


class GenRM:
    """The reward source of a judge."""

    def __init__(self, name: str, section: RewardSourceSection, judge: VerdictBackend) -> None:
        """Starts nothing. Raises `UserError` for a scale or template that cannot be used."""
        low, high = section.scale
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise UserError(
                f"reward.{name}.scale = [{low:g}, {high:g}] is empty; give the lowest grade first"
            )
        self._name, self._section, self._judge = name, section, judge
        self._template = TextTemplate.load(
            section.template, GRADE_TEMPLATE, f"reward.{name}.template",
            parser=section.parser, low=f"{low:g}", high=f"{high:g}",
        )  # fmt: skip

    @property
    def name(self) -> str:
        """The source's name."""
        return self._name

    async def start(self) -> None:
        """Starts the judge."""
        await self._judge.start()

    async def score(self, items: Sequence[ScoreItem]) -> list[Reward]:
        """Judges all items at once."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(item)) for item in items]
        return [task.result() for task in tasks]

    async def drain_spans(self) -> list[Span]:
        """The judge's compute spans, under this source's role."""
        role = f"reward/{self._name}"
        return [replace(span, role=role) for span in await self._judge.drain_spans()]

    async def stop(self) -> None:
        """Stops the judge."""
        await self._judge.stop()

    async def _one(self, item: ScoreItem) -> Reward:
        section = self._section
        try:
            text = await asyncio.to_thread(self._template.render, item)
            verdict = await self._judge.verdict(text)
        except TemplateFailed as failed:
            return Reward.failed(self._name, "template_error", reason=str(failed))
        except CallFailed as failed:
            return Reward.failed(
                self._name, failed.cause, reason=failed.reason, retries=failed.retries
            )
        raw = verdict.text[:RAW_KEPT]
        read = parse_verdict(
            verdict.text, section.parser, section.scale,
            truncated=verdict.finish_reason == "length",
        )  # fmt: skip
        if isinstance(read, Unread):
            return Reward.failed(
                self._name, read.cause, reason=read.reason, raw=raw, retries=verdict.retries
            )
        return Reward.scored(self._name, read.value, raw=raw, retries=verdict.retries)


class Generator(Protocol):
    """What a judge needs of an engine (`offbeat.rollout.engine.Engine` has it)."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Completion]:
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
        self._sampling = Sampling(section.max_tokens, section.temperature, tuple(section.stop))

    async def start(self) -> None:
        """Loads the tokenizer if a directory was given."""
        if isinstance(self._tokenizer, str | Path):
            setting = f"reward.{self._name}.model"
            self._tokenizer = await asyncio.to_thread(
                load_tokenizer, self._tokenizer, setting, chat=self._section.chat
            )

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


async def _only(completions: AsyncIterator[Completion]) -> Completion | None:
    last = None
    async for completion in completions:
        last = completion
    return last


class HttpBackend:
    """Verdicts from an OpenAI-compatible server, always by POST `/chat/completions`.

    The rendered text is one user message; the server applies its model's chat template, so the
    setting `chat` has no meaning here. Retries are the pool's.
    """

    def __init__(
        self,
        section: RewardSourceSection,
        *,
        name: str = "genrm",
        transport: httpx.AsyncBaseTransport | None = None,
        pause_seconds: float = 0.5,
    ) -> None:
        """`transport` replaces the network; `pause_seconds` is the first pause before a retry."""
        self._section, self._name = section, name
        self._model = section.model
        self.pool = EndpointPool(name, section, transport=transport, pause_seconds=pause_seconds)

    async def start(self) -> None:
        """Probes the server; raises `UserError` with its address.

        Without the setting `model` the server must have exactly one.
        """
        models = await self.pool.start()
        if self._model is None:
            if len(models) != 1:
                listed = ", ".join(models[:10]) or "none that it lists"
                await self.pool.stop()
                raise UserError(
                    f"reward.{self._name}.model is missing; set it to one of the models of "
                    f"{self.pool.address}: {listed}"
                )
            self._model = models[0]

    async def verdict(self, text_prompt: str) -> Verdict:
        """The judge's words; raises `CallFailed`."""
        section = self._section
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": text_prompt}],
            "max_tokens": section.max_tokens,
            "temperature": section.temperature,
        }
        if section.stop:
            body["stop"] = list(section.stop)
        answer, retries = await self.pool.post("/chat/completions", body)
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"]
            reason = choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise CallFailed("bad_response", "no choices[0].message.content", retries) from error
        if text is not None and not isinstance(text, str):
            raise CallFailed("bad_response", "the message's content is not a text", retries)
        return Verdict(text or "", "length" if reason == "length" else "stop", retries)

    async def drain_spans(self) -> list[Span]:
        """None: the server computes elsewhere."""
        return []

    async def stop(self) -> None:
        """Closes the client."""
        await self.pool.stop()
