"""The loop's ends: whoever fails or hangs first is named, with how far the run came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.test_rollouter import config_of

from offbeat import loop as module
from offbeat import roles
from offbeat.errors import RewardsDown, RoleDied, RunFailed, UserError
from offbeat.ledger import Counts, Flag
from offbeat.loop import AsyncLoop
from offbeat.outcome import Outcome
from offbeat.records import (
    Batch,
    Completion,
    GenerateRequest,
    Group,
    Manifest,
    PolicyVersion,
    Prompt,
    Span,
)
from offbeat.reward.anchors import AnchorReport
from offbeat.reward.loop import SourceStats
from offbeat.rollout.parts import Tally
from offbeat.track.recorder import Recorder
from offbeat.train.step import StepResult

Hook = Callable[[str, int], Awaitable[None]]


class Fakes:
    """Rollouter and trainer at once; `hook(call, how many times before)` may raise or hang."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.calls: list[str] = []
        self.booked = self.next = 0
        self.saved: list[str] = []

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        await asyncio.sleep(0)
        await self.hook(name, self.calls.count(name) - 1)

    async def batch(self, step: int) -> Batch:
        await self._call("batch")
        self.next = max(self.next, step + 1)
        prompt = Prompt(step, np.array([1], np.int32), "p", "p")
        return Batch(step, (Group(prompt, 0, step, ()),))

    async def trained(self, step: int, flags: Mapping[int, Flag]) -> Counts:
        await self._call("trained")
        self.booked = max(self.booked, step + 1)  # again: nothing happens
        return await self.counts()

    async def published(self, manifest: Manifest) -> int:
        await self._call("published")
        return manifest.version.step

    async def checkpointed(self, step: int) -> None:
        await self._call("checkpointed")

    async def validate(self) -> tuple[int, dict[str, float]]:
        await self._call("validate")
        return self.booked, {"accuracy": 0.5}

    async def held_out(self) -> list[GenerateRequest]:
        await self._call("held_out")
        return []

    async def assess(self, answers: Sequence[Completion]) -> dict[str, float]:
        await self._call("assess")
        return {"accuracy": 0.25}

    async def counts(self) -> Counts:
        n = self.booked
        return Counts(admitted=n, trained=n, no_signal=0, discarded={}, live=0)

    async def finish(self) -> Counts:
        await self._call("finish")
        return await self.counts()

    async def reward_stats(self) -> Mapping[str, SourceStats]:
        return {"judge": SourceStats(5, 1, {"timeout": 2})}

    async def notices(self) -> list[str]:
        return ["reward.judge is back"]

    async def looks(self, wait_seconds: float = 0.0) -> list[AnchorReport]:
        self.calls.append(f"looks {wait_seconds:g}")
        number = sum(call.startswith("looks") for call in self.calls)
        return [AnchorReport("judge", number, 2, 2, {}, 0.5, 0.1, 1.0, None, None, 0.1)]

    async def drain(self) -> tuple[list[Span], list[Any], Tally]:
        await self._call("drain")
        return [], [], Tally()

    async def stop(self) -> None: ...

    async def ping(self) -> None: ...

    async def next_step(self) -> int:
        await self._call("next_step")
        return self.next

    async def redo(self, version: int) -> None:
        await self._call(f"redo {version}")
        self.booked = version

    async def new_lineage(self) -> int:
        await self._call("new_lineage")
        return self.calls.count("new_lineage")

    async def copy_ledger(self, path: Path) -> None:
        await self._call("copy_ledger")

    async def restart(self, *where: Any) -> PolicyVersion:
        """Of the rollouter with two numbers, of the trainer with a checkpoint."""
        await self._call("restart " + " ".join(str(part) for part in where))
        return PolicyVersion(1, 0)

    async def step(self, batch: Batch) -> StepResult:
        await self._call("step")
        numbers = {n: 0.0 for n in StepResult.__dataclass_fields__} | {"step": batch.step}
        return StepResult(**numbers | {"applied": True, "no_signal": (), "staleness": ()})  # type: ignore[arg-type]

    async def publish(self) -> Manifest:
        await self._call("publish")
        return Manifest(PolicyVersion(0, self.booked), "full", "", {})

    async def answer(
        self, requests: Sequence[GenerateRequest]
    ) -> tuple[PolicyVersion, list[Completion]]:
        await self._call("answer")
        return PolicyVersion(0, self.calls.count("step")), []

    async def save(self, path: Path, extra: Mapping[str, Any], files: Mapping[str, Path]) -> None:
        await self._call("save")
        self.saved.append(path.name)

    async def drain_spans(self) -> list[Span]:
        await self._call("drain_spans")
        return []


