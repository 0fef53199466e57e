"""A full disk: telemetry is lost and training is the same; the ledger ends the run, which goes on
when there is room."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.starts import rows, summary_of
from tests.e2e.test_resume import check_books, check_samples

from offbeat.cli import main
from offbeat.cluster import launch
from offbeat.config import Config
from offbeat.config_file import load_config
from offbeat.testing.faults import Fault, inject
from offbeat.train.checkpoint import newest_valid

Project = Callable[..., Path]
FULL = Path("/dev/full")  # takes every byte with ENOSPC


def weights(config: Config) -> bytes:
    last = newest_valid(config.run_dir / "checkpoints")
    assert last is not None
    return (last / "model.safetensors").read_bytes()


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
def test_with_nowhere_to_write_telemetry_training_is_bit_for_bit_the_same(
    project: Project, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    well = load_config(project(train__max_staleness=0, rollout__seats=1, name="well"), [])
    assert launch.train(well, None) == 0

    config = load_config(project(train__max_staleness=0, rollout__seats=1, name="full"), [])
    record = launch.record_config

    def and_fill(config: Config, started: float) -> None:
        record(config, started)
        (config.run_dir / "logs").mkdir()
        for name in ("metrics.jsonl", "logs/driver.log", f".summary.json.{os.getpid()}"):
            (config.run_dir / name).symlink_to(FULL)
        (config.run_dir / "samples").write_text("no folder can be made here")

    monkeypatch.setattr(launch, "record_config", and_fill)
    console = io.StringIO()
    with caplog.at_level(logging.WARNING):
        assert launch.train(config, console) == 0
    assert weights(config) == weights(well)
    assert "finished: 4 steps" in console.getvalue()
    lost = [r.getMessage() for r in caplog.records if "telemetry is being lost" in r.getMessage()]
    for what in ("metrics.jsonl", "samples", "summary.json"):
        assert len([line for line in lost if line.startswith(f"{what}: ")]) == 1, "one line each"
    assert sum("No space left on device" in line for line in lost) == 2
    assert not (config.run_dir / "summary.json").exists()
    assert [(r.state, r.step) for r in rows(config.run_dir)] == [
        (r.state, r.step) for r in rows(well.run_dir)
    ]


def test_a_samples_folder_that_vanishes_and_a_reader_that_leaves_change_nothing(
    project: Project,
) -> None:
    config = load_config(project(train__steps=4), [])

    class Gone(io.StringIO):
        """A terminal that is closed after some lines; it takes the samples with it."""

        def write(self, text: str) -> int:
            for file in (config.run_dir / "samples").glob("*"):
                file.unlink()
            if (config.run_dir / "samples").is_dir():
                (config.run_dir / "samples").rmdir()
            raise BrokenPipeError

    assert launch.train(config, Gone()) == 0
    check_books(config.run_dir, 4, 2)


@pytest.mark.parametrize(
    "point",
    ["store.before_commit", "store.in_commit", "checkpoint.optimizer"],
)
def test_a_ledger_or_checkpoint_without_room_ends_the_run_which_goes_on_later(
    project: Project, point: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = project(train__steps=5, train__checkpoint_every=2)
    run_dir = load_config(path, []).run_dir
    nth = 2 if point.startswith("checkpoint") else 14
    with inject(Fault(point, "enospc", nth=nth, times=None)) as plan:
        assert main(["train", str(path)]) == 1
    plan.assert_fired()
    said = capsys.readouterr()
    assert "No space left on device" in said.err
    assert "Traceback" not in said.err
    assert f"go on with: offbeat resume {run_dir}" in said.out
    assert summary_of(run_dir)["status"] == "failed"
    assert main(["resume", str(run_dir)]) == 0
    check_books(run_dir, 5, 2)
    check_samples(run_dir, 2)
