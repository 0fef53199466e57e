"""Checkpoints: nothing that a crash or a disk can do to one is ever loaded."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_cases import make_model, make_trainer, record_steps, to_batch

from offbeat.errors import OffbeatError
from offbeat.train import checkpoint
from offbeat.train.checkpoint import TrainerState, checkpoint_name, newest_valid, read, write

STATE = TrainerState(2, 5, 4, 0, 1, {"counts": {"trained": 10}, "note": "ok"})


def save(folder: Path, step: int) -> Path:
    """A checkpoint with small files of every kind."""
    state = TrainerState(0, step, step, 0, 0, {"counts": {"trained": 2 * step}})

    def fill(into: Path) -> None:
        (into / "model.safetensors").write_bytes(bytes(range(40)) * (step + 1))
        (into / "config.json").write_text('{"model": 1}')
        (into / checkpoint.OPTIMIZER).write_bytes(b"optimizer" * 3)
        (into / checkpoint.LEDGER_COPY).write_bytes(b"ledger")

    path = folder / checkpoint_name(step)
    write(path, state, fill)
    return path


def test_state_comes_back(tmp_path):
    path = tmp_path / "step-000005"
    write(path, STATE, lambda folder: None)
    assert read(path) == STATE


def test_cut_off_at_any_byte_of_any_file_the_previous_one_is_loaded(tmp_path):
    previous, newest = save(tmp_path, 1), save(tmp_path, 2)
    files = [path for path in newest.rglob("*") if path.is_file()]
    assert len(files) == 5
    for path in files:
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            assert newest_valid(tmp_path) == previous, (path.name, size)
        path.unlink()
        assert newest_valid(tmp_path) == previous
        path.write_bytes(whole)
        assert newest_valid(tmp_path) == newest


def test_every_flipped_bit_is_found(tmp_path):
    newest = save(tmp_path, 2)
    for path in [path for path in newest.rglob("*") if path.is_file()]:
        whole = path.read_bytes()
        for place in range(len(whole)):
            bit = 1 << place % 8
            path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            with pytest.raises(OffbeatError, match=r"damaged|format"):
                read(newest)
        path.write_bytes(whole)
    assert read(newest).step == 2


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_other_state_passes_for_it(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "rewritten" / "step-000005"
    if not path.exists():
        write(path, STATE, lambda folder: None)
        path.with_name("kept").write_bytes((path / checkpoint.STATE).read_bytes())
    whole = path.with_name("kept").read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    other = data.draw(
        st.binary(min_size=1, max_size=2).filter(lambda b: b != whole[place:][: len(b)])
    )
    (path / checkpoint.STATE).write_bytes(whole[:place] + other + whole[place + len(other) :])
    with pytest.raises(OffbeatError):
        read(path)


def test_a_damaged_one_that_is_passed_over_is_told_once(tmp_path, caplog):
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    (newest / checkpoint.OPTIMIZER).write_bytes(b"o" * 27)
    with caplog.at_level(logging.WARNING):
        assert newest_valid(tmp_path) == tmp_path / checkpoint_name(1)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "step-000002" in line
    assert "trainer/optimizer.pt is not what was written" in line


def test_newest_first_and_every_nth_stay(tmp_path):
    for step in (0, *range(3, 13)):
        save(tmp_path, step)
    gone = checkpoint.prune(tmp_path, 12, 2, 5)
    left = [checkpoint.version_of(path) for path in checkpoint.all_checkpoints(tmp_path)]
    assert left == [0, 5, 10, 11, 12]
    assert [checkpoint.version_of(path) for path in gone] == [3, 4, 6, 7, 8, 9]
    assert len(list(tmp_path.iterdir())) == 5


def test_a_damaged_one_that_was_passed_over_takes_nobodys_place(tmp_path):
    for step in (0, 5, 10):
        save(tmp_path, step)
    (tmp_path / "step-000010" / checkpoint.OPTIMIZER).unlink()
    assert checkpoint.newest_valid(tmp_path) == tmp_path / "step-000005"
    save(tmp_path, 6)
    assert checkpoint.prune(tmp_path, 6, 1) == [tmp_path / "step-000005"]
    assert checkpoint.newest_valid(tmp_path) == tmp_path / "step-000006"
    save(tmp_path, 7)
    assert checkpoint.prune(tmp_path, 7, 2) == []
    assert checkpoint.newest_valid(tmp_path) == tmp_path / "step-000007"


def test_what_was_being_replaced_comes_back(tmp_path):
    """Killed between the two renames of a checkpoint that replaces one of its name."""
    path = save(tmp_path, 3)
    aside = tmp_path / ".step-000003-old-x"
    aside.mkdir()
    path.rename(aside / path.name)
    assert newest_valid(tmp_path) == path
    save(tmp_path, 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003", "step-000004"]


CHILD = """
import os, shutil, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from trainer_cases import make_trainer, record_steps, to_batch
from offbeat import faults
from offbeat.train.checkpoint import checkpoint_name

