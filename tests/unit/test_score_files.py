"""The parts of `offbeat score`: rows in, groups, progress, rows out, and the table."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import sqlite3
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat import cli_score_rows
from offbeat.cli_score import choose
from offbeat.cli_score_files import BATCH_ROWS, check_fits, fingerprint, part_of, stream, write
from offbeat.cli_score_progress import Progress, difference
from offbeat.cli_score_rows import Reading, items_of, outcome_of, result_of, rounded
from offbeat.cli_score_table import Tallies
from offbeat.config import Config
from offbeat.data import Row
from offbeat.errors import UserError
from offbeat.records import Reward
from offbeat.reward.loop import Scored
from offbeat.reward.stats import SourceStats

KINDS = {"reward": pa.float64(), "rewards": pa.struct({"a": pa.struct({"value": pa.float64()})})}


def config(**sources: dict[str, Any]) -> Config:
    plain = {"kind": "function", "function": "f.py:f"}
    rewards = {name: plain | more for name, more in (sources or {"a": {}}).items()}
    return Config.model_validate(
        {"run": "r", "model": {"path": "m"}, "data": {"train": "t"}, "reward": rewards}
    )


def reading(settings: Config | None = None, **more: Any) -> Reading:
    settings = settings or config()
    options = {"answer_column": "completion", "group_column": None, "into": "reward"} | more
    return Reading(settings, settings, Path("a.jsonl"), **options)


def rows(*columns: dict[str, Any]) -> list[Row]:
    plain = {"prompt": "p", "completion": "c"}
    return [Row(line, plain | of) for line, of in enumerate(columns, 1)]


# -- rows to items


def test_a_row_becomes_an_item_without_its_answer_among_the_columns() -> None:
    row = {"reference": 3, "completion_tokens": 7, "finish_reason": "length", "more": [1]}
    (entry,) = reading().entries(rows(row))
    (item,) = items_of([entry])
    assert (item.completion, item.tokens, item.finish_reason) == ("c", 7, "length")
    assert item.prompt.columns == {"reference": 3, "more": [1]}
    assert (item.prompt.text, item.prompt.reference) == ("p", "3")


@pytest.mark.parametrize(
    ("value", "tokens"), [(None, 0), (0, 0), (5, 5), (5.0, 5), (float("nan"), 0)]
)
def test_counts_of_tokens_as_files_have_them(value: object, tokens: int) -> None:
    (entry,) = reading().entries(rows({"completion_tokens": value}))
    assert entry.item is not None
    assert entry.item.tokens == tokens


@pytest.mark.parametrize("value", [-1, 1.5, True, "7", [1], float("inf")])
def test_what_is_no_count_is_refused(value: object) -> None:
    with pytest.raises(UserError, match=r"a.jsonl line 2: completion_tokens = .* a number of tok"):
        list(reading().entries(rows({}, {"completion_tokens": value})))


def test_a_prompt_is_not_in_a_column_of_the_answer() -> None:
    with pytest.raises(UserError, match="--answer-column prompt is the prompt's column"):
        reading(answer_column="prompt")
    plain = config()
    for column, says in (
        ("completion", "--answer-column comp"),
        ("finish_reason", "set it to the"),
    ):
        data = plain.data.model_copy(update={"prompt_column": column})
        with pytest.raises(UserError, match=says):
            reading(plain.model_copy(update={"data": data}))


def test_messages_that_hold_more_than_json_can() -> None:
    message = {"role": "user", "content": "p", "at": datetime(2026, 1, 1)}
    (entry,) = reading().entries(rows({"prompt": [message]}))
    assert entry.item is not None
    assert entry.item.prompt.text == "p"


def test_groups_only_where_something_depends_on_them() -> None:
    of = rows({}, {}, {"prompt": "q"}, {})
    assert [len(group) for group in reading().groups(of)] == [1, 1, 1, 1]
    veto = config(a={}, b={"role": "veto"})
    groups = list(reading(veto).groups(of))
    assert [[entry.place for entry in group] for group in groups] == [[0, 1], [2], [3]]
    items = items_of(groups[0])
    assert [item.index for item in items] == [0, 1]
    assert len({item.prompt.ordinal for item in items}) == 1


def test_groups_by_a_column_must_be_on_end_and_not_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by = reading(config(a={}, b={"role": "veto"}), group_column="of")
    groups = by.groups(rows({"of": 1}, {"of": 1, "prompt": "q"}, {"of": 2}))
    assert [len(group) for group in groups] == [2, 1]
    with pytest.raises(UserError, match="line 3 belongs to a group that ended before; sort"):
        list(by.groups(rows({"of": 1}, {"of": 2}, {"of": 1})))
    with pytest.raises(UserError, match="line 2 has no column 'of'; set --group-column to one"):
        list(by.groups(rows({"of": 1}, {})))
    monkeypatch.setattr(cli_score_rows, "LARGEST_GROUP", 3)
    with pytest.raises(UserError, match="lines 1 to 4 are more than 3 rows of one group"):
        list(by.groups(rows(*[{"of": 1}] * 4)))


def test_rows_that_choose_other_sources_are_no_group_and_may_be_left_out() -> None:
    whole = config(a={}, b={"role": "veto"}, c={})
    chosen = choose(whole, "b,c")
    of = Reading(whole, chosen, Path("a.jsonl"), "completion", None, "x")
    groups = list(of.groups(rows({"reward": ["c", "b"]}, {"reward": "c"}, {"reward": ["a"]}, {})))
    assert [len(group) for group in groups] == [1, 1, 1, 1]
    assert [items_of(group) == [] for group in groups] == [False, False, True, False]


def test_sources_that_add_nothing_do_so_when_they_are_tried_alone() -> None:
    whole = config(a={"weight": 2, "max_failed_share": 0.1}, b={"role": "veto"}, c={"weight": 0})
    both = choose(whole, "b,a").active_rewards
    assert {name: (s.role, s.weight) for name, s in both.items()} == {
        "a": ("add", 2.0), "b": ("veto", 1.0),
    }  # fmt: skip
    assert both["a"].max_failed_share == 1.0
    alone = choose(whole, "b, c").active_rewards
    assert {(s.role, s.weight) for s in alone.values()} == {("add", 1.0)}
    for names, says in (("d", "which is no reward source; there are a, b, c"), (",", "names none")):
        with pytest.raises(UserError, match=says):
            choose(whole, names)


# -- results


def test_an_outcome_is_rounded_named_and_without_times() -> None:
    logit = Reward.scored("a", 1.23456789, raw="1.23456789", spread=0.1234567)
    assert outcome_of(logit, exact=False) == {
        "value": 1.23457, "status": "scored", "cause": None, "reason": "", "raw": "1.23457",
        "spread": 0.123457,
    }  # fmt: skip
    words = Reward.scored("a", 0.5, raw="0.123456789")
    assert outcome_of(words, exact=True)["raw"] == "0.123456789"
    let_pass = Reward("a", "abstained", cause="timeout", reason="half \ud800")
    found = outcome_of(let_pass, exact=True)
    assert (found["status"], found["cause"], found["reason"]) == ("failed", "timeout", "half ?")


def test_results_name_all_chosen_sources() -> None:
    settings = config(a={}, b={})
    scored = Scored({"a": Reward.scored("a", 1.0)}, 1.0, "keep")
    result = result_of(scored, settings, "x")
    assert (result["x"], result["xs"]["b"]) == (1.0, None)
    assert result_of(None, settings, "x") == {"x": None, "xs": {"a": None, "b": None}}


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_rounding_is_stable(value: float) -> None:
    once = rounded(value)
    assert once is not None
    assert rounded(once) == once
    assert json.loads(json.dumps(once)) == once


# -- files


def results(count: int) -> Iterator[dict[str, Any]]:
    return ({"reward": float(i), "rewards": {"a": {"value": i / 2}}} for i in range(count))


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    source.write_text("".join(json.dumps({"x": i}) + "\n\n" for i in range(3)))

    def broken() -> Iterator[dict[str, Any]]:
        yield from results(2)
        raise UserError("no more")

    with pytest.raises(UserError):
        write(out, source, broken(), KINDS)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    write(out, source, results(3), KINDS)
    assert [row.columns["reward"] for row in stream(out)] == [0.0, 1.0, 2.0]


def test_a_folder_in_the_way_of_a_file(tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    source.write_text('{"x": 1}\n')
    part_of(out).mkdir()
    with pytest.raises(
        UserError, match=r"cannot be written: .* the same command writes it without"
    ):
        write(out, source, results(1), KINDS)


def test_a_file_that_is_gone_has_no_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a.jsonl cannot be read"):
        fingerprint(tmp_path / "a.jsonl")


def test_half_a_surrogate_pair_survives_jsonl(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"x": "\\ud83d", "y": "\u00e4"}\n{"x": "\u00e4"}\n', encoding="utf-8")
    write(tmp_path / "b.jsonl", source, results(2), KINDS)
    first, second = stream(tmp_path / "b.jsonl")
    assert (first.columns["x"], second.columns["x"]) == ("\ud83d", "\u00e4")
    with pytest.raises(UserError, match=r"do not fit into a parquet column \(x: .*write JSONL"):
        write(tmp_path / "b.parquet", source, results(2), KINDS)


def test_columns_that_come_late_and_widen_fit_into_parquet(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    count = 2 * BATCH_ROWS + 1
    late = [{"x": 1}] * BATCH_ROWS + [{"x": 0.5, "y": "z"}] * BATCH_ROWS + [{"x": None}]
    source.write_text("".join(json.dumps(row) + "\n" for row in late))
    write(tmp_path / "b.parquet", source, results(count), KINDS)
    table = pq.read_table(tmp_path / "b.parquet")
    assert table.column_names == ["x", "y", "reward", "rewards"]
    assert table.schema.field("x").type == pa.float64()
    assert table.column("y").to_pylist().count("z") == BATCH_ROWS
    assert pq.ParquetFile(tmp_path / "b.parquet").num_row_groups == 3


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ([{"x": 1}, {"x": "y"}], "lines 1 to 2 do not fit into a parquet column (x: "),
        ([{"x": 0}] * BATCH_ROWS + [{"x": {"y": 0}}], "lines 513 to 513 do not fit into a parquet"),
        ([{"x": 2**60 + 1}] * BATCH_ROWS + [{"x": 0.5}], "lines 1 to 512 do not fit into a parq"),
        ([{"x": {}}], "a.jsonl does not fit into a parquet file (Cannot write struct type 'x' "),
    ],
)
def test_what_no_parquet_file_holds_is_told_without_one(
    tmp_path: Path, columns: list[dict[str, Any]], says: str
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in columns))
    with pytest.raises(UserError, match=re.escape(says)) as told:
        check_fits(source, KINDS)
    assert str(told.value).endswith("; write JSONL instead, with -o NAME.jsonl")
    with pytest.raises(UserError, match=re.escape(says)):
        write(tmp_path / "b.parquet", source, results(len(columns)), KINDS)
    source.write_text('{"x": 1}\n')
    check_fits(source, KINDS)
    write(tmp_path / "c.parquet", source, results(1), KINDS)
    check_fits(tmp_path / "c.parquet", {"more": pa.float64()})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "c.parquet"]


def test_a_parquet_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not")
    with pytest.raises(UserError, match="cannot be read as parquet"):
        list(stream(tmp_path / "a.parquet"))


# -- progress


def test_progress_keeps_rows_and_forgets_failed_ones(tmp_path: Path) -> None:
    path = tmp_path / "out.progress"
    progress = Progress(path, {"a": 1})
    progress.put({2: (False, '{"r": 2}'), 0: (True, '{"r": 0}')})
    progress.leave()
    progress = Progress(path, {"a": 1})
    assert list(progress.done(3)) == [1, 0, 1]
    assert list(progress.results()) == [(0, {"r": 0}), (2, {"r": 2})]
    assert progress.forget_failed() == 1
    assert list(progress.done(3)) == [0, 0, 1]
    with pytest.raises(UserError, match="is in use: another offbeat score"):
        Progress(path, {"a": 1})
    progress.leave()
    with pytest.raises(UserError, match=r"scored with another a \(1, now 2\); put that back"):
        Progress(path, {"a": 2})
    Progress(path, {"a": 1}).remove()
    assert list(tmp_path.iterdir()) == []
    Progress(path, {"a": 2}).leave()
    assert list(tmp_path.iterdir()) == [], "nothing was in it"


@contextlib.contextmanager
def no_larger_files(size: int) -> Iterator[None]:
    """Files of this process grow no further than `size`, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_progress_on_a_full_disk_keeps_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "out.progress"
    progress = Progress(path, {"a": 1})
    progress.put({0: (True, '{"r": 0}')})
    more = {place: (False, json.dumps({"r": "x" * 5000})) for place in range(1, 60)}
    with no_larger_files(60_000):
        for _ in range(2):
            with pytest.raises(
                UserError, match=r"out.progress cannot be written: disk I/O error; "
            ):
                progress.put(more)
        assert list(progress.done(2)) == [1, 0]
        progress.leave()
    progress = Progress(path, {"a": 1})
    assert list(progress.results()) == [(0, {"r": 0})]
    progress.put(more)
    assert sum(progress.done(60)) == 60
    progress.leave()


