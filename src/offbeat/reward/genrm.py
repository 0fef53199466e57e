"""A generative reward model: a language model reads a template and writes a verdict.

```
 sample ──► JudgePrompt ──► Asker ──► votes ──────────────► Reward
            (text, fence)   (judge, parser)  └► pairs ──► share won
```

The text goes to a `VerdictBackend`: engines on the source's own pool (`judge_engines.py`), or
an OpenAI-compatible server (`judge_http.py`). The reward is what the verdict counts, on the
source's 0 to 1 (of parser choice: the value as it is set), with the verdict's text as
`Reward.raw` and every call as a transcript.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from offbeat.config import RewardSourceSection
from offbeat.errors import UserError
from offbeat.records import Reward, ScoreItem, Span, Transcript
from offbeat.reward.asking import RAW_KEPT, Asker, Opinion
from offbeat.reward.cache import VerdictCache
from offbeat.reward.judge import VerdictBackend
from offbeat.reward.judge_prompt import JudgePrompt, JudgeText
from offbeat.reward.pairwise import TIE, Pair, PositionBias, pairs, shares_won
from offbeat.reward.template import TemplateFailed
from offbeat.reward.together import together
from offbeat.reward.turns import Turns
from offbeat.reward.votes import Counted, commonest, count_votes

LONG_TEXT = 20_000  # characters
SLOW_SECONDS = 0.005
SLOW_TEXTS = 4  # on end
BETWEEN = "\n---\n"
"""Stands between several verdicts in `Reward.raw`."""


@dataclass(frozen=True, slots=True)
class _Heard:
    """All votes on one text, and what they come to."""

    counted: Counted
    opinions: Sequence[Opinion] = ()
    reason: str = ""


class GenRM:
    """The reward source of a judge."""

    def __init__(
        self,
        name: str,
        section: RewardSourceSection,
        judge: VerdictBackend,
        cache: VerdictCache | None = None,
    ) -> None:
        """Starts nothing. Raises `UserError` for a scale or template that cannot be used.

        `cache` is looked into where the section has it on and draws nothing (temperature 0).
        """
        low, high = section.scale
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise UserError(
                f"reward.{name}.scale = [{low:g}, {high:g}] is empty; give the lowest grade first"
            )
        self._name, self._section, self._judge = name, section, judge
        self._prompt = JudgePrompt(name, section)
        self._asker = Asker(section, judge, cache)
        self._bias, self._turns = PositionBias(), Turns()
        self._spreads, self._spread = 0, 0.0
        self._slow_texts = 0

    @property
    def name(self) -> str:
        """The source's name."""
        return self._name

    async def start(self) -> None:
        """Starts the judge; from then on its own special tokens are broken in what it reads."""
        await self._judge.start()
        self._prompt.know(self._judge.special_tokens)

    async def score(self, items: Sequence[ScoreItem]) -> list[Reward]:
        """Judges all items at once. With `pairwise` those of one prompt are compared."""
        if not self._section.grouped:
            return await together(*(self._one(item) for item in items))
        places: dict[int, list[int]] = {}
        for place, item in enumerate(items):
            places.setdefault(item.prompt.ordinal, []).append(place)
        async with asyncio.TaskGroup() as tasks:
            groups = [
                (of, tasks.create_task(self._group([items[place] for place in of])))
                for of in places.values()
            ]
        found = {
            place: r for of, group in groups for place, r in zip(of, group.result(), strict=True)
        }
        return [found[place] for place in range(len(items))]

    @property
    def down_since(self) -> float | None:
        """Since when the judge is not there."""
        return self._judge.down_since

    def facts(self) -> Mapping[str, float]:
        """The judge's own numbers, with `position_bias` over so many `comparisons` of a pairwise
        source, and the mean `spread` of several votes."""
        facts = dict(self._judge.facts())
        if self._section.grouped:
            facts |= self._bias.facts()
        if self._spreads:
            facts["spread"] = self._spread
        return facts

    async def drain_spans(self) -> list[Span]:
        """The judge's compute spans, under this source's role."""
        role = f"reward/{self._name}"
        return [replace(span, role=role) for span in await self._judge.drain_spans()]

    async def stop(self) -> None:
        """Stops the judge; what the cache was given is on disk then."""
        try:
            await self._asker.close()
        finally:
            await self._judge.stop()

    # -- one answer ------------------------------------------------------------------------------

    async def _one(self, item: ScoreItem) -> Reward:
        heard = await self._hear(item)
        transcripts = [opinion.transcript for opinion in heard.opinions]
        retries = sum(opinion.retries for opinion in heard.opinions)
        return self._reward(heard.counted, heard.reason, transcripts, retries)

    async def _hear(self, first: ScoreItem, second: ScoreItem | None = None) -> _Heard:
        """All votes on one answer, or on two compared."""
        try:
            text = await self._text(first, second)
        except TemplateFailed as failed:
            return _Heard(Counted(None, "template_error"), reason=str(failed))
        votes, again = self._section.votes, first.draw > 0
        begin = (first.draw + self._turns.of(text.text)) * votes
        opinions = await together(
            *(self._asker.ask(text, begin + vote, fresh=again) for vote in range(votes))
        )
        calls = [opinion.transcript for opinion in opinions]
        causes = [call.cause for call in calls if call.cause is not None]
        counted = count_votes([call.value for call in calls], causes, self._section.vote)
        if self._section.temperature > 0:
            self._turns.came_to(text.text, counted.value)
        if counted.spread is not None and not again:
            self._spreads += 1
            self._spread += (counted.spread - self._spread) / self._spreads
        reason = next((o.reason for o in opinions if o.transcript.cause == counted.cause), "")
        return _Heard(counted, opinions, "" if counted.cause is None else reason)

    async def _text(self, first: ScoreItem, second: ScoreItem | None) -> JudgeText:
        """The rendered text; raises `TemplateFailed`.

        Short ones are made here: a thread for each takes more of the event loop's time than it
        saves. A template that has been slow goes to threads from then on, as do long texts.
        """
        texts = [first.prompt.question, first.completion, second.completion if second else ""]
        if self._slow_texts >= SLOW_TEXTS or sum(map(len, texts)) > LONG_TEXT:
            return await asyncio.to_thread(self._render, first, second)
        begun = time.perf_counter()
        try:
            return self._render(first, second)
        finally:
            slow = time.perf_counter() - begun > SLOW_SECONDS
            self._slow_texts = self._slow_texts + 1 if slow else 0

    def _render(self, first: ScoreItem, second: ScoreItem | None) -> JudgeText:
        return self._prompt.one(first) if second is None else self._prompt.two(first, second)

    def _reward(
        self, counted: Counted, reason: str, transcripts: Sequence[Transcript], retries: int
    ) -> Reward:
        raw = BETWEEN.join(call.raw for call in transcripts if call.raw)[:RAW_KEPT]
        more = {
            "raw": raw,
            "retries": retries,
            "spread": counted.spread,
            "transcripts": tuple(transcripts),
        }
        if counted.value is None:
            cause = counted.cause or "unparseable"
            return Reward.failed(self._name, cause, reason=reason, **more)
        return Reward.scored(self._name, counted.value, **more)

    # -- a group compared ------------------------------------------------------------------------

    async def _group(self, items: Sequence[ScoreItem]) -> list[Reward]:
        """Each sample's share of its comparisons won. Equal answers are ties without asking."""
        if len(items) < 2:
            alone = "a group of one sample has nothing to compare it with"
            return [Reward.abstained(self._name, reason=alone) for _ in items]
        met = pairs(len(items), self._section.pairwise or "all")
        both = [order for one, other in met for order in ((one, other), (other, one))]
        async with asyncio.TaskGroup() as tasks:
            asked = {
                (one, other): tasks.create_task(self._hear(items[one], items[other]))
                for one, other in both
                if items[one].completion != items[other].completion
            }
        heard = {order: task.result() for order, task in asked.items()}
        orders = {order: heard[order].counted.value if order in heard else TIE for order in both}
        for one, other in met:
            there, back = orders[one, other], orders[other, one]
            asked_once = (one, other) in heard and items[one].draw == 0
            if asked_once and there is not None and back is not None:
                self._bias.add(there)
                self._bias.add(back)
        won = shares_won(len(items), met, orders)
        return [self._standing(items, place, share, heard) for place, share in enumerate(won)]

    def _standing(
        self,
        items: Sequence[ScoreItem],
        place: int,
        share: float | None,
        heard: Mapping[Pair, _Heard],
    ) -> Reward:
        own = {order: of for order, of in heard.items() if place in order}
        transcripts = [
            _seen_from(opinion.transcript, items[other].index, one == place)
            for (one, second), of in own.items()
            for other in ((second if one == place else one),)
            for opinion in of.opinions
        ]
        retries = sum(
            opinion.retries
            for (one, _), of in own.items()
            if one == place
            for opinion in of.opinions
        )
        spreads = [of.counted.spread for of in own.values() if of.counted.spread is not None]
        causes = [of.counted.cause for of in own.values() if of.counted.cause is not None]
        cause = None if share is not None else commonest(causes)
        reason = next((of.reason for of in own.values() if of.counted.cause == cause), "")
        counted = Counted(share, cause, sum(spreads) / len(spreads) if spreads else None)
        return self._reward(counted, "" if cause is None else reason, transcripts, retries)


def _seen_from(call: Transcript, other: int, first: bool) -> Transcript:
    """A comparison's call as one of its two samples has it: the call's cost is the first one's."""
    if first:
        return replace(call, other=other)
    value = None if call.value is None else 1 - call.value
    return replace(
        call, value=value, other=other, first=False, prompt_tokens=0, completion_tokens=0
    )
