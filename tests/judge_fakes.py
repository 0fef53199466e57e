"""A judge that says what a test wants, and what a source asks it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from offbeat.config import RewardSourceSection
from offbeat.records import Prompt, Reward, ScoreItem, Span
from offbeat.reward.cache import VerdictCache
from offbeat.reward.genrm import GenRM
from offbeat.reward.judge import Verdict, Weighed
from offbeat.reward.pool import CallFailed

Said = str | Verdict | CallFailed
Reply = Callable[[str, int], Said]


class StubJudge:
    """A `VerdictBackend` that answers by a function of the text and the vote."""

    def __init__(
        self,
        reply: Said | Reply = "8",
        *,
        shares: Callable[[str, Sequence[str]], Sequence[float]] | None = None,
        special: Sequence[str] = (),
        identity: str = "stub-1",
    ) -> None:
        self.reply, self.shares, self.special_tokens = reply, shares, special
        self.identity = identity
        self.asked: list[str] = []
        self.votes: list[int] = []
        self.criteria: list[int] = []
        self.down_since: float | None = None

    def facts(self) -> Mapping[str, float]:
        return {"limit": 7.0}

    async def start(self) -> None: ...

    async def verdict(self, text_prompt: str, *, vote: int = 0, criteria: int = 0) -> Verdict:
        self.asked.append(text_prompt)
        self.votes.append(vote)
        self.criteria.append(criteria)
        await asyncio.sleep(0)
        said = self.reply(text_prompt, vote) if callable(self.reply) else self.reply
        if isinstance(said, CallFailed):
            raise said
        if isinstance(said, Verdict):
            return said
        return Verdict(said, prompt_tokens=11, completion_tokens=3)

    async def weigh(self, text_prompt: str, verdicts: Sequence[str]) -> Weighed:
        self.asked.append(text_prompt)
        assert self.shares is not None
        return Weighed(tuple(self.shares(text_prompt, verdicts)), Verdict("x", prompt_tokens=5))

    async def drain_spans(self) -> list[Span]:
        return []

    async def stop(self) -> None: ...


def section(**settings: Any) -> RewardSourceSection:
    return RewardSourceSection.model_validate({"kind": "genrm", "model": "m"} | settings)


def item(answer: str = "4", index: int = 0, ordinal: int = 0, **columns: Any) -> ScoreItem:
    reference = columns.pop("reference", "4")
    question = columns.pop("question", "2+2?")
    prompt = Prompt(ordinal, np.zeros(1, np.int32), "p", question, None, reference, columns)
    return ScoreItem(prompt, answer, index=index)


def group(*answers: str, ordinal: int = 0) -> list[ScoreItem]:
    return [item(answer, index, ordinal) for index, answer in enumerate(answers)]


def judged(
    judge: StubJudge,
    items: Sequence[ScoreItem],
    *,
    kept: VerdictCache | None = None,
    **settings: Any,
) -> tuple[list[Reward], dict[str, float]]:
    """The rewards and the source's facts behind them."""

    async def main() -> tuple[list[Reward], dict[str, float]]:
        source = GenRM("judge", section(**settings), judge, kept)
        await source.start()
        try:
            rewards = await asyncio.wait_for(source.score(items), 60)
            return rewards, dict(source.facts())
        finally:
            await source.stop()

    return asyncio.run(main())
