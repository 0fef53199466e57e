"""samples/step-000012.parquet: every sample that a step trained on, with its rewards, to read.

Written from a thread, each file by an atomic rename; errors never raise into training.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from offbeat.records import Batch, Group, Reward, Sample
from offbeat.texts import writable
from offbeat.track.metrics import TelemetryThread

QUEUED_STEPS = 16
FIXED_COLUMNS: Mapping[str, Any] = {
    "ordinal": pa.int64(),
    "attempt": pa.int32(),
    "index": pa.int32(),
    "prompt": pa.string(),
    "completion": pa.string(),
    "total": pa.float64(),
    "version_min": pa.int32(),
    "version_max": pa.int32(),
    "staleness": pa.int32(),
    "tokens": pa.int32(),
    "finish_reason": pa.string(),
}
Columns = dict[str, list[Any]]


class SampleWriter:
    """Writes one parquet file a step under `<run_dir>/samples`. Its methods never raise.

    For each reward source there are the columns `value_<source>` (null unless scored),
    `status_<source>` (scored, abstained, failed; null if it did not see the sample),
    `cause_<source>` (of a failure), `raw_<source>` (a judge's words, a scorer's logit) and
    `spread_<source>` (deviation of several votes). The calls of judges are in `transcripts/`.
    `staleness` is the step minus `version_min`, in steps.
    """

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "samples"
        self._thread: TelemetryThread[tuple[int, Columns]] = TelemetryThread(
            "samples", self._write_all, QUEUED_STEPS
        )

    @property
    def lost(self) -> int:
        """Steps whose file was not written."""
        return self._thread.boundary.errors + self._thread.dropped

    def write(self, batch: Batch) -> None:
        """Queue the samples of one step; keeps no reference to their token arrays."""
        with self._thread.boundary:
            self._thread.submit((batch.step, sample_columns(batch)))

    def close(self) -> None:
        """Write what is queued, within 10 seconds."""
        self._thread.close()

    def _write_all(self, items: list[tuple[int, Columns]]) -> None:
        for step, columns in items:
            with self._thread.boundary:
                self._write(step, columns)

    def _write(self, step: int, columns: Columns) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = sample_path(self.folder.parent, step)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            pq.write_table(pa.table(columns, schema=_schema(columns)), temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def sample_path(run_dir: Path, step: int) -> Path:
    """Where the samples of a step lie."""
    return run_dir / "samples" / f"step-{step:06d}.parquet"


def sample_columns(batch: Batch) -> Columns:
    """A batch as columns of plain values, one row a sample."""
    pairs = [(group, sample) for group in batch.groups for sample in group.samples]
    rows = [_fixed(batch.step, group, sample) for group, sample in pairs]
    columns: Columns = {name: [row[name] for row in rows] for name in FIXED_COLUMNS}
    for source in sorted({name for _, sample in pairs for name in sample.rewards}):
        rewards: list[Reward | None] = [sample.rewards.get(source) for _, sample in pairs]
        columns[f"value_{source}"] = [r and r.value for r in rewards]
        columns[f"status_{source}"] = [r and r.status for r in rewards]
        columns[f"cause_{source}"] = [r and r.cause for r in rewards]
        columns[f"raw_{source}"] = [r and writable(r.raw) for r in rewards]
        columns[f"spread_{source}"] = [r and r.spread for r in rewards]
    return columns


def _fixed(step: int, group: Group, sample: Sample) -> dict[str, Any]:
    completion = sample.completion
    return {
        "ordinal": group.prompt.ordinal,
        "attempt": group.attempt,
        "index": completion.index,
        "prompt": writable(group.prompt.text),
        "completion": writable(completion.text),
        "total": sample.total,
        "version_min": completion.version_min,
        "version_max": completion.version_max,
        "staleness": step - completion.version_min,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
    }


def _schema(columns: Columns) -> Any:
    fields = []
    for name in columns:
        kind = pa.float64() if name.startswith(("value_", "spread_")) else pa.string()
        fields.append((name, FIXED_COLUMNS.get(name, kind)))
    return pa.schema(fields)
