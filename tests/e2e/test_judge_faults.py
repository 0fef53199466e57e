"""A run goes through its judge's faults and outage without a made-up number, and still learns.

The judge is a real server on loopback that grades by the truth. It is taken down at step 5 and
comes back 20 s later; meanwhile, before and after, it answers some calls with garbage and others
never. What the run says of itself is computed again here, from its samples and from what the
server knows that it dealt out.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from offbeat.advantage import group_advantages
from offbeat.config import Config
from offbeat.config_file import load_config
from offbeat.store import read_counts
from offbeat.testing import tiny
from offbeat.testing.judge_server import Fault, JudgeServer, Mix
from offbeat.track.metrics import read_metrics

Project = Callable[..., Path]
OUTAGE_SECONDS = 20.0
DEADLINE_SECONDS = 4.0
STEPS, GROUPS = 32, 8
SLACK_SECONDS = 2.0
MIX = Mix(seed=4, garbage=0.1, babble=0.1, hang=0.05)
CAUSES = {"garbage": "bad_response", "babble": "unparseable", "hang": "timeout"}

CORRECT = """
def correct(prompts, completions, reference, **columns):
    return [float(completion.isalpha()) for completion in completions]
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts, the exact checker and the judge's template. Right is what consists of letters: an
    untrained actor of characters finds that by chance, and learns it in seconds."""
    root = tmp_path_factory.mktemp("task")
    tiny.write_reverse_data(root / "train.jsonl", 400, 11, longest=3)
    tiny.write_reverse_data(root / "held_out.jsonl", 128, 12, longest=3)
    (root / "correct.py").write_text(CORRECT)
    (root / "judge.jinja").write_text("Q:{{ question }}\nA:{{ answer }}")
    return root


def is_right(answer: str) -> bool:
    return answer.isalpha()


def verdict(text: str) -> str:
    """The truth about a rendered template."""
    return "10" if is_right(text.partition("\nA:")[2]) else "1"


class Outage(threading.Thread):
    """Takes the server down once a step's record is there; `seconds` later it is back."""

    def __init__(self, server: JudgeServer, metrics: Path, step: int, seconds: float) -> None:
        super().__init__(name="outage", daemon=True)
        self.server, self.metrics, self.step, self.seconds = server, metrics, step, seconds
        self.down = self.up = math.inf
        self.over = threading.Event()

    def run(self) -> None:
        while not self._reached():
            if self.over.wait(0.05):
                return
        self.down = time.monotonic()
        self.server.stop()
        if not self.over.wait(min(self.seconds, threading.TIMEOUT_MAX)):
            self.up = time.monotonic()
            self.server.start()

    def _reached(self) -> bool:
        if not self.metrics.exists():
            return False
        return sum(r["type"] == "step" for r in read_metrics(self.metrics)) >= self.step

    def __enter__(self) -> Outage:
        self.start()
        return self

    def __exit__(self, *what: object) -> None:
        self.over.set()
        self.join(30)


def settings(task: Path, server: JudgeServer, **more: object) -> dict[str, object]:
    """Each sample is one call: no verdict is kept, shared or asked for twice."""
    return {
        "data__train": str(task / "train.jsonl"),
        "data__validation": str(task / "held_out.jsonl"),
        "validate__function": f"{task / 'correct.py'}:correct", "validate__rewards": False,
        "validate__temperature": 1.0,
        "rollout__group_size": 8, "rollout__seats": 64, "rollout__max_tokens": 4,
        "train__steps": STEPS, "train__groups_per_step": GROUPS, "train__learning_rate": 2e-3,
        "reward__judge__kind": "genrm", "reward__judge__base_url": server.base_url,
        "reward__judge__model": "judge", "reward__judge__template": str(task / "judge.jinja"),
        "reward__judge__deadline_seconds": DEADLINE_SECONDS, "reward__judge__retries": 0,
        "reward__judge__temperature": 1.0, "reward__judge__max_failed_share": 0.9,
    } | more  # fmt: skip


