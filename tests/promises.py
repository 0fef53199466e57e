"""What a run promises, read from what it left on disk alone: for runs that were killed and resumed.

`check_promises(run_dir)` raises `AssertionError` with the promise that is broken;
`equal_to_replay(run_dir)` trains the recorded batches again, from the model on, and compares the
weights of every checkpoint bit by bit (with `train.keep_batches`).
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from offbeat.config import Config
from offbeat.config_file import load_config
from offbeat.data import planned_steps
from offbeat.errors import OffbeatError
from offbeat.ledger import Row
from offbeat.rates import META_KEY, unpack_rates
from offbeat.recorded import unpack_group, unpack_tokens
from offbeat.records import Batch, Group, Payload, Prompt
from offbeat.store import read_counts, read_meta, read_payloads, read_rows
from offbeat.track.metrics import read_metrics
from offbeat.train import checkpoint
from offbeat.train.trainer import Trainer

LIVE = ("admitted", "generated", "scored", "ready", "batched")


def check_promises(run_dir: Path, *, finished: bool = True, secrets: Sequence[str] = ()) -> None:
    """Promises 1-5, 9 and 10 as far as the disk tells; `finished`: the run came to its end."""
    config = config_of(run_dir)
    rows = read_rows(config.ledger_path)
    check_ledger(config, rows)
    check_staleness(config, rows)
    check_metrics(config, rows)
    check_samples(config, rows)
    check_checkpoints(config, rows)
    if finished:
        check_end(config, rows)
    check_secrets(run_dir, secrets)


def config_of(run_dir: Path) -> Config:
    """The resolved configuration that the run wrote."""
    return load_config(run_dir / "config.json", [], files=False)


def check_ledger(config: Config, rows: Sequence[Row]) -> None:
    """Promises 1 and 2: every admitted ordinal is in one state, and the sums are right."""
    ordinals = [row.ordinal for row in rows]
    assert ordinals == list(range(len(rows))), f"promise 1: ordinals have gaps: {ordinals}"
    for row in rows:
        booked = row.state in ("batched", "trained")
        assert (row.step is not None) == booked, f"promise 1: {row}"
        assert row.state != "discarded" or row.reason, f"promise 1: discarded without name: {row}"
        assert row.state in (*LIVE, "trained", "discarded"), f"promise 1: {row}"
    counts = read_counts(config.ledger_path)
    lost = sum(counts["discarded"].values())
    total = counts["trained"] + lost + counts["live"]
    assert counts["admitted"] == len(rows) == total, f"promise 2: {counts}"
    for step, groups in batches_of(rows).items():
        states = {row.state for row in groups}
        assert len(states) == 1, f"promise 1: step {step} is half trained: {groups}"
        assert len(groups) <= config.train.groups_per_step, f"step {step} has {len(groups)} groups"
    steps = sorted(batches_of(rows))
    assert steps == list(range(len(steps))), f"promise 1: steps have gaps: {steps}"
    short = [s for s in steps[:-1] if len(batches_of(rows)[s]) < config.train.groups_per_step]
    assert not short, f"steps {short} have fewer groups than train.groups_per_step"


def check_staleness(config: Config, rows: Sequence[Row]) -> None:
    """Promise 3, from the deadline of every group and from the tokens that are kept; promise 4:
    no engine generated below the floor that the group was admitted (or tried again) at."""
    bound = config.train.max_staleness
    kept = read_payloads(config.ledger_path, [row.ordinal for row in rows])
    for row in rows:
        if row.step is not None:
            assert row.step <= row.deadline <= row.step + bound, f"promise 3: {row}"
        if (payload := kept.get(row.ordinal)) is None or payload.attempt != row.attempt:
            continue
        for completion in unpack_tokens(payload.tokens).completions:
            versions = completion.ref.versions
            assert versions.min() == completion.version_min, f"{row}: {completion}"
            floor = row.deadline - bound
            assert versions.min() >= floor, f"promise 4: below the floor {floor}: {row}"
            if row.step is not None:
                stale = row.step - int(versions.min())
                assert 0 <= stale <= bound, f"promise 3: staleness {stale}: {row}"
                assert versions.max() <= row.step, f"promise 3: tokens of the future: {row}"


def check_metrics(config: Config, rows: Sequence[Row]) -> None:
    """Promises 2 to 4 from what was told while it ran, by every start of the run."""
    path = config.run_dir / "metrics.jsonl"
    if not path.exists():
        return
    bound = config.train.max_staleness
    seen: dict[int, Any] = {}
    syncs: list[tuple[float, float, tuple[int, int]]] = []
    for record in read_metrics(path):
        if record["type"] == "step":
            told = record["staleness"]
            assert told["max"] is None or 0 <= told["max"] <= bound, f"promise 3: {record}"
            counts = record["groups_counts"]
            total = counts["trained"] + sum(counts["discarded"].values()) + counts["live"]
            assert counts["admitted"] == total, f"promise 2: {counts}"
            before = seen.setdefault(record["step"], told["histogram"])
            assert before == told["histogram"], f"promise 6: step {record['step']} was redone anew"
        elif record["type"] == "sync" and record["acknowledged"]:
            version = record["lineage"], record["version"]
            syncs.append((record["start"], record["end"], version))
    for (_, end, one), (start, _, other) in pairwise(sorted(syncs)):
        assert one <= other, f"promise 4: version {other} came after {one}"
        assert one == other or end <= start, f"promise 4: {one} and {other} in flight at once"
    assert set(seen) <= set(batches_of(rows)), "a step was told that the ledger does not know"


def check_samples(config: Config, rows: Sequence[Row]) -> None:
    """Promise 1 and 3 in the tables of samples, which are telemetry: one may lack, none may lie."""
    batches = batches_of(rows)
    for path in sorted((config.run_dir / "samples").glob("step-*.parquet")):
        step = int(path.stem.partition("-")[2])
        table = pq.read_table(path, columns=["ordinal", "attempt", "staleness"]).to_pydict()
        booked = {row.ordinal: row.attempt for row in batches.get(step, ())}
        seen = dict(zip(table["ordinal"], table["attempt"], strict=True))
        assert seen == booked, f"promise 1: {path.name} has {seen}, the ledger {booked}"
        bound = config.train.max_staleness
        assert all(0 <= s <= bound for s in table["staleness"]), f"promise 3: {path.name}"


def check_checkpoints(config: Config, rows: Sequence[Row]) -> None:
    """Promise 5: the newest one loads; its books agree with its weights, and lineages rise."""
    folder = config.run_dir / "checkpoints"
    newest = checkpoint.newest_valid(folder)
    if newest is None:
        return
    model = AutoModelForCausalLM.from_pretrained(newest)
    assert all(torch.isfinite(p).all() for p in model.parameters()), "promise 5: weights"
    lineages = []
    for path in whole_checkpoints(folder):
        state = checkpoint.read(path)
        lineages.append(state.lineage)
        assert state.step == checkpoint.version_of(path), f"promise 5: {path.name}: {state.step}"
        copy = path / checkpoint.LEDGER_COPY
        if not copy.exists():  # of a run that failed otherwise: without books
            continue
        counts = read_counts(copy)
        lost = sum(counts["discarded"].values())
        assert counts["admitted"] == counts["trained"] + lost + counts["live"], f"promise 5: {path}"
        for row in read_rows(copy):
            if row.step is not None and row.step < state.step:
                assert row.state == "trained", f"promise 5: {path.name}: {row}"
                assert rows[row.ordinal].step == row.step, f"promise 1: {row}, {rows[row.ordinal]}"
    assert lineages == sorted(lineages), f"promise 4: lineages of checkpoints: {lineages}"
    assert lineages[-1] <= int(read_meta(config.ledger_path)["lineage"]), "promise 4: a lineage"


def check_end(config: Config, rows: Sequence[Row]) -> None:
    """Promise 9: a run that says it is finished has done its steps, and nothing is live."""
    summary = json.loads((config.run_dir / "summary.json").read_text())
    assert summary["status"] == "finished", f"promise 9: {summary['status']}: {summary['error']}"
    live = [row for row in rows if row.state in LIVE]
    assert not live, f"promise 1: the run is finished, and these are live: {live}"
    steps = len(batches_of(rows))
    assert summary["steps"] == steps, f"promise 9: {summary['steps']} steps, the ledger has {steps}"
    newest = checkpoint.newest_valid(config.run_dir / "checkpoints")
    assert newest is not None, "promise 9: no checkpoint"
    assert checkpoint.version_of(newest) == steps, f"promise 9: {newest.name} after {steps} steps"


def check_secrets(run_dir: Path, secrets: Sequence[str]) -> None:
    """Promise 10, over every file of the run."""
    for path in run_dir.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            for secret in secrets:
                assert secret.encode() not in data, f"promise 10: a secret is in {path}"


@dataclass(frozen=True, slots=True)
class Kept:
    """What the ledger holds of a group: of its newest attempt."""

    attempt: int
    state: str
    tokens: bytes | None
    rewards: bytes | None


def kept_by(config: Config) -> dict[int, Kept]:
    """What a run that has ended, or was killed, has made durable; {} if it had no ledger yet."""
    try:
        rows = read_rows(config.ledger_path)
        payloads = read_payloads(config.ledger_path, [row.ordinal for row in rows])
    except sqlite3.OperationalError:  # killed before, or while, it was made
        return {}
    found = {}
    for row in rows:
        payload = payloads.get(row.ordinal)
        if payload is None or payload.attempt != row.attempt:
            found[row.ordinal] = Kept(row.attempt, row.state, None, None)
        else:
            found[row.ordinal] = Kept(row.attempt, row.state, payload.tokens, payload.rewards)
    return found


def check_nothing_again(before: Mapping[int, Kept], config: Config) -> None:
    """Promise 6: what had been generated, or judged, when the process died, is what is there now,
    as the same attempt. (A group may be discarded since, or final.)"""
    after = kept_by(config)
    for ordinal, old in before.items():
        new = after[ordinal]
        if new.state == "discarded":
            continue
        assert old.state != "discarded", f"promise 1: group {ordinal} was discarded before"
        for name, was, now in (
            ("generated", old.tokens, new.tokens),
            ("judged", old.rewards, new.rewards),
        ):
            if was is not None:
                assert old.attempt == new.attempt, f"promise 6: group {ordinal}: {name} again"
                assert now is None or was == now, f"promise 6: group {ordinal}: {name} anew"


def equal_to_replay(run_dir: Path) -> int:
    """Promise 6: the recorded batches, trained again from the model on by a trainer that was never
    interrupted, give the bits of every checkpoint that is left; returns how many were compared."""
    config = config_of(run_dir)
    checkpoints = {checkpoint.read(p).step: p for p in whole_checkpoints(run_dir / "checkpoints")}
    compared = 0
    with TemporaryDirectory() as folder:
        trainer = Trainer(
            config,
            total_steps=planned_steps(config, config.train.groups_per_step * 10**6),
            lineage=10**6,
            publish_folder=Path(folder),
            run_id="replay",
            rates=unpack_rates(read_meta(config.ledger_path).get(META_KEY, "[]")),
        )
        try:
            trainer.setup()
            for batch in [*recorded_batches(config), None]:
                if (path := checkpoints.get(trainer.version.step)) is not None:
                    same_weights(trainer, path)
                    compared += 1
                if batch is not None:
                    groups = batch.groups
                    trainer.step(batch, [[s.completion.ref for s in g.samples] for g in groups])
        finally:
            trainer.close()
    newest = max(checkpoints, default=0)
    assert newest == trainer.version.step, f"the newest checkpoint is of step {newest}"
    assert compared == len(checkpoints)
    return compared


def same_weights(trainer: Trainer, path: Path) -> None:
    """The trainer's weights and its optimizer's state are a checkpoint's, bit by bit."""
    saved = load_file(path / "model.safetensors")
    mine = dict(trainer.model.module.state_dict())
    for name, tensor in saved.items():
        assert torch.equal(mine[name], tensor), f"promise 6: {path.name}: {name} differs"
    record = torch.load(path / checkpoint.OPTIMIZER, map_location="cpu", weights_only=True)
    theirs = record["optimizer"]["state"]
    ours = trainer._optimizer_of().state_dict()["state"]
    assert theirs.keys() == ours.keys(), f"promise 6: {path.name}: the optimizer's state"
    for key, state in theirs.items():
        for name, value in state.items():
            same = torch.equal(torch.as_tensor(value), torch.as_tensor(ours[key][name]))
            assert same, f"promise 6: {path.name}: the optimizer's {name} of parameter {key}"


