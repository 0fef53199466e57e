"""Probabilities, seeds, tokens and identity of a judge behind an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.config import RewardSourceSection
from offbeat.errors import UserError
from offbeat.reward.chat_answer import read_answer
from offbeat.reward.judge_http import HttpBackend
from offbeat.reward.pool import CallFailed
from offbeat.reward.tally import Tally

END = "<|end|>"


class Model:
    """A server whose model is known: which piece comes next depends on what was said."""

    def __init__(
        self,
        pieces: Sequence[str],
        seed: int = 0,
        *,
        top: int = 20,
        owned_by: str = "somebody",
        fault: Mapping[str, Any] | None = None,
    ) -> None:
        self.pieces, self.seed, self.top = (*pieces, END), seed, top
        self.models = [
            {"id": "judge", "object": "model", "created": 7, "owned_by": owned_by, "root": "r/1"}
        ]
        self.fault = fault
        self.bodies: list[dict[str, Any]] = []

    def shares(self, said: str) -> dict[str, float]:
        """The same for the same words."""
        random = np.random.default_rng([self.seed, *said.encode()])
        return dict(zip(self.pieces, random.dirichlet([0.5] * len(self.pieces)), strict=True))

    def handle(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            self.models[0]["created"] += 1  # type: ignore[operator]
            return httpx.Response(200, json={"data": self.models})
        body = json.loads(request.content)
        self.bodies.append(body)
        if body.get("top_logprobs", 0) > self.top:
            return httpx.Response(400, json={"error": "top_logprobs must be at most 5"})
        begun = ""
        if body["messages"][-1]["role"] == "assistant":
            assert body["continue_final_message"] is True
            assert body["add_generation_prompt"] is False
            begun = body["messages"][-1]["content"]
        said, content = begun, []
        for _ in range(body["max_tokens"]):
            shares = self.shares(said)
            best = max(shares, key=lambda piece: shares[piece])
            if best == END and self.models[0]["owned_by"] != "vllm":
                break  # vLLM tells of the place where it ended, others do not
            ranked = sorted(shares, key=lambda piece: -shares[piece])[: body.get("top_logprobs", 0)]
            content.append(
                {
                    "token": best,
                    "logprob": float(np.log(shares[best])),
                    "top_logprobs": [
                        {"token": piece, "logprob": float(np.log(shares[piece]))}
                        for piece in ranked
                    ],
                }
            )
            if best == END:
                break
            said += best
        choice: dict[str, Any] = {
            "message": {"content": said[len(begun) :]},
            "finish_reason": "length",
            "logprobs": {"content": content} if body.get("logprobs") else None,
        }
        usage = {"prompt_tokens": 11, "completion_tokens": len(content), "total_tokens": 0}
        answer = {"choices": [choice | dict(self.fault or {})], "usage": usage}
        return httpx.Response(200, json=answer)

    def weigh(self, verdicts: Sequence[str], longest: int) -> list[float]:
        """Over all texts of so many pieces: which verdict each begins with, the longest first."""
        sums = [0.0] * len(verdicts)

        def walk(said: str, mass: float, left: int) -> None:
            if left and not said.endswith(END) and mass > 1e-9:
                for piece, share in self.shares(said).items():
                    walk(said + piece, mass * share, left - 1)
                return
            bare = said.removesuffix(END).lstrip().lower()
            begun = [v for v in verdicts if bare.startswith(v)]
            if begun:
                sums[verdicts.index(max(begun, key=len))] += mass

        walk("", 1.0, longest)
        return sums


def section(**more: Any) -> RewardSourceSection:
    base = {"kind": "genrm", "base_url": "http://judge.invalid/v1", "model": "judge", "retries": 0}
    return RewardSourceSection.model_validate(base | more)


def with_judge(
    model: Model, body: Callable[[HttpBackend], Awaitable[Any]], run_seed: int = 0, **more: Any
) -> Any:
    async def main() -> Any:
        transport = httpx.MockTransport(model.handle)
        judge = HttpBackend(section(**more), name="judge", transport=transport, seed=run_seed)
        await judge.start()
        try:
            return await asyncio.wait_for(body(judge), 60)
        finally:
            await judge.stop()

    return asyncio.run(main())


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("digits", [True, False])
def test_probabilities_of_a_server_that_goes_on(seed: int, digits: bool) -> None:
    """Numbers of one piece or more, a space before them, and words that only begin like one."""
    pieces = [" ", "1", "0", "2", "5", "x"] if digits else [" 1", "1", "10", " 10", "2", "x", "Yes"]
    verdicts = ("1", "10", "2", "5") if digits else ("1", "10", "2", "yes")
    model = Model(pieces, seed, owned_by="vllm")
    weighed = with_judge(model, lambda judge: judge.weigh("text", verdicts))
    # As deep as an answer is followed: a third space, and the like, are of no account.
    expected = model.weigh(verdicts, 5) if digits else model.weigh(("1", "10", "2", "yes"), 4)
    if digits:
        np.testing.assert_allclose(weighed.probabilities, expected, atol=4e-3)
    else:  # "2x", "10x" and "1x" are no verdicts as pieces, and are where two pieces make them
        assert abs(sum(weighed.probabilities) - sum(expected)) < 1e-3
        np.testing.assert_allclose(weighed.probabilities, expected, atol=1e-3)
    verdict = weighed.verdict
    assert verdict.prompt_tokens == 11 * len(model.bodies)
    assert verdict.completion_tokens >= len(model.bodies) - 2
    assert all(body["temperature"] == 0 and "seed" not in body for body in model.bodies)
    assert all((body["logprobs"], body["top_logprobs"]) == (True, 20) for body in model.bodies)


def test_another_server_is_asked_once_and_follows_what_was_written() -> None:
    """What is open behind other words counts as what it is so far."""
    for seed in range(40):
        model = Model(["1", "0", "x"], seed)
        weighed = with_judge(model, lambda judge: judge.weigh("text", ("1", "10")))
        assert len(model.bodies) == 1
        first, second = model.shares(""), model.shares("1")
        one = first["1"]
        if max(first, key=lambda piece: first[piece]) == END:
            expected = [0.0, 0.0]
        elif (
            max(first, key=lambda piece: first[piece]) == "1"
            and max(second, key=lambda piece: second[piece]) != END
        ):
            expected = [one * (1 - second["0"]), one * second["0"]]
        else:
            expected = [one, 0.0]
        np.testing.assert_allclose(weighed.probabilities, expected, atol=1e-6)


def test_the_first_piece_is_enough_where_verdicts_are_pieces() -> None:
    model = Model(["A", " B", "B", "a", "x"], 3, owned_by="vllm")
    weighed = with_judge(model, lambda judge: judge.weigh("text", ("A", "B")))
    shares = model.shares("")
    np.testing.assert_allclose(weighed.probabilities, [shares["A"], shares["B"] + shares[" B"]])
    assert len(model.bodies) == 1
    assert model.bodies[0]["max_tokens"] == 3


@pytest.mark.parametrize(
    "fault",
    [
        {"logprobs": None},
        {"logprobs": {"content": None}},
        {"logprobs": {"content": []}},
        {"logprobs": {"content": [{"token": "8", "logprob": -0.1, "top_logprobs": []}]}},
        {"logprobs": {"content": [{"token": "8"}]}},
        {"logprobs": {"tokens": ["8"], "top_logprobs": [{"8": -0.1}]}},
    ],
)
def test_a_server_without_log_probs_is_refused_at_start(fault: dict[str, Any]) -> None:
    model = Model(["8", "9"], 1, fault=fault)
    with pytest.raises(UserError, match=r'reward\.judge\.parser = "expected" needs the log-probs'):
        with_judge(model, lambda judge: asyncio.sleep(0), parser="expected")
    with_judge(model, lambda judge: asyncio.sleep(0))  # any other parser may do

    async def later(judge: HttpBackend) -> None:
        with pytest.raises(CallFailed) as failed:
            await judge.weigh("text", ("8", "9"))
        assert failed.value.cause in {"no_logprobs", "bad_response"}

    with_judge(model, later)


def test_a_server_that_refuses_them_is_refused_at_start() -> None:
    with pytest.raises(UserError, match=r'parser = "expected".*top_logprobs must be at most 5'):
        with_judge(Model(["8"], top=5), lambda judge: asyncio.sleep(0), parser="expected")


def test_seeds_are_sent_where_something_is_drawn() -> None:
    def seeds(run_seed: int = 0, owned_by: str = "me", **more: Any) -> list[int | None]:
        model = Model(["8", "9"], owned_by=owned_by)

        async def body(judge: HttpBackend) -> None:
            for text in ("one", "two"):
                await asyncio.gather(*(judge.verdict(text, vote=vote) for vote in range(3)))

        with_judge(model, body, run_seed, **({"temperature": 0.7} | more))
        return [body.get("seed") for body in model.bodies]

    first = seeds()
    assert len(set(first)) == len(first) == 6, "votes and texts differ"
    assert seeds() == first, "runs repeat"
    assert not set(seeds(1)) & set(first), "the run's seed counts"
    assert seeds(1, seed=4) == seeds(2, seed=4) != first, "and the section's goes before it"
    assert all(isinstance(seed, int) and 0 <= seed < 2**31 for seed in first)
    assert seeds(temperature=0.0) == [None, None], "equal texts of temperature 0 are asked once"
    assert seeds(owned_by="vllm") == [None] * 6, "vLLM's CPU build dies of seeds"
    assert seeds(owned_by="vllm", seed=4) == seeds(seed=4)


def test_two_judges_of_one_run_do_not_repeat_one_another() -> None:
    bodies = []
    for name in ("one", "other"):
        model = Model(["8", "9"])
        transport = httpx.MockTransport(model.handle)

        async def main(name: str = name, transport: Any = transport) -> None:
            judge = HttpBackend(section(temperature=1.0), name=name, transport=transport, seed=3)
            await judge.start()
            await judge.verdict("text")
            await judge.stop()

        asyncio.run(main())
        bodies.append(model.bodies[-1])
    assert bodies[0]["seed"] != bodies[1]["seed"]


def test_tokens_and_seconds_are_counted() -> None:
    async def body(judge: HttpBackend) -> Any:
        return await judge.verdict("text")

    verdict = with_judge(Model(["8", "9"], 5), body, max_tokens=4)
    assert (verdict.prompt_tokens, verdict.retries, verdict.cached) == (11, 0, False)
    assert verdict.completion_tokens == len(verdict.text) > 0
    assert 0 < verdict.seconds < 60
    for usage in (None, {}, [], {"prompt_tokens": "many"}, {"prompt_tokens": -3}):
        said = read_answer({"choices": [{"message": {"content": "8"}}], "usage": usage}, 0)
        assert (said.prompt_tokens, said.completion_tokens) == (0, 0)


def test_the_identity_is_what_the_server_says_of_the_model() -> None:
    async def body(judge: HttpBackend) -> str:
        return judge.identity

    model = Model(["8"])
    found = with_judge(model, body)
    assert "judge.invalid" in found
    assert '"root": "r/1"' in found
    assert with_judge(model, body) == found, "also where the server tells another time of day"
    secret = with_judge(model, body, base_url="http://user:pass@judge.invalid/v1")
    assert secret == found
    assert with_judge(model, body, base_url="http://other.invalid/v1") != found
    model.models[0]["root"] = "r/2"
    assert with_judge(model, body) != found
    assert with_judge(model, lambda judge: _special(judge)) == ()


async def _special(judge: HttpBackend) -> Sequence[str]:
    return judge.special_tokens


def tallied(verdicts: Sequence[str], pieces: Mapping[str, float]) -> list[float]:
    tally = Tally(verdicts)
    tally.add([(next(iter(pieces)), pieces)])
    return [round(share, 6) for share in tally.probabilities()]


def test_pieces_that_hold_more_than_a_verdict() -> None:
    numbers = ("1", "10", "2")
    assert tallied(numbers, {"10": 0.5, "1/10": 0.2, "100": 0.1, "1.5": 0.1, "2.": 0.1}) == [
        0.2, 0.5, 0.1,
    ]  # fmt: skip
    assert tallied(("yes", "no"), {"Yes,": 0.4, " NO": 0.2, "yesterday": 0.2, "none": 0.1}) == [
        0.4, 0.2,
    ]  # fmt: skip
    # A beginning counts for the only verdict that it can become, and for none of several.
    assert tallied(("correct", "wrong"), {"cor": 0.4, "w": 0.2, "x": 0.4}) == [0.4, 0.2]
    assert tallied(("incorrect", "inexact", "right"), {"in": 0.4, " ri": 0.3}) == [0, 0, 0.3]
    assert tallied(("A", "a"), {"A": 0.4, "a": 0.2}) == [0.4, 0.2]
    assert tallied(("Yes", "yes"), {"Yes": 0.4, "yes": 0.2, "YES": 0.1}) == [0.4, 0.2]
    assert tallied(("partly correct", "correct"), {"Correct": 0.4, "Partly": 0.2}) == [0.2, 0.4]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.dictionaries(st.text("1 0xy", max_size=3), st.floats(0, 1), min_size=1, max_size=6),
        max_size=4,
    ),
    st.lists(st.text("10xy", min_size=1, max_size=3), min_size=1, max_size=4, unique=True),
)
def test_a_tally_never_adds_up_to_more_than_one(
    places: list[dict[str, float]], verdicts: list[str]
) -> None:
    tally = Tally(verdicts)
    given = []
    for pieces in places:
        whole = sum(pieces.values()) or 1.0
        shares = {piece: share / max(1.0, whole) for piece, share in pieces.items()}
        given.append((next(iter(pieces)), shares))
    tally.add(given)
    for begun in itertools.islice(tally.take(), 3):
        tally.add(given[:1], begun)
    shares = tally.probabilities()
    assert all(0 <= share <= 1 for share in shares)
    assert sum(shares) <= 1 + 1e-9