folder = Path(sys.argv[3])
steps = record_steps(3, groups=2, size=3)
trainer = make_trainer(Path(sys.argv[2]), keep_checkpoints=1, max_staleness=0)
trainer.setup()
for step in range(2):
    trainer.step(*to_batch(step, steps[step]))
    trainer.save(folder / "kept" / checkpoint_name(step + 1), {"n": step})
trainer.step(*to_batch(2, steps[2]))
for kill_at in sys.argv[4:]:
    mine = folder / kill_at
    shutil.copytree(folder / "kept", mine)
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        continue

    def die(name, path=None):
        if name == kill_at:
            (folder / f"{kill_at}.fired").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    faults.install(die, None)
    trainer.save(mine / checkpoint_name(3), {"n": 2})
    os._exit(3)
"""
POINTS = ("begin", "model", "optimizer", "before_rename", "renamed", "pruned")


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """A folder for each point, left by a process that was killed there at its third checkpoint."""
    root = tmp_path_factory.mktemp("killed")
    model = make_model(root / "model")
    here = str(Path(__file__).parent)
    names = [f"checkpoint.{point}" for point in POINTS]
    command = [sys.executable, "-c", CHILD, here, str(model), str(root), *names]
    assert subprocess.run(command, timeout=240).returncode == 0
    return root


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point_a_whole_checkpoint_is_there(killed, point):
    assert (killed / f"checkpoint.{point}.fired").exists()
    folder = killed / f"checkpoint.{point}"
    expected = 3 if point in ("renamed", "pruned") else 2
    path = newest_valid(folder)
    assert path == folder / checkpoint_name(expected)
    assert (folder / checkpoint_name(3)).exists() == (expected == 3), "a name is whole or absent"
    trainer = make_trainer(killed / "model", keep_checkpoints=1, max_staleness=0, lineage=1)
    assert trainer.setup(path).step == expected
    steps = record_steps(4, groups=2, size=3)
    for step in range(expected, 4):
        trainer.step(*to_batch(step, steps[step]))
    trainer.save(folder / checkpoint_name(4), {})  # and what was left half done is swept away
    trainer.close()
    assert sorted(p.name for p in folder.iterdir()) == ["step-000001", "step-000004"]


def test_a_full_disk_leaves_the_previous_one_and_nothing_else(tmp_path):
    previous = save(tmp_path, 1)

    def fill(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write(tmp_path / checkpoint_name(2), STATE, fill)
    assert newest_valid(tmp_path) == previous
    assert list(tmp_path.iterdir()) == [previous]


def test_the_state_is_plain_json(tmp_path):
    record = json.loads((save(tmp_path, 2) / checkpoint.STATE).read_text())
    assert record["step"] == 2
    assert set(record["files"]) == {
        "config.json", "model.safetensors", checkpoint.OPTIMIZER, checkpoint.LEDGER_COPY,
    }  # fmt: skip