def test_progress_that_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "out.progress"
    progress = Progress(path, {"a": 1})
    progress.put({place: (False, '{"r": "%s"}' % ("x" * 500)) for place in range(100)})
    progress.leave()
    whole = path.read_bytes()
    half = len(whole) // 2
    path.write_bytes(whole[:half] + b"\xff" * half)
    progress = Progress(path, {"a": 1})
    with pytest.raises(UserError, match=r"out.progress is damaged .*; delete it to begin anew"):
        list(progress.results())
    progress.leave()
    assert path.exists()


def test_differences_in_words() -> None:
    assert difference({"a": {"b": [1]}}, {"a": {"b": [1]}}) is None
    assert difference({"a": {"b": 1}, "c": 2}, {"a": {"b": 1}, "c": 3}) == "c (2, now 3)"
    assert difference({"a": {}}, {"a": {"b": "x"}}) == 'a.b (none, now "x")'
    long = difference({"a": "x" * 100}, {"a": "y"})
    assert long is not None
    assert len(long) < 100


# -- the table


def test_the_table_says_what_happened() -> None:
    settings = config(judge={}, rule={})
    tallies = Tallies(["judge", "rule"], "reward")
    outcomes = [
        (Reward.scored("judge", 0.25), 0.25),
        (Reward.failed("judge", "timeout", reason="late\n twice"), None),
        (Reward.abstained("judge"), 1.0),
    ]
    for line, (reward, total) in enumerate(outcomes, 5):
        tallies.add(line, result_of(Scored({"judge": reward}, total, "keep"), settings, "reward"))
    stats = {"judge": SourceStats(calls=6, cached=2, prompt_tokens=30, completion_tokens=4)}
    lines = tallies.text(stats, 2.0).splitlines()
    assert lines[0] == "3 rows, 2 with a reward, mean 0.625"
    assert lines[2].split() == ["judge", "1", "1", "1", "0.25", "4", "2", "34", "2.0"]
    assert lines[3].split() == ["rule", "0", "0", "0", "-", "-", "-", "-", "-"]
    assert lines[4:] == ["judge failed(timeout) 1, first at line 6: late twice"]


def test_progress_of_a_start_that_came_to_nothing_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.progress"
    with contextlib.closing(sqlite3.connect(path)) as file:  # what a killed start leaves behind
        file.executescript(
            "CREATE TABLE key (facts TEXT NOT NULL); INSERT INTO key VALUES ('{\"a\": 1}');"
        )
    progress = Progress(path, {"a": 2})
    progress.put({0: (False, "{}")})
    progress.leave()
    with pytest.raises(UserError, match="another a"):
        Progress(path, {"a": 1})