def run(
    tmp_path: Path, hook: Hook, **train: Any
) -> tuple[Fakes, Outcome | Exception, dict[str, Any]]:
    """Six steps; what came of it, and the summary."""
    restarts, loops = train.pop("max_restarts", 0), train.pop("loops", [])
    how = {key: train.pop(key) for key in ("resumed", "saved") if key in train}
    limit = {"deadline_seconds": train.pop("validation", 30.0)} | train.pop("validate", {})
    config = config_of(tmp_path, checkpoint_every=4, **train)
    config = config.model_copy(
        update={
            "data": config.data.model_copy(update={"validation": Path("v")}),
            "validation": config.validation.model_copy(update=limit),
            "cluster": config.cluster.model_copy(update={"max_restarts": restarts}),
        }
    )
    config.run_dir.mkdir(parents=True)
    fakes = Fakes(hook)
    recorder = Recorder(
        config.run_dir, bound=2, total_steps=6, stream=None, replicas={}, started=time.time()
    )

    async def main() -> Outcome | Exception:
        async with asyncio.timeout(20):
            try:
                loops.append(AsyncLoop(config, fakes, fakes, recorder, 6, **how))
                return await loops[0].run()
            except (RunFailed, UserError) as error:
                return error

    outcome = asyncio.run(main())
    recorder.close("x")
    return fakes, outcome, json.loads((config.run_dir / "summary.json").read_text())


def failing(name: str, time: int, error: Exception) -> Hook:
    async def hook(call: str, before: int) -> None:
        if (call, before) == (name, time):
            raise error

    return hook


async def well(call: str, before: int) -> None: ...


def test_the_last_version_is_published_validated_and_saved(tmp_path: Path) -> None:
    fakes, outcome, summary = run(tmp_path, well)
    assert isinstance(outcome, Outcome)
    assert outcome.steps == 6
    assert [entry["step"] for entry in summary["validation"]] == [0, 6]
    assert fakes.calls.count("save") == 3  # 0, 4, 6
    assert fakes.calls.index("validate") < fakes.calls.index("published")
    last = len(fakes.calls) - fakes.calls[::-1].index("published")
    assert "validate" in fakes.calls[last:]


@pytest.mark.parametrize(
    ("call", "time", "steps"),
    [("step", 2, 2), ("batch", 3, 3), ("publish", 0, 1), ("published", 0, 1), ("save", 0, 0),
     ("save", 2, 6), ("validate", 0, None), ("validate", 1, 6), ("trained", 1, 2)],
)  # fmt: skip
def test_whatever_fails_ends_the_run_with_its_cause_and_the_steps(
    tmp_path: Path, call: str, time: int, steps: int | None
) -> None:
    _, outcome, summary = run(tmp_path, failing(call, time, ConnectionError("the actor died")))
    assert isinstance(outcome, RunFailed)
    assert str(outcome).startswith("the actor died; ")
    if steps is not None and not call.startswith("publish"):
        assert str(outcome).endswith(f"; {steps} steps are done")
    assert summary["groups"]["trained"] == summary["groups"]["admitted"]
    assert summary["rewards"]["judge"]["failed"] == {"timeout": 2}, "also of discarded groups"


