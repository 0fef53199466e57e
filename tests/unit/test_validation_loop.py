"""When validations begin, and what waits for them: nothing but what must."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.test_loop import failing, run, well

from offbeat.errors import RunFailed
from offbeat.loop import Outcome


@pytest.mark.parametrize("every", [0, 2, 4])
def test_by_the_trainer_it_is_answered_between_steps_and_says_so(
    tmp_path: Path, every: int
) -> None:
    fakes, outcome, summary = run(tmp_path, well, validate={"on": "train", "every": every})
    assert isinstance(outcome, Outcome)
    between = [step for step in range(1, 6) if every and step % every == 0]
    assert [entry["step"] for entry in summary["validation"]] == [0, *between, 6]
    assert {entry["by"] for entry in summary["validation"]} == {"train"}
    assert {entry["metrics"]["accuracy"] for entry in summary["validation"]} == {0.25}
    assert fakes.calls.index("answer") < fakes.calls.index("step")
    assert "validate" not in fakes.calls
    at = [fakes.calls[:i].count("step") for i, call in enumerate(fakes.calls) if call == "answer"]
    assert at == [0, *between, 6]


def test_the_trainer_steps_and_publishes_while_answers_are_scored(tmp_path: Path) -> None:
    scoring = asyncio.Event()
    steps_meanwhile = 0

    async def hook(call: str, before: int) -> None:
        nonlocal steps_meanwhile
        if call == "assess" and before == 0:
            await scoring.wait()
        if call == "published" and not scoring.is_set():
            steps_meanwhile += 1
            if steps_meanwhile == 3:
                scoring.set()

    fakes, outcome, summary = run(tmp_path, hook, validate={"on": "train", "every": 1})
    assert isinstance(outcome, Outcome)
    assert steps_meanwhile == 3
    versions = [entry["step"] for entry in summary["validation"]]
    assert versions[0] == 0
    assert versions[-1] == 6
    assert len(versions) == len(set(versions)) < 7, "what was due meanwhile is not made up for"
    assert fakes.calls.count("assess") == len(versions), "one at a time"


def test_through_engines_publications_are_asked_for_after_it_and_steps_go_on(
    tmp_path: Path,
) -> None:
    answered = asyncio.Event()

    async def hook(call: str, before: int) -> None:
        if call == "validate" and before == 0:
            await answered.wait()
        if call == "step" and before == 3:
            answered.set()

    fakes, outcome, summary = run(tmp_path, hook, validate={"on": "dedicated", "every": 3})
    assert isinstance(outcome, Outcome)
    assert fakes.calls.index("validate") < fakes.calls.index("published")
    assert {entry["by"] for entry in summary["validation"]} == {"dedicated"}


@pytest.mark.parametrize(("call", "time"), [("answer", 0), ("assess", 0), ("assess", 1)])
def test_what_fails_ends_the_run_with_its_cause(tmp_path: Path, call: str, time: int) -> None:
    hook = failing(call, time, ConnectionError("the actor died"))
    _, outcome, _ = run(tmp_path, hook, validate={"on": "train"})
    assert isinstance(outcome, RunFailed)
    assert str(outcome).startswith("the actor died; ")
