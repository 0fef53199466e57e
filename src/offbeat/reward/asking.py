"""One call of a judge: asked, or found in the verdict cache, read, and written down."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from offbeat.config import RewardSourceSection
from offbeat.records import Transcript
from offbeat.reward.cache import VerdictCache, plain_facts, verdict_key
from offbeat.reward.expected import expected_value, preferences, shown, weighed_verdicts
from offbeat.reward.grade import Grade, Unread
from offbeat.reward.judge import Verdict, VerdictBackend, Weighed
from offbeat.reward.judge_prompt import JudgeText
from offbeat.reward.pool import CallFailed
from offbeat.reward.structure import server_fields, structure_of
from offbeat.reward.verdict import parse_verdict

RAW_KEPT = 4000
"""Characters of a verdict that are kept with its sample."""


Told = Verdict | Weighed
"""What a judge says: words, or how likely some are."""


@dataclass(frozen=True, slots=True)
class Opinion:
    """What one call came to: a value (in its transcript), or why there is none."""

    transcript: Transcript
    reason: str = ""
    retries: int = 0


class Asker:
    """Asks one source's judge and reads its verdicts."""

    def __init__(
        self,
        section: RewardSourceSection,
        judge: VerdictBackend,
        cache: VerdictCache | None = None,
    ) -> None:
        """`cache` is used with the setting `cache` and temperature 0 only."""
        self._section, self._judge = section, judge
        self._cache = cache if section.cache and section.temperature == 0 else None
        self._verdicts = weighed_verdicts(section) if section.parser == "expected" else {}
        self._words = preferences(section) if section.pairwise is not None else section.choices
        self._facts: dict[int, str] = {}  # by the number of criteria

    async def ask(self, asked: JudgeText, vote: int = 0, *, fresh: bool = False) -> Opinion:
        """The judge's verdict on a text, read; whatever fails has a cause.

        A `fresh` one is asked for whatever the cache has, and not put there.
        """
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            key = None if fresh or self._cache is None else self._key(asked)
            kept = await self._find(asked, key)
            told = await self._hear(asked, vote) if kept is None else kept
        except CallFailed as failed:
            transcript = Transcript(asked.text, "", cause=failed.cause, seconds=clock() - start)
            return Opinion(transcript, failed.reason, failed.retries)
        read = self._read(told, asked)
        if kept is None and key is not None and isinstance(read, Grade):
            await self._keep(key, told)
        verdict = told.verdict if isinstance(told, Weighed) else told
        transcript = Transcript(
            asked.text,
            self._words_of(told)[:RAW_KEPT],
            value=read.value if isinstance(read, Grade) else None,
            cause=read.cause if isinstance(read, Unread) else None,
            prompt_tokens=0 if kept else verdict.prompt_tokens,
            completion_tokens=0 if kept else verdict.completion_tokens,
            seconds=verdict.seconds or clock() - start,
            cached=kept is not None,
        )
        return Opinion(transcript, read.reason if isinstance(read, Unread) else "", verdict.retries)

    async def close(self) -> None:
        """Writes out what the cache was given."""
        if self._cache is not None:
            await self._cache.close()

    async def _hear(self, asked: JudgeText, vote: int) -> Told:
        if self._verdicts:
            return await self._judge.weigh(asked.text, tuple(self._verdicts))
        return await self._judge.verdict(asked.text, vote=vote, criteria=len(asked.criteria))

    def _read(self, told: Told, asked: JudgeText) -> Grade | Unread:
        section = self._section
        if isinstance(told, Weighed):
            return expected_value(self._verdicts, told.probabilities)
        return parse_verdict(
            told.text,
            "choice" if section.pairwise is not None else section.parser,
            section.scale,
            truncated=told.finish_reason == "length",
            choices=self._words,
            criteria=asked.criteria,
        )

    def _words_of(self, told: Told) -> str:
        if isinstance(told, Weighed):
            return shown(tuple(self._verdicts), told.probabilities)
        return told.text

    # -- the cache -------------------------------------------------------------------------------

    async def _find(self, asked: JudgeText, key: str | None) -> Told | None:
        """A verdict that was kept and can be read; of another kind it is none."""
        if self._cache is None or key is None:
            return None
        kept = await self._cache.get(key)
        if kept is None or isinstance(kept, Weighed) != bool(self._verdicts):
            return None
        return kept if isinstance(self._read(kept, asked), Grade) else None

    async def _keep(self, key: str, told: Told) -> None:
        """Only what could be read is kept, so that whoever tries again asks the judge anew."""
        if self._cache is not None:
            await self._cache.put(key, told)

    def _key(self, asked: JudgeText) -> str:
        """All that a verdict of temperature 0 follows from, beside the judge's identity."""
        criteria = len(asked.criteria)
        facts = self._facts.get(criteria)
        if facts is None:
            facts = self._facts[criteria] = self._facts_of(criteria)
        return verdict_key(self._judge.identity, facts, asked.text)

    def _facts_of(self, criteria: int) -> str:
        section = self._section
        return plain_facts(
            {
                "engine": section.engine if section.has_pool else "server",
                "dtype": section.dtype if section.has_pool else "",
                "engine_args": section.engine_args if section.has_pool else {},
                "chat": section.chat,
                "max_tokens": section.max_tokens,
                "stop": section.stop,
                "form": [structure_of(section, criteria), server_fields(section, criteria)],
                "weighed": list(self._verdicts),
            }
        )