def test_looks_at_anchors_are_recorded_those_that_the_last_step_made_due_too(
    tmp_path: Path,
) -> None:
    fakes, _, summary = run(tmp_path, well)
    looks = [call for call in fakes.calls if call.startswith("looks")]
    assert looks[-2:] == ["looks 30", "looks 0"]
    assert summary["anchors"]["judge"]["looks"] == len(looks)
    assert summary["anchors"]["judge"]["last"]["step"] == len(looks)
    failed, _, summary = run(tmp_path / "failed", failing("step", 2, RuntimeError("x")))
    assert [call for call in failed.calls if call.startswith("looks")][-1] == "looks 0"
    assert "judge" in summary["anchors"]


def test_steps_that_are_done_are_saved_when_the_rollouter_ends_the_run(tmp_path: Path) -> None:
    fakes, _, _ = run(tmp_path, failing("batch", 3, RewardsDown("reward.judge: nobody is there")))
    assert fakes.saved == ["step-000000", "step-000003"]
    fakes, _, _ = run(tmp_path / "b", failing("step", 3, ConnectionError("the trainer died")))
    assert fakes.saved == ["step-000000"], "whoever died is not asked again"


def test_what_the_rollouter_has_to_say_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NOTICE_SECONDS", 0.01)

    async def slow(call: str, before: int) -> None:
        await asyncio.sleep(0.02 if call == "batch" else 0)

    run(tmp_path, slow)
    events = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").open()]
    assert "reward.judge is back" in [e.get("message") for e in events]


@pytest.mark.parametrize(("call", "time"), [("validate", 0), ("validate", 1), ("publish", 0)])
def test_what_the_user_mends_stays_a_user_error(tmp_path: Path, call: str, time: int) -> None:
    _, outcome, _ = run(tmp_path, failing(call, time, UserError("no room on the disk")))
    assert isinstance(outcome, UserError)


