"""samples/step-*.parquet: one row a sample, nulls where there is no value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from offbeat.records import Batch, Completion, Group, Prompt, Reward, Sample
from offbeat.track.samples import SampleWriter, sample_path


def batch(step: int, total: float | None = 1.5) -> Batch:
    prompt = Prompt(41, np.array([1, 2], np.int32), "2 + 2 =", "2 + 2 =")
    samples = (
        Sample(
            Completion("r", 0, " 4 é", 3, step - 2, step - 1, "stop", object()),
            {"judge": Reward.scored("judge", 0.5), "correct": Reward.scored("correct", 0.0)},
            total,
        ),
        Sample(
            Completion("r", 1, " 5", 2, step, step, "length", object()),
            {"judge": Reward.failed("judge", "timeout"), "correct": Reward.abstained("correct")},
            None,
        ),
        Sample(Completion("r", 2, "", 1, step, step, "aborted", object()), {}, None),
    )
    return Batch(step, (Group(prompt, 2, step, samples),))


def test_a_step_becomes_a_file(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path)
    writer.write(batch(12))
    writer.close()
    path = tmp_path / "samples" / "step-000012.parquet"
    assert path == sample_path(tmp_path, 12)
    table = pq.read_table(path).to_pydict()
    assert list(table) == [
        "ordinal", "attempt", "index", "prompt", "completion", "total", "version_min",
        "version_max", "staleness", "tokens", "finish_reason", "value_correct", "status_correct",
        "cause_correct", "raw_correct", "spread_correct", "value_judge", "status_judge",
        "cause_judge", "raw_judge", "spread_judge",
    ]  # fmt: skip
    assert table["ordinal"] == [41, 41, 41]
    assert table["total"] == [1.5, None, None]
    assert table["value_correct"] == [0.0, None, None]
    assert table["value_judge"] == [0.5, None, None]
    assert table["status_judge"] == ["scored", "failed", None]
    assert table["cause_judge"] == [None, "timeout", None]
    assert table["status_correct"] == ["scored", "abstained", None]
    assert table["staleness"] == [2, 0, 0]
    assert table["completion"][0] == " 4 é"
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_half_a_character_from_a_judge_or_a_prompt_costs_no_file(tmp_path: Path) -> None:
    prompt = Prompt(0, np.array([1], np.int32), "p\ud83d", "p")
    judged = {"judge": Reward.scored("judge", 0.5, raw="8 \ud83d>")}
    sample = Sample(Completion("r", 0, "\udc00é", 1, 0, 0, "stop", object()), judged, 0.5)
    writer = SampleWriter(tmp_path)
    writer.write(Batch(1, (Group(prompt, 0, 1, (sample,)),)))
    writer.close()
    assert writer.lost == 0
    (row,) = pq.read_table(sample_path(tmp_path, 1)).to_pylist()
    assert (row["prompt"], row["completion"], row["raw_judge"]) == ("p?", "?é", "8 ?>")


def test_types_do_not_depend_on_the_values(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path)
    writer.write(batch(3))
    writer.write(batch(4, total=None))
    writer.write(Batch(5, ()))
    writer.close()
    one, other = (pq.read_schema(sample_path(tmp_path, step)) for step in (3, 4))
    assert one == other
    assert pq.read_table(sample_path(tmp_path, 5)).num_rows == 0


def test_a_redone_step_replaces_its_file(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path)
    writer.write(batch(3, total=1.0))
    writer.write(batch(3, total=2.0))
    writer.close()
    assert pq.read_table(sample_path(tmp_path, 3))["total"][0].as_py() == 2.0


def test_errors_never_raise(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("in the way")
    writer = SampleWriter(tmp_path)
    writer.write(batch(3))
    writer.write(None)  # type: ignore[arg-type]
    writer.close()
    writer.write(batch(4))
    assert writer.lost == 3
