"""How likely each verdict is: a tree of tokens, and what a real engine says at its nodes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from engine_models import read_version
from judge_models import KINDS, Oracle, make_judge, make_tokenizer

from offbeat.config import RewardSourceSection
from offbeat.errors import OffbeatError, UserError
from offbeat.records import GenerateRequest, Sampling
from offbeat.reward.judge import Weighed
from offbeat.reward.judge_engines import EngineBackend
from offbeat.reward.pool import CallFailed
from offbeat.reward.spelling import CannotSpell, Tree, spell, ways
from offbeat.rollout.transformers_engine import TransformersEngine

GRADES = tuple(str(grade) for grade in range(1, 11))
WORDS = ("correct", "partly correct", "incorrect")
SETS = (("1", "10"), GRADES, ("yes", "no"), WORDS, ("A", "B"))
TEXTS = ("Q: 3 + 4?\nAnswer: 7\nGrade:", "(yes) Answer: 9\n")


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("judges")
    return {kind: make_judge(root / kind, kind) for kind in KINDS}


def section(path: Path, **more: Any) -> RewardSourceSection:
    return RewardSourceSection.model_validate({"kind": "genrm", "model": str(path)} | more)


def with_judge(
    path: Path, body: Callable[[EngineBackend, TransformersEngine], Awaitable[Any]], **more: Any
) -> Any:
    config = section(path, **more)

    async def main() -> Any:
        engine = TransformersEngine(
            str(path), max_context=200, seats=64, load_manifest=read_version
        )
        await engine.start()
        judge = EngineBackend([engine], path, config, name="judge")
        await judge.start()
        try:
            return await asyncio.wait_for(body(judge, engine), 120)
        finally:
            await judge.stop()
            await engine.stop()

    return asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_are_those_of_plain_passes(judges: dict[str, Path], kind: str) -> None:
    async def body(judge: EngineBackend, engine: TransformersEngine) -> list[Weighed]:
        asked = [judge.weigh(text, verdicts) for text in TEXTS for verdicts in SETS]
        return list(await asyncio.gather(*asked))

    oracle = Oracle(judges[kind])
    cases = list(itertools.product(TEXTS, SETS))
    found = with_judge(judges[kind], body, max_context=200)
    assert len(found) == len(cases)
    sums = []
    for (text, verdicts), weighed in zip(cases, found, strict=True):
        expected = oracle.weigh(text, verdicts)
        np.testing.assert_allclose(weighed.probabilities, expected, atol=1e-5, rtol=1e-3)
        assert max(expected) > 0.005 or text == TEXTS[1], "there is something to see"
        sums.append(sum(expected))
        assert sum(weighed.probabilities) <= 1
        verdict = weighed.verdict
        prompt = len(oracle.tokenizer(text)["input_ids"])
        calls = verdict.completion_tokens
        assert calls >= 1
        assert prompt * calls <= verdict.prompt_tokens <= (prompt + 16) * calls
        assert verdict.seconds > 0
    assert max(sums) > 0.1


def test_probabilities_are_the_shares_of_what_the_judge_says(judges: dict[str, Path]) -> None:
    """Drawn texts, read as text: which verdict do they begin with, the longest one first?"""
    text, verdicts = TEXTS[0], ("1", "10", "2", "no", "n", "A")

    async def body(judge: EngineBackend, engine: TransformersEngine) -> Any:
        weighed = await judge.weigh(text, verdicts)
        ids = np.array(judge._encode(text), np.int32)
        request = GenerateRequest("r", ids, 6000, Sampling(4, 1.0))
        return weighed, [item.text async for item in engine.generate(request)]  # type: ignore[union-attr]

    weighed, texts = with_judge(judges["characters"], body)
    counts = dict.fromkeys(verdicts, 0)
    for said in texts:
        bare = said[1:] if said.startswith(" ") else said
        begun = [v for v in verdicts if (bare if len(v) == 1 else bare.lower()).startswith(v)]
        if begun and not (bare.startswith(("nO", "N")) and bare[:2] not in ("NO", "No")):
            counts[max(begun, key=len)] += 1
    shares = np.array(list(counts.values())) / len(texts)
    expected = np.array(weighed.probabilities)
    deviation = np.sqrt(expected * (1 - expected) / len(texts))
    assert (np.abs(shares - expected) < 4.5 * deviation + 1e-3).all(), (shares, expected)
    assert (expected > 0.003).sum() >= 4, expected


def test_one_short_round_where_the_verdicts_are_tokens(judges: dict[str, Path]) -> None:
    async def body(judge: EngineBackend, engine: TransformersEngine) -> Any:
        requests: list[GenerateRequest] = []
        generate = engine.generate

        def counted(request: GenerateRequest) -> Any:
            requests.append(request)
            return generate(request)

        engine.generate = counted  # type: ignore[method-assign]
        alone = await judge.weigh(TEXTS[0], ("(", ":"))
        first, requests[:] = list(requests), []
        both = await asyncio.gather(*(judge.weigh(TEXTS[0], GRADES) for _ in range(5)))
        return alone, first, both, list(requests)

    alone, first, both, shared = with_judge(judges["bytes"], body)
    assert len(first) <= 2
    assert all(r.sampling.max_tokens == 1 for r in [*first, *shared])
    assert len(shared) == 2, "the root and what stands behind 1, once for all who ask"
    assert len({weighed.probabilities for weighed in both}) == 1
    paid = [w.verdict.completion_tokens for w in both if w.verdict.completion_tokens]
    assert paid == [len(shared)], "what is shared is counted once"
    assert alone.verdict.completion_tokens == len(first)


def test_many_verdicts_are_watched_in_parts(judges: dict[str, Path]) -> None:
    """More than an engine tells of at once."""
    vocabulary = [
        token
        for token in make_tokenizer("bytes").get_vocab()
        if token.isalnum() and token.isascii()
    ]
    verdicts = tuple(sorted({token.lower() for token in vocabulary}))
    assert len(verdicts) > 64  # twice as many with a space in front

    async def body(judge: EngineBackend, engine: TransformersEngine) -> Weighed:
        return await judge.weigh(TEXTS[0], verdicts)

    weighed = with_judge(judges["bytes"], body)
    expected = Oracle(judges["bytes"]).weigh(TEXTS[0], verdicts)
    np.testing.assert_allclose(weighed.probabilities, expected, atol=2e-5)


def test_what_it_said_is_the_likeliest_verdict_or_what_it_says_instead(
    judges: dict[str, Path],
) -> None:
    async def body(judge: EngineBackend, engine: TransformersEngine) -> Any:
        ids = np.array(judge._encode(TEXTS[0]), np.int32)
        request = GenerateRequest("r", ids, 1, Sampling(1, 0.0))
        (greedy,) = [item async for item in engine.generate(request)]
        rare = await judge.weigh(TEXTS[0], ("yes", "no"))
        every = tuple(c for c in "\n :()ABGadenorsty0123456789YESNOcilpw,.?+=Q" if c.strip())
        return greedy.text, rare, await judge.weigh(TEXTS[0], every), every  # type: ignore[union-attr]

    greedy, rare, all_of_them, every = with_judge(judges["characters"], body)
    assert sum(rare.probabilities) < 0.5
    assert rare.verdict.text == greedy
    shares = all_of_them.probabilities
    assert sum(shares) > 0.5
    assert all_of_them.verdict.text == every[int(np.argmax(shares))]


def test_a_text_that_is_too_long_fails_by_cause(judges: dict[str, Path]) -> None:
    async def body(judge: EngineBackend, engine: TransformersEngine) -> None:
        with pytest.raises(CallFailed) as failed:
            await judge.weigh("Grade: " * 40, GRADES)
        assert failed.value.cause == "too_long"
        with pytest.raises(CallFailed) as failed:
            await judge.verdict("Grade: " * 40)
        assert failed.value.cause == "too_long"

    with_judge(judges["characters"], body, max_context=150)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"choices": {"yes": 1.0, "n\u00f8": 0.0}}, r"reward\.judge\.choices: .*no tokens for"),
        ({"scale": (0, 5)}, r"reward\.judge\.scale: .*no tokens for \"0\""),
    ],
)
def test_verdicts_that_cannot_be_told_apart_are_refused_at_start(
    tmp_path: Path, more: dict[str, Any], said: str
) -> None:
    tokenizer = make_tokenizer("characters")
    if "scale" in more:
        import json

        tokenizer.save_pretrained(tmp_path)
        file = tmp_path / "tokenizer.json"
        told = json.loads(file.read_text())
        vocabulary = told["model"]["vocab"]
        told["model"]["vocab"] = {
            {"0": "\u00e4", "1": "\u00f6"}.get(t, t): i for t, i in vocabulary.items()
        }
        file.write_text(json.dumps(told))
        tokenizer = type(tokenizer).from_pretrained(tmp_path)
    config = section(tmp_path, parser="expected", **more)
    judge = EngineBackend([None], tokenizer, config, name="judge")  # type: ignore[list-item]
    with pytest.raises(UserError, match=said):
        asyncio.run(judge.start())


def test_a_dead_engine_is_a_failure_by_cause(judges: dict[str, Path]) -> None:
    async def body(judge: EngineBackend, engine: TransformersEngine) -> None:
        async def broken(request: GenerateRequest) -> Any:
            if len(request.prompt_ids) > len(judge._encode(TEXTS[0])):
                raise OffbeatError("a node's request failed")
            async with contextlib.aclosing(generate(request)) as items:
                async for item in items:
                    yield item

        generate = engine.generate
        engine.generate = broken  # type: ignore[method-assign, assignment]
        with pytest.raises(CallFailed) as failed:
            await judge.weigh(TEXTS[0], GRADES)
        assert failed.value.cause == "unavailable"
        assert (await engine.health()).running == 0

    with_judge(judges["characters"], body)


def test_ways_to_say_a_verdict() -> None:
    assert ways(("yes", "A")) == [
        ("YES", " YES", "Yes", " Yes", "yes", " yes"),
        ("A", " A"),
    ]
    both = ways(("yes", "Yes"))
    assert both[0] == ("yes", " yes")
    assert both[1] == ("Yes", " Yes")
    assert not set(both[0]) & set(both[1])


def test_tokens_that_two_verdicts_share_are_refused() -> None:
    with pytest.raises(CannotSpell, match="no tokens"):
        spell(make_tokenizer("characters"), [20], ("yes", "\u4e00"))
    with pytest.raises(CannotSpell, match="empty"):
        spell(make_tokenizer("characters"), [20], ("yes", ""))
    with pytest.raises(CannotSpell, match="same tokens"):
        spell(make_tokenizer("characters"), [20], ("yes", "yes"))


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple),
        st.integers(0, 3),
        min_size=1,
        max_size=9,
    ),
    st.integers(0, 2**32 - 1),
)
def test_sums_equal_a_walk_over_all_texts(ends: dict[tuple[int, ...], int], seed: int) -> None:
    """Against all texts of four tokens: the verdict of a text is the longest way that begins it."""
    below: dict[tuple[int, ...], set[int]] = {}
    for path in ends:
        for place, token in enumerate(path):
            below.setdefault(path[:place], set()).add(token)
    inner = sorted(below, key=lambda node: (len(node), node))
    tree = Tree(("a", "b", "c", "d"), ends, {node: tuple(sorted(below[node])) for node in inner})

    def next_tokens(node: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng([seed, *node, len(node)]).dirichlet([0.6] * 4)

    found: dict[tuple[int, ...], dict[int, float]] = {}
    rounds = 0
    while nodes := tree.to_ask(found):
        rounds += 1
        for node in nodes:
            shares = next_tokens(node)
            found[node] = {token: float(shares[token]) for token in tree.below[node]}
    assert rounds <= tree.depth
    assert rounds == 1 or len(tree.below) > 5
    expected = [0.0] * 4
    for text in itertools.product(range(4), repeat=4):
        mass = 1.0
        for place, token in enumerate(text):
            mass *= float(next_tokens(text[:place])[token])
        begun = [text[:size] for size in range(1, 5) if text[:size] in ends]
        if begun:
            expected[ends[begun[-1]]] += mass
    np.testing.assert_allclose(tree.probabilities(found), expected, atol=1e-4)
    assert sum(tree.probabilities(found)) <= 1 + 1e-9