@pytest.mark.parametrize("call", ["step", "publish", "save"])
def test_a_hung_trainer_is_named_at_its_deadline(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LAST_SECONDS", 0.2)

    async def hook(name: str, before: int) -> None:
        if name == call or (name == "drain_spans" and call == "step"):
            await asyncio.sleep(60)

    _, outcome, summary = run(tmp_path, hook, deadline_seconds=0.3)
    assert isinstance(outcome, RunFailed)
    assert "the trainer's" in str(outcome)
    assert "train.deadline_seconds" in str(outcome)
    assert "groups" in summary


@pytest.mark.parametrize("call", ["batch", "published", "validate", "trained", "drain"])
def test_a_hung_rollouter_is_named_at_its_deadline(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(roles, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(module, "LAST_SECONDS", 0.2)

    async def hook(name: str, before: int) -> None:
        if name == call:
            await asyncio.sleep(60)

    seconds: dict[str, Any] = {"batch_deadline_seconds": 0.1, "validation": 0.1}
    _, outcome, _ = run(tmp_path, hook, **seconds)
    assert isinstance(outcome, RunFailed)
    assert "the rollouter's" in str(outcome)


@pytest.mark.parametrize("call", ["step", "publish", "save"])
def test_a_trainer_that_died_is_started_again_and_redoes_what_is_recorded(
    tmp_path: Path, call: str
) -> None:
    """From version 0: no checkpoint of the fakes is on disk."""
    hook = failing(call, 2, RoleDied("trainer", "the trainer's process has ended"))
    fakes, outcome, _ = run(tmp_path, hook, max_restarts=1)
    assert isinstance(outcome, Outcome)
    assert outcome.steps == 6
    assert fakes.calls.count("restart 1 None") == 1
    again = fakes.calls.index("restart 1 None")
    assert fakes.calls[again - 1] == "new_lineage", "the lineage is durable before any weights are"
    assert fakes.calls[again + 1] == "redo 0"
    assert "published" not in fakes.calls[again : again + 8], "what is redone is not published"
    assert "restart 1 of 1" in (tmp_path / "r" / "metrics.jsonl").read_text()
    assert fakes.calls[again:].count("published") >= 1


def test_a_rollouter_that_died_is_started_again_beside_the_trainer_that_lives(
    tmp_path: Path,
) -> None:
    hook = failing("batch", 3, RoleDied("rollouter", "the rollouter's process has ended"))
    fakes, outcome, _ = run(tmp_path, hook, max_restarts=1)
    assert isinstance(outcome, Outcome)
    assert outcome.steps == 6
    again = fakes.calls.index("restart 0 3")
    told = fakes.calls[again + 1 : again + 5]
    assert told.count("trained") == 3, "it may not have committed any step since the checkpoint"
    assert "redo 0" not in fakes.calls
    assert fakes.calls.count("step") == 6


def test_the_budget_of_restarts_ends_the_run(tmp_path: Path) -> None:
    async def hook(call: str, before: int) -> None:
        if call == "step" and before >= 1:
            raise RoleDied("trainer", "the trainer's process has ended")

    fakes, outcome, _ = run(tmp_path, hook, max_restarts=2)
    assert isinstance(outcome, RunFailed)
    assert "cluster.max_restarts = 2 are used up" in str(outcome)
    assert sum(call.startswith("restart ") for call in fakes.calls) == 2


@pytest.mark.parametrize("call", ["batch", "step", "published"])
def test_a_loop_that_is_to_stop_ends_its_step_saves_and_says_so(tmp_path: Path, call: str) -> None:
    loops: list[AsyncLoop] = []

    async def hook(name: str, before: int) -> None:
        if (name, before) == (call, 2):
            loops[0].stopping.set()
            await asyncio.sleep(60 if name != "step" else 0.05)

    fakes, outcome, _ = run(tmp_path, hook, loops=loops)
    assert isinstance(outcome, Outcome)
    assert outcome.stopped
    assert outcome.steps == fakes.calls.count("step") < 6
    assert fakes.saved[-1] == f"step-{outcome.steps:06d}"


def test_a_step_whose_answer_was_lost_is_not_saved_as_the_one_before(tmp_path: Path) -> None:
    """The trainer may be a step further than it has told: a signal comes, then the rollouter dies,
    while it steps; no step follows that would tell."""
    loops: list[AsyncLoop] = []
    died: list[str] = []

    async def hook(name: str, before: int) -> None:
        if (name, before) == ("step", 2):
            loops[0].stopping.set()
            await asyncio.sleep(60)
        if name == "published" and before >= 1 and not died:
            await loops[0].stopping.wait()
            died.append(name)
            raise RoleDied("rollouter", "the rollouter's process has ended")

    fakes, outcome, _ = run(tmp_path, hook, loops=loops, max_restarts=1)
    assert died
    assert isinstance(outcome, Outcome)
    assert (outcome.stopped, outcome.steps) == (True, 2)
    assert fakes.saved == ["step-000000"], "the newest step is recorded, and redone by resume"


def test_a_heartbeat_says_nothing_of_how_the_work_goes() -> None:
    async def main() -> bool:
        asking = roles.Asking(60)
        work = asyncio.create_task(asking.trainer("step", asyncio.sleep(60)))
        await asyncio.sleep(0)
        await asking.ping(asyncio.sleep(0), 1)
        work.cancel()
        return asking.trainer_is_well

    assert not asyncio.run(main())


@pytest.mark.parametrize("before", [0, 1])
def test_a_validation_whose_rollouter_dies_is_made_up_for(tmp_path: Path, before: int) -> None:
    hook = failing("validate", before, RoleDied("rollouter", "the rollouter's process has ended"))
    _, outcome, summary = run(tmp_path, hook, max_restarts=1)
    assert isinstance(outcome, Outcome)
    steps = [entry["step"] for entry in summary["validation"]]
    assert len(steps) == 2
    assert steps[0] == 0 if before else steps[0] < 6, "at the next version that is published"
    assert steps[1] == 6


def test_a_run_that_goes_on_without_a_checkpoint_saves_what_it_began_with(tmp_path: Path) -> None:
    fakes, _, _ = run(tmp_path, well, resumed=True)
    assert fakes.saved == ["step-000000", "step-000004", "step-000006"]
    fakes, _, _ = run(tmp_path / "saved", well, resumed=True, saved=True)
    assert fakes.saved == ["step-000004", "step-000006"]
