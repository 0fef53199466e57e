"""Judge health: correlations against plain oracles, failures in no number, no warning of noise."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import stdev
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.config import RewardSourceSection
from offbeat.records import Batch, Completion, Group, Prompt, Reward, Sample
from offbeat.track.health import WINDOW, Health, Values, scale_ends
from offbeat.track.metrics import read_metrics
from offbeat.track.ranks import RankCorrelation, spearman
from offbeat.track.recorder import Recorder
from offbeat.track.summary import RunStats, build_summary
from offbeat.track.truth import TruthWatch, truth_agreement

NUMBERS = st.one_of(st.integers(-3, 3).map(float), st.floats(-1e300, 1e300))
PAIRS = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=3, max_size=30)


def slow_ranks(values: Sequence[float]) -> list[float]:
    """By definition: one more than how many are smaller, and half of the others that are equal."""
    return [
        1 + sum(other < value for other in values) + (sum(o == value for o in values) - 1) / 2
        for value in values
    ]


def slow_spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    one, other = (slow_ranks(column) for column in zip(*pairs, strict=True))
    if len(set(one)) == 1 or len(set(other)) == 1:
        return None
    return float(np.corrcoef(one, other)[0, 1])


@given(PAIRS)
def test_spearman_is_pearson_of_ranks_with_ties(pairs: list[tuple[float, float]]) -> None:
    found, wanted = spearman(*zip(*pairs, strict=True)), slow_spearman(pairs)
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        assert found == pytest.approx(wanted, abs=1e-9)
        rising = [(math.atan(a / 1e3) * 7 - 2, b) for a, b in pairs]
        if len({a for a, _ in rising}) == len({a for a, _ in pairs}):
            assert spearman(*zip(*rising, strict=True)) == pytest.approx(found)
        assert spearman(*zip(*[(-a, b) for a, b in pairs], strict=True)) == pytest.approx(-found)


@given(st.lists(PAIRS, min_size=1, max_size=5), st.randoms())
def test_parts_that_differ_do_not_correlate_by_that(parts: list[Any], random: Any) -> None:
    """Shifting a whole part by any amount changes nothing, nor does the order of its members."""
    pooled, shifted, merged = RankCorrelation(), RankCorrelation(), RankCorrelation()
    columns: list[tuple[float, float, int]] = []
    for number, part in enumerate(parts):
        small = [(float(slow_ranks([a for a, _ in part])[i]), b) for i, (_, b) in enumerate(part)]
        columns += [(a, b, number) for a, b in small]
        one = RankCorrelation()
        one.add(*np.array(small).T)
        merged.merge(one)
    random.shuffle(columns)
    array = np.array(columns)
    numbers = array[:, 2].astype(np.int64)
    pooled.add(array[:, 0], array[:, 1], numbers)
    shifted.add(array[:, 0] + 100 * numbers, array[:, 1], numbers)
    assert (pooled.n, pooled.parts) == (shifted.n, shifted.parts) == (merged.n, merged.parts)
    if pooled.value is None:
        assert shifted.value is None
    else:
        assert pooled.value == pytest.approx(shifted.value) == pytest.approx(merged.value)


@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=8), min_size=1, max_size=6))
def test_values_merge_to_what_they_are_together(parts: list[list[float]]) -> None:
    merged = Values()
    for part in parts:
        merged.merge(Values.of(np.array(part), np.arange(float(len(part))), (-5.0, 5.0)))
    values = [value for part in parts for value in part]
    assert merged.n == len(values)
    assert (merged.low, merged.high) == (sum(v <= -5 for v in values), sum(v >= 5 for v in values))
    if len(values) > 1:
        assert merged.deviation == pytest.approx(stdev(values), rel=1e-6, abs=1e-6)


# ---- a step's record ----

JUDGE = RewardSourceSection(kind="genrm", model="m")
SCORER = RewardSourceSection(kind="disrm", model="m")


def sample(tokens: int, total: float | None = None, **rewards: float | Reward | None) -> Sample:
    """Rewards by source: a value, None for an abstention, or any outcome."""
    typed = {
        name: value
        if isinstance(value, Reward)
        else (Reward.abstained(name) if value is None else Reward.scored(name, value))
        for name, value in rewards.items()
    }
    return Sample(Completion("r", 0, "x", tokens, 0, 0, "stop", None), typed, total)


def batch(step: int, *groups: Sequence[Sample]) -> Batch:
    nothing = np.zeros(0, dtype=np.int32)
    return Batch(
        step,
        tuple(
            Group(Prompt(number, nothing, "p", "p"), 0, 9, tuple(samples))
            for number, samples in enumerate(groups)
        ),
    )


def test_a_judge_that_pays_for_length_and_gives_full_marks() -> None:
    health = Health({"judge": JUDGE, "scorer": SCORER})
    found = health.step(
        batch(
            0,
            [sample(t, t / 10, judge=min(1.0, t / 10), scorer=-float(t)) for t in (2, 4, 10, 12)],
            [sample(t, t / 10, judge=t / 10, scorer=float(t)) for t in (0, 5, 6)],
        )
    )
    judge, scorer = found["sources"]["judge"], found["sources"]["scorer"]
    assert judge["n"] == 7
    assert judge["length"] == pytest.approx(
        spearman([0.2, 0.4, 1, 1, 0, 0.5, 0.6], [2, 4, 10, 12, 0, 5, 6])
    )
    assert (judge["low"], judge["high"]) == (1 / 7, 2 / 7)
    assert "spread" not in judge
    assert (scorer["low"], scorer["high"]) == (1 / 7, 1 / 7)  # of what it gave so far: -12 and 6
    assert found["sources"]["total"]["length"] == pytest.approx(1)
    assert "low" not in found["sources"]["total"]
    within = found["agreement"]["judge~scorer"]
    assert within is not None
    assert -1 < within < 0  # the group of four disagrees, that of three agrees


def test_what_failed_or_abstained_is_in_no_number() -> None:
    def step(*extra: Sample) -> dict[str, Any]:
        scored = [sample(t, 0.5, judge=v) for t, v in ((1, 0.1), (2, 0.5), (3, 0.4))]
        return Health({"judge": JUDGE}).step(batch(0, [*scored, *extra]))

    lost = (
        sample(99, None, judge=Reward.failed("judge", "timeout")),
        sample(98, None, judge=None),
        sample(97, None, judge=Reward.scored("judge", math.nan)),
        sample(96, None),
    )
    assert step(*lost) == step()
    assert step()["sources"]["judge"]["n"] == 3
    nothing = Health({"judge": JUDGE}).step(batch(0, [lost[0]]))
    assert nothing["sources"]["judge"] == {"n": 0, "length": None}


def test_numbers_are_of_the_last_steps_and_spreads_are_meant() -> None:
    health = Health({"judge": JUDGE})
    votes = [Reward.scored("judge", 0.5, spread=spread) for spread in (0.1, 0.3)]
    found = health.step(batch(0, [sample(1, judge=vote) for vote in votes]))
    assert found["sources"]["judge"]["spread"] == pytest.approx(0.2)
    for number in range(1, WINDOW + 1):
        assert found["sources"]["judge"]["n"] == 2 * number
        found = health.step(batch(number, [sample(1, judge=1.0), sample(2, judge=0.0)]))
    assert found["steps"] == WINDOW
    assert found["sources"]["judge"] == {  # the first step has left the window
        "n": 2 * WINDOW, "length": -1.0, "low": 0.5, "high": 0.5,
    }  # fmt: skip
    assert health.deviation("judge") == pytest.approx(stdev([0.0, 1.0] * WINDOW))
    assert health.deviation("nobody") is None


def test_a_step_that_is_done_again_counts_once() -> None:
    def told(health: Health, numbers: Sequence[int]) -> list[dict[str, Any]]:
        return [
            health.step(batch(n, [sample(t, judge=n / 20 + t / 9) for t in range(3)]))
            for n in numbers
        ]

    wanted = told(Health({"judge": JUDGE}), range(15))
    health = Health({"judge": JUDGE})
    assert told(health, [*range(13), *range(8, 13)]) == wanted[:13] + wanted[8:13]
    assert told(health, range(15)) == wanted


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ({}, (0, 1)),
        ({"parser": "choice", "choices": {"A": 2.0, "B": -1.0}}, (-1, 2)),
        ({"parser": "choice", "choices": {"A": 0.8, "B": 0.3}, "pairwise": "all"}, (0, 1)),
        ({"normalize": "running"}, None),
        ({"kind": "disrm"}, None),
        ({"kind": "function", "function": "f.py:f"}, None),
    ],
)
def test_the_scale_of_a_source(changes: dict[str, Any], ends: tuple[float, float] | None) -> None:
    assert scale_ends(RewardSourceSection(**({"kind": "genrm", "model": "m"} | changes))) == ends


def test_huge_values_and_one_value_alone_raise_nothing() -> None:
    found = Health().step(batch(0, [sample(1, 1e308, f=1.7e308), sample(2, -1e308, f=-1.7e308)]))
    assert found["sources"]["f"]["n"] == 2
    assert Health().step(batch(0))["agreement"] == {}
    alone = Health().step(batch(0, [sample(1, f=1.0), sample(2, f=1.0)]))
    assert "low" not in alone["sources"]["f"]  # nobody knows which end 1 is


# ---- the true check ----


def watch(deviation: float | None = 0.3) -> TruthWatch:
    return TruthWatch(lambda name: deviation)


def metrics(accuracy: float, reward: float | None = None, n: int = 200, **more: float) -> Any:
    found = {"accuracy": accuracy, "n": float(n), "unscored": 0.0}
    return found | ({} if reward is None else {"reward/judge": reward}) | more


def warned(looks: Sequence[Mapping[str, float]], deviation: float | None = 0.3) -> list[Any]:
    truth = watch(deviation)
    return [w for i, look in enumerate(looks) for w in truth.validation(10 * i, look)]


def test_a_reward_that_rises_while_truth_falls_is_named_once_with_numbers() -> None:
    accuracy = [0.3, 0.4, 0.5, 0.5, 0.4, 0.3, 0.2, 0.2, 0.2]
    looks = [metrics(a, 0.3 + 0.05 * i) | {"reward": 0.2} for i, a in enumerate(accuracy)]
    (found,) = warned(looks)
    assert (found.source, found.version) == ("judge", 50)
    for words in (
        "warning: reward.judge rises while truth falls: 0.425 -> 0.525",
        "accuracy 0.500 -> 0.350 (n = 200, 4.4 standard errors)",
        "from version 20 and 30 to 40 and 50",
    ):
        assert words in found.line, found.line
    assert found.record() == {"version": 50, "source": "judge", "line": found.line}


def test_an_episode_that_ended_can_be_followed_by_another() -> None:
    wave = [0.5, 0.5, 0.2, 0.2, 0.5, 0.5, 0.2, 0.2]
    looks = [metrics(a, 0.1 * i) for i, a in enumerate(wave)]
    assert [w.version for w in warned(looks)] == [20, 60]


@pytest.mark.parametrize(
    "looks",
    [
        [metrics(a, 0.1 * i) for i, a in enumerate((0.2, 0.3, 0.4, 0.5, 0.6, 0.7))],  # truth rises
        [metrics(a, 0.5) for a in (0.6, 0.6, 0.2, 0.2, 0.2)],  # the reward does not rise
        [metrics(a, 0.9 - 0.1 * i) for i, a in enumerate((0.6, 0.6, 0.2, 0.2))],  # both fall
        [metrics(a, 0.1 * i, n=10) for i, a in enumerate((0.6, 0.6, 0.4, 0.4))],  # n is small
        [metrics(math.nan, 0.1 * i) for i in range(6)],  # no checker
        [metrics(a, 0.1 * i, unscored=199.0) for i, a in enumerate((0.6, 0.6, 0.2, 0.2))],
        [metrics(a, 0.1 * i) for i, a in enumerate((60, 60, 20, 20))],  # no share: no error known
        [metrics(0.6, 0.1)],
        [{"accuracy": 0.5}],
        [{}],
    ],
)
def test_nothing_is_said_without_cause(looks: list[Any]) -> None:
    assert warned(looks) == []


def test_a_rise_within_its_own_error_is_none() -> None:
    looks = [metrics(a, r) for a, r in zip((0.6, 0.6, 0.2, 0.2), (0.5, 0.5, 0.52, 0.52))]  # noqa: B905
    assert warned(looks, deviation=0.3) == []
    assert len(warned(looks, deviation=0.05)) == 1
    assert warned(looks, deviation=None) == []  # no step has told how its values differ


def test_two_validations_of_a_short_run_are_enough_for_a_large_fall() -> None:
    assert len(warned([metrics(0.6, 0.2), metrics(0.3, 0.4)])) == 1
    assert warned([metrics(0.6, 0.2), metrics(0.5, 0.4)]) == []


def test_several_answers_of_a_prompt_count_as_one() -> None:
    looks = [metrics(a, 0.1 * i, n=50) | {"pass@1": a, "pass@4": a} for i, a in
             enumerate((0.6, 0.6, 0.35, 0.35))]  # fmt: skip
    assert warned(looks) == []  # 200 answers of 50 prompts
    assert len(warned([look | {"n": 200.0} for look in looks])) == 1


def steps_of(
    truth: TruthWatch, means: Sequence[float], *, first: int = 0, groups: int = 16
) -> None:
    for number, mean in enumerate(means):
        rng = np.random.default_rng(number)
        truth.step(
            batch(
                first + number,
                *[
                    [
                        sample(3, total=mean + e, judge=mean + e, flat=0.5)
                        for e in rng.normal(0, 0.1, 4)
                    ]
                    for _ in range(groups)
                ],
            )
        )


def test_without_rewards_in_validation_those_of_training_count() -> None:
    truth = watch()
    said = []
    for i, accuracy in enumerate((0.6, 0.6, 0.3, 0.3)):
        said += truth.validation(10 * i, metrics(accuracy))
        steps_of(truth, [0.2 + 0.1 * i] * 5, first=10 * i)
    assert sorted(w.source for w in said) == ["judge", "total"]
    assert any("the total reward rises" in w.line for w in said)
    flat = watch()
    for i, accuracy in enumerate((0.6, 0.6, 0.3, 0.3)):
        assert flat.validation(10 * i, metrics(accuracy)) == []
        steps_of(flat, [0.2] * 5, first=10 * i)


@pytest.mark.parametrize(("groups", "times", "said"), [(2, 1, 0), (2, 9, 0), (18, 1, 2)])
def test_groups_that_are_trained_again_count_once(groups: int, times: int, said: int) -> None:
    """A rise within the error of few groups is none, however often these are trained."""
    truth = watch()
    found = []
    for i, accuracy in enumerate((0.6, 0.6, 0.3, 0.3)):
        found += truth.validation(10 * i, metrics(accuracy))
        for _ in range(times):
            steps_of(truth, [0.2 + 0.02 * i] * 4, first=10 * i, groups=groups)
    assert len(found) == said


@pytest.mark.parametrize("accuracy", [0.1, 0.5, 0.93])
def test_noise_alone_is_hardly_ever_a_fall(accuracy: float) -> None:
    """Fifty validations of an accuracy that stays, beside a reward that rises all the while."""
    rng = np.random.default_rng(7)
    alarms = 0
    for _ in range(300):
        draws = rng.binomial(100, accuracy, 50) / 100
        alarms += bool(warned([metrics(a, 0.02 * i, n=100) for i, a in enumerate(draws)]))
    assert alarms <= 9  # 3 in 100 at most; about one is expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(-1, 1)), min_size=1, max_size=12))
def test_whatever_is_said_is_true(series: list[tuple[float, float]]) -> None:
    """Every warning names a fall and a rise that are in the numbers it was given."""
    truth = watch(0.1)
    for i, (accuracy, reward) in enumerate(series):
        for found in truth.validation(i, metrics(accuracy, reward, n=100)):
            assert accuracy < max(a for a, _ in series[:i])
            assert reward > min(r for _, r in series[:i])
            assert found.version == i


def test_agreement_with_truth_over_validations() -> None:
    looks: list[Any] = [
        {"accuracy": a, "reward": a, "reward/judge": -a, "reward/odd": None}
        for a in (0.1, 0.3, 0.2, 0.5)
    ]
    found = truth_agreement([*looks, {"accuracy": None, "reward/judge": 9.0}])
    assert found == {"total": pytest.approx(1), "judge": pytest.approx(-1)}


# ---- in the run's files ----


class Facts:
    """A trainer's step and a tally in one."""

    def __getattr__(self, name: str) -> Any:
        values = {"no_signal": (), "staleness": (0,), "drift": None, "applied": True}
        return values.get(name, 1)


