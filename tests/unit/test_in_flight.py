"""Work that several ask for at the same time: done once, and paid for once."""

from __future__ import annotations

import asyncio

from offbeat.reward.in_flight import InFlight
from offbeat.reward.judge import Verdict, Weighed


def test_who_joins_a_call_gets_its_answer_and_none_of_its_cost() -> None:
    async def body() -> tuple[list[Verdict], int]:
        calls = 0
        go = asyncio.Event()

        async def judge() -> Verdict:
            nonlocal calls
            calls += 1
            await go.wait()
            return Verdict("8", retries=1, prompt_tokens=30, completion_tokens=2, seconds=0.5)

        flight = InFlight("judge", Verdict.free)
        asking = [asyncio.create_task(flight.get("text", judge)) for _ in range(3)]
        await asyncio.sleep(0)
        go.set()
        return await asyncio.gather(*asking), calls

    verdicts, calls = asyncio.run(body())
    assert calls == 1
    assert [v.text for v in verdicts] == ["8"] * 3
    assert sorted(v.prompt_tokens for v in verdicts) == [0, 0, 30]
    assert sorted(v.completion_tokens for v in verdicts) == [0, 0, 2]
    assert sum(v.retries for v in verdicts) == 1


def test_a_weighed_verdict_is_as_free() -> None:
    weighed = Weighed((0.5, 0.4), Verdict("8", prompt_tokens=30)).free()
    assert weighed.probabilities == (0.5, 0.4)
    assert weighed.verdict == Verdict("8")