def offbeat_train(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offbeat", "train", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=570)


@dataclass
class Told:
    """What a run wrote about itself."""

    config: Config
    summary: dict[str, Any] = field(init=False)
    steps: list[dict[str, Any]] = field(init=False)
    events: str = field(init=False)
    samples: list[list[dict[str, Any]]] = field(init=False)  # rows by step

    def __post_init__(self) -> None:
        folder = self.config.run_dir
        self.summary = json.loads((folder / "summary.json").read_text())
        records = list(read_metrics(folder / "metrics.jsonl"))
        self.steps = [record for record in records if record["type"] == "step"]
        self.events = "\n".join(r["message"] for r in records if r["type"] == "event")
        files = sorted((folder / "samples").glob("step-*.parquet"))
        self.samples = [pq.read_table(file).to_pylist() for file in files]

    @property
    def judge(self) -> dict[str, Any]:
        found: dict[str, Any] = self.summary["rewards"]["judge"]
        return found


def mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def check_every_number(told: Told) -> None:
    """Every mean, total and advantage follows from the verdicts that were read, and from no other;
    each of those is the truth about its sample."""
    assert len(told.samples) == len(told.steps) == told.summary["steps"]
    for record, rows in zip(told.steps, told.samples, strict=True):
        for row in rows:
            scored = row["status_judge"] == "scored"
            assert row["status_judge"] in {"scored", "failed"}
            assert (row["value_judge"] is not None) == (row["total"] is not None) == scored
            assert (row["cause_judge"] is None) == scored
            if scored:
                truth = float(is_right(row["completion"]))
                assert row["value_judge"] == row["total"] == truth
        values = [row["value_judge"] for row in rows if row["value_judge"] is not None]
        assert record["reward"]["judge"] == pytest.approx(mean(values))
        assert record["reward"]["total"] == pytest.approx(mean(values))
        failed = Counter(row["cause_judge"] for row in rows if row["cause_judge"] is not None)
        assert record["scored"]["judge"] == {
            "scored": len(values), "abstained": 0, "failed": dict(failed),
        }  # fmt: skip
        # What the trainer made advantages of, and trained on.
        groups: dict[int, list[float | None]] = {}
        for row in rows:
            groups.setdefault(row["ordinal"], []).append(row["total"])
        found = [group_advantages(totals, algorithm="grpo") for totals in groups.values()]
        assert record["no_signal"] == sum(not one.signal for one in found)
        assert record["tokens"] == sum(row["tokens"] for row in rows if row["total"] is not None)
        assert sum(record["staleness"]["histogram"].values()) == len(values)
    tenth = max(1, len(told.steps) // 10)
    for name, part in (("mean_first", told.samples[:tenth]), ("mean_last", told.samples[-tenth:])):
        values = [row["value_judge"] for rows in part for row in rows]
        expected = mean([value for value in values if value is not None])
        assert told.judge[name] == pytest.approx(expected)


def check_every_failure(told: Told, server: JudgeServer, outage: Outage) -> None:
    """The summary's failures are those that the server dealt out, by cause.

    A call that hung may have been asked again instead: where the server went down, or where so
    many hung on end that it seemed to be. Then it is a retry. Of calls that were about to time out
    and of answers on their way when it went down, it is not known.
    """
    sure: Counter[str] = Counter()
    doubtful: Counter[str] = Counter()
    for number, call in enumerate(server.calls):
        what = kind_of(MIX.fault(number))
        patience = DEADLINE_SECONDS if what == "hang" else 0.0
        if call.at < outage.down - patience - SLACK_SECONDS or call.at > outage.up:
            sure[what] += 1
        elif call.at < outage.down - patience + SLACK_SECONDS:
            doubtful[what] += 1
    failed = told.judge["failed"]
    assert set(failed) == set(CAUSES.values())
    for what, cause in CAUSES.items():
        again = told.judge["retries"] if what == "hang" else 0
        assert failed[cause] <= sure[what] + doubtful[what], (what, sure, doubtful)
        assert failed[cause] >= sure[what] - again, (what, sure, doubtful)
    assert sure["answer"] <= told.judge["scored"] <= sure["answer"] + doubtful["answer"]
    assert told.judge["abstained"] == 0
    counts = told.summary["groups"]
    assert counts["live"] == 0
    assert told.judge["scored"] + sum(failed.values()) == 8 * counts["admitted"]


def kind_of(fault: Fault) -> str:
    if fault.hang:
        return "hang"
    return "garbage" if fault.body is not None else "babble" if fault.reply else "answer"


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with JudgeServer(verdict, mix=MIX) as server:
        yield server


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_goes_through_garbage_hangs_and_an_outage_and_learns(
    project: Project, task: Path, server: JudgeServer
) -> None:
    path = project((), **settings(task, server))
    config = load_config(path, [])
    with Outage(server, config.run_dir / "metrics.jsonl", 5, OUTAGE_SECONDS) as outage:
        done = offbeat_train(path)
    assert done.returncode == 0, done.stderr
    assert outage.up - outage.down >= OUTAGE_SECONDS
    told = Told(config)
    assert (told.summary["status"], told.summary["steps"]) == ("finished", STEPS)
    assert told.summary["groups"]["trained"] == STEPS * GROUPS
    assert read_counts(config.run_dir / "ledger.sqlite") == told.summary["groups"]
    check_every_number(told)
    check_every_failure(told, server, outage)
    assert f"reward.judge: nobody is there to score at {server.base_url}" in told.events
    back = re.search(r"reward.judge is back after (\d+) s", told.events)
    assert back is not None
    assert int(back.group(1)) >= OUTAGE_SECONDS - SLACK_SECONDS
    before, after = (entry["metrics"]["accuracy"] for entry in told.summary["validation"])
    assert after - before >= 0.15, (before, after)
    assert told.judge["mean_last"] > told.judge["mean_first"]


def test_past_its_patience_the_run_ends_with_all_its_steps_saved(
    project: Project, models: Path, task: Path, server: JudgeServer
) -> None:
    path = project((), **settings(task, server, reward__judge__patience_seconds=4))
    config = load_config(path, [])
    with Outage(server, config.run_dir / "metrics.jsonl", 5, math.inf) as outage:
        done = offbeat_train(path)
    assert outage.down < math.inf
    assert done.returncode not in {0, None}
    told = Told(config)
    steps = told.summary["steps"]
    assert told.summary["status"] == "failed"
    assert 5 <= steps < STEPS
    for text in (done.stderr, told.summary["error"]):
        assert f"reward.judge: nobody is there to score at {server.base_url}" in text
        assert "reward.judge.patience_seconds = 4" in text
        assert f"{steps} steps are done" in text
    assert "Traceback" not in done.stderr
    check_every_number(told)
    assert "unavailable" not in told.judge["failed"], "the outage is no sample's failure"
    saved = config.run_dir / "checkpoints" / f"step-{steps:06d}"
    trained = AutoModelForCausalLM.from_pretrained(saved).state_dict()
    begun = AutoModelForCausalLM.from_pretrained(models / "actor").state_dict()
    assert any(not torch.equal(trained[name], begun[name]) for name in begun)