def recorder_in(folder: Path) -> Recorder:
    return Recorder(
        folder, bound=2, total_steps=10, stream=None, replicas={}, started=0.0,
        sources={"judge": JUDGE, "scorer": SCORER},
    )  # fmt: skip


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return recorder_in(tmp_path)


COUNTS = {"admitted": 2, "trained": 2, "discarded": {}, "live": 0}


def step(recorder: Recorder, of: Batch) -> None:
    facts: Any = Facts()
    recorder.step(of, facts, 0.1, COUNTS, [], [], facts)


def test_health_reaches_metrics_and_summary(recorder: Recorder) -> None:
    for number in range(WINDOW + 5):
        recorder.validation(number, metrics(0.9 - 0.05 * number, 0.05 * number, n=400), "rollout")
        values = [(1, number / 20), (3, 0.5), (2, 0.25)]
        step(recorder, batch(number, [sample(t, v, judge=v) for t, v in values]))
    summary = recorder.close("finished")
    records = list(read_metrics(recorder.run_dir / "metrics.jsonl"))
    steps = [record["health"] for record in records if record["type"] == "step"]
    assert [found["steps"] for found in steps] == [*range(1, WINDOW + 1), *[WINDOW] * 5]
    health = summary["health"]
    assert health["first"] == {"step": WINDOW - 1, **steps[WINDOW - 1]}
    assert health["last"] == {"step": WINDOW + 4, **steps[-1]}
    assert health["truth"] == {"judge": -1.0}
    events = [r for r in records if r["type"] == "event" and "health" in r]
    assert [event["health"] for event in events] == health["warnings"]
    assert [w["source"] for w in health["warnings"]] == ["judge"]
    assert json.loads((recorder.run_dir / "summary.json").read_text()) == summary
    again = RunStats(2, 0.0)  # a run that goes on begins with the records of the one before
    for record in records:
        again.feed(record)
    assert build_summary(again, status="finished", now=1.0)["health"] == health