def recorded_batches(config: Config) -> Iterator[Batch]:
    """What the ledger has kept of every step, in order."""
    for step, rows in sorted(batches_of(read_rows(config.ledger_path)).items()):
        kept = read_payloads(config.ledger_path, [row.ordinal for row in rows])
        groups: list[Group] = []
        for row in rows:
            payload = kept[row.ordinal]
            assert payload.rewards is not None, f"the rewards of {row} are lost"
            assert payload.attempt == row.attempt, f"{row} has the payload of {payload.attempt}"
            ids = unpack_tokens(payload.tokens).prompt_ids
            prompt = Prompt(row.ordinal, ids, "", "")
            groups.append(
                unpack_group(prompt, row.attempt, row.deadline, payload.tokens, payload.rewards)
            )
        assert all(isinstance(s.completion.ref, Payload) for g in groups for s in g.samples)
        yield Batch(step, tuple(groups))


def batches_of(rows: Sequence[Row]) -> Mapping[int, list[Row]]:
    """The groups of every step that has its batch, in the order in which they are trained."""
    found: dict[int, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row.deadline, row.ordinal)):
        if row.step is not None:
            found[row.step].append(row)
    return found


def whole_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that are not damaged, oldest first."""
    found = []
    for path in checkpoint.all_checkpoints(folder):
        try:
            checkpoint.read(path)
        except OffbeatError:  # damaged: whoever expects it whole says so
            continue
        found.append(path)
    return found
