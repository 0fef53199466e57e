"""Verdicts from engines on the source's own pool."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from offbeat.config import RewardSourceSection
from offbeat.errors import OffbeatError, RequestRefused, UserError
from offbeat.records import Completion, GenerateRequest, Progress, Sampling, Span
from offbeat.reward.expected import weighed_verdicts
from offbeat.reward.identity import model_fingerprint
from offbeat.reward.in_flight import InFlight
from offbeat.reward.judge import Verdict, Weighed
from offbeat.reward.pool import CallFailed
from offbeat.reward.replicas import RESTARTS, Replicas
from offbeat.reward.spelling import BEHIND, CannotSpell, Tree, spell
from offbeat.reward.structure import check_spelling, structure_of
from offbeat.reward.template import TemplateFailed, encode, encode_chat, load_tokenizer

MOST_WATCHED = 128
"""Tokens that an engine tells of at once (`offbeat.rollout.refusals`)."""
TREES_KEPT = 64
T = TypeVar("T")
Node = tuple[int, ...]


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
    them before and stops them after; their seeds, each its own, are what draws follow from.
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
        max_restarts: int = RESTARTS,
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
            max_restarts=max_restarts,
        )
        self._tokenizer, self._section, self._name = tokenizer, section, name
        self._ids = count()
        self._encoding = threading.Lock()
        self._seats = asyncio.Semaphore(section.concurrency)
        self._verdicts = InFlight(f"judge/{name}", Verdict.free)
        self._weighed = InFlight(f"judge/{name}", Weighed.free)
        self._trees: OrderedDict[tuple[Any, ...], Tree] = OrderedDict()
        self._special: tuple[str, ...] = ()
        self._identity = str(section.model)

    async def start(self) -> None:
        """Loads the tokenizer if a directory was given; it must spell the verdict's form, and
        tell the verdicts apart of which probabilities are wanted."""
        folders = [Path(str(self._section.model))]
        if isinstance(self._tokenizer, str | Path):
            setting = f"reward.{self._name}.model"
            folders.append(Path(self._tokenizer))
            self._tokenizer = await asyncio.to_thread(
                load_tokenizer, self._tokenizer, setting, chat=self._section.chat
            )
        check_spelling(self._sampling().structure, self._tokenizer, self._name)
        self._special = special_tokens(self._tokenizer)
        section = self._section
        found = await asyncio.to_thread(model_fingerprint, folders)
        self._identity = f"{folders[0].resolve()} {found} {section.engine} {section.dtype}"
        if section.parser == "expected":
            await asyncio.to_thread(self._check_verdicts, tuple(weighed_verdicts(section)))

    @property
    def special_tokens(self) -> Sequence[str]:
        """The judge's special tokens as text, known once started."""
        return self._special

    @property
    def identity(self) -> str:
        """Where the model lies and a fingerprint of what is there, engine and compute type."""
        return self._identity

    @property
    def down_since(self) -> float | None:
        """Since when no replica has been there."""
        return self._replicas.down_since

    def facts(self) -> Mapping[str, float]:
        """How many replicas serve."""
        return {"replicas": float(len(self._replicas.serving))}

    async def verdict(self, text_prompt: str, *, vote: int = 0, criteria: int = 0) -> Verdict:
        """The judge's words; raises `CallFailed`."""
        if self._section.temperature > 0:
            return await self._judge(text_prompt, criteria)
        key = (text_prompt, criteria)
        return await self._verdicts.get(key, lambda: self._judge(text_prompt, criteria))

    async def weigh(self, text_prompt: str, verdicts: Sequence[str]) -> Weighed:
        """The probability of each of the verdicts as the judge's next words; raises `CallFailed`.

        One token is generated at the root of the verdicts' tree, and one at each inner node that
        counts (`spelling`), all by the same engine, where their prompts have their beginning in
        common.
        """
        wanted = tuple(verdicts)
        return await self._weighed.get(
            (text_prompt, wanted), lambda: self._weigh(text_prompt, wanted)
        )

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
        self._verdicts.stop()
        self._weighed.stop()
        await self._replicas.stop()

    async def _judge(self, text: str, criteria: int) -> Verdict:
        begun = time.monotonic()
        ids = await asyncio.to_thread(self._encode, text)
        self._check_length(ids, self._section.max_tokens)
        request = self._request(ids, self._sampling(criteria))
        completion = await self._call(lambda engine: _only(engine, request))
        return Verdict(
            completion.text,
            completion.finish_reason,
            prompt_tokens=len(ids),
            completion_tokens=completion.tokens,
            seconds=time.monotonic() - begun,
        )

    async def _weigh(self, text: str, verdicts: tuple[str, ...]) -> Weighed:
        begun = time.monotonic()
        ids, tree = await asyncio.to_thread(self._spelt, text, verdicts)
        self._check_length(ids, tree.depth)
        found: dict[Node, dict[int, float]] = {}
        said: list[tuple[Node, Completion]] = []

        async def look(engine: Generator) -> None:
            found.clear()
            said.clear()
            while nodes := tree.to_ask(found):
                asked = [
                    (node, tokens[begin : begin + MOST_WATCHED])
                    for node in nodes
                    for tokens in [tree.below[node]]
                    for begin in range(0, len(tokens), MOST_WATCHED)
                ]
                requests = [
                    self._request([*ids, *node], Sampling(1, 0.0, watch=tokens))
                    for node, tokens in asked
                ]
                completions = await _all(engine, requests)
                for (node, tokens), completion in zip(asked, completions, strict=True):
                    shares = map(math.exp, completion.watched)
                    found.setdefault(node, {}).update(zip(tokens, shares, strict=True))
                    said.append((node, completion))

        await self._call(look)
        shares = tree.probabilities(found)
        words = verdicts[max(range(len(shares)), key=shares.__getitem__)]
        verdict = Verdict(
            words if sum(shares) >= 0.5 else said[0][1].text,
            prompt_tokens=sum(len(ids) + len(node) for node, _ in said),
            completion_tokens=sum(completion.tokens for _, completion in said),
            seconds=time.monotonic() - begun,
        )
        return Weighed(shares, verdict)

    async def _call(self, ask: Callable[[Generator], Awaitable[T]]) -> T:
        async with self._seats:
            try:
                return await self._replicas.call(ask)
            except RequestRefused as refused:
                raise CallFailed("too_long", str(refused)) from refused

    def _sampling(self, criteria: int = 0) -> Sampling:
        section = self._section
        return Sampling(
            section.max_tokens,
            section.temperature,
            tuple(section.stop),
            structure=structure_of(section, criteria),
        )

    def _request(self, ids: Sequence[int], sampling: Sampling) -> GenerateRequest:
        name = f"{self._name}-{next(self._ids)}"
        return GenerateRequest(name, np.asarray(ids, np.int32), 1, sampling)

    def _check_length(self, ids: Sequence[int], more: int) -> None:
        if len(ids) + more > self._section.max_context:
            raise CallFailed(
                "too_long",
                f"{len(ids)} tokens and a verdict of {more} exceed "
                f"max_context = {self._section.max_context}",
            )

    # ---- on a thread; a fast tokenizer must not be used by two at a time ----

    def _encode(self, text: str) -> list[int]:
        with self._encoding:
            return self._encoded(text)

    def _encoded(self, text: str) -> list[int]:
        if not self._section.chat:
            return encode(self._tokenizer, text, ask=True)
        message = {"role": "user", "content": text}
        try:
            return encode_chat(self._tokenizer, [message], ask=True)
        except TemplateFailed as failed:
            raise CallFailed("template_error", str(failed)) from failed

    def _spelt(self, text: str, verdicts: tuple[str, ...]) -> tuple[list[int], Tree]:
        """The text's tokens, and the verdicts behind them."""
        with self._encoding:
            ids = self._encoded(text)
            key = (verdicts, *ids[-BEHIND:])
            if key not in self._trees:
                try:
                    self._trees[key] = spell(self._tokenizer, ids, verdicts)
                except CannotSpell as error:
                    raise CallFailed("unparseable", f"the judge's tokenizer: {error}") from error
                while len(self._trees) > TREES_KEPT:
                    self._trees.popitem(last=False)
            self._trees.move_to_end(key)
            return ids, self._trees[key]

    def _check_verdicts(self, verdicts: Sequence[str]) -> None:
        """Refuses verdicts that the tokenizer cannot tell apart."""
        try:
            with self._encoding:
                spell(self._tokenizer, self._encoded("Grade:"), verdicts)
        except CannotSpell as error:
            named = self._section.choices or self._section.pairwise is not None
            key = "choices" if named else "scale"
            raise UserError(
                f'reward.{self._name}.{key}: parser = "expected" cannot tell its verdicts apart '
                f"by the judge's tokenizer: {error}; choose others"
            ) from error


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """What a tokenizer reads as one token wherever it stands, and no text may say."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found = [*getattr(tokenizer, "all_special_tokens", ())]
    found += [token.content for token in added.values() if token.special]
    return tuple(dict.fromkeys(map(str, found)))


async def _only(engine: Generator, request: GenerateRequest) -> Completion:
    last = None
    async with contextlib.aclosing(engine.generate(request)) as completions:
        async for completion in completions:
            if isinstance(completion, Completion):
                last = completion
    if last is None or last.finish_reason == "aborted":
        raise OffbeatError("the engine gave up the request")
    return last


async def _all(engine: Generator, requests: Sequence[GenerateRequest]) -> list[Completion]:
    """All completions, or the first failure with nothing left running."""
    tasks = [asyncio.create_task(_only(engine, request)) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