def play(recorder: Recorder, steps: Sequence[int], *, held_out: bool) -> None:
    """Steps, and before every fifth a validation: from the 20th on truth falls."""
    for number in steps:
        if number % 5 == 0:
            accuracy = 0.5 if number < 20 else 0.1
            reward = 0.1 * number if held_out else None
            recorder.validation(number, metrics(accuracy, reward), "rollout")
        values = [number / 10 + (i + number) % 3 / 20 for i in range(4)]
        samples = [sample(3 + i, v, judge=v, scorer=-v * i) for i, v in enumerate(values)]
        step(recorder, batch(number, samples, [sample(2, judge=None, mute=None), *samples[:3]]))


def told_in(recorder: Recorder) -> tuple[dict[int, Any], list[Any]]:
    """Health by step, and what was warned of."""
    records = list(read_metrics(recorder.run_dir / "metrics.jsonl"))
    steps = {r["step"]: r["health"] for r in records if r["type"] == "step"}
    return steps, [r["health"] for r in records if r["type"] == "event" and "health" in r]


@pytest.mark.parametrize("held_out", [True, False])
def test_a_run_that_goes_on_is_told_and_warned_of_the_same(tmp_path: Path, held_out: bool) -> None:
    """Killed twice: before the fall, and after its warning; both times some steps are redone."""
    whole = recorder_in(tmp_path / "whole")
    play(whole, range(30), held_out=held_out)
    summary = whole.close("finished")
    steps, warnings = told_in(whole)
    assert "judge" in {w["source"] for w in warnings}
    for first, end in ((0, 19), (17, 28), (25, 30)):
        broken = recorder_in(tmp_path / "broken")
        broken.recall()
        play(broken, range(first, end), held_out=held_out)
        resumed = broken.close("finished")
    assert told_in(broken) == (steps, warnings)
    assert resumed["health"] == summary["health"]


def test_a_run_goes_on_from_records_that_have_no_evidence(recorder: Recorder) -> None:
    play(recorder, range(3), held_out=True)
    recorder.close("finished")
    path = recorder.run_dir / "metrics.jsonl"
    records = [{**record, "evidence": None} for record in read_metrics(path)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    again = recorder_in(recorder.run_dir)
    again.recall()
    play(again, [3], held_out=True)
    assert again.close("finished")["health"]["last"]["steps"] == 1


def test_the_first_full_window_stays_when_steps_are_redone(recorder: Recorder) -> None:
    play(recorder, [*range(20), *range(3)], held_out=True)
    health = recorder.close("finished")["health"]
    assert (health["first"]["step"], health["first"]["steps"]) == (WINDOW - 1, WINDOW)
    assert (health["last"]["step"], health["last"]["steps"]) == (19, WINDOW)


def test_trouble_with_health_never_reaches_training(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(Health, "step", broken)
    monkeypatch.setattr(TruthWatch, "validation", broken)
    step(recorder, batch(0, [sample(1, judge=0.5)]))
    recorder.validation(0, metrics(0.5), "rollout")
    summary = recorder.close("finished")
    assert summary["steps"] == 1
    assert summary["health"]["last"] is None
