"""Anchors on real sources: files, looks through a judge server, numbers against plain oracles."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offbeat.cli import main
from offbeat.config import RewardSourceSection
from offbeat.errors import UserError
from offbeat.records import Reward, ScoreItem, Span
from offbeat.reward import anchors as anchors_module
from offbeat.reward.anchor_files import anchors_of, read_anchors
from offbeat.reward.anchors import AnchorReport, Anchors
from offbeat.reward.cache import VerdictCache
from offbeat.reward.function import FunctionSource
from offbeat.reward.genrm import GenRM
from offbeat.reward.judge_http import HttpBackend
from offbeat.reward.source import RewardSource
from offbeat.testing.judge_server import Fault, JudgeServer
from offbeat.track.recorder import Recorder

Rows = Sequence[Mapping[str, Any]]


def write(path: Path, rows: Rows | str) -> Path:
    text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text)
    return path


def judge(path: Path, **settings: Any) -> RewardSourceSection:
    values = {"kind": "genrm", "base_url": "http://127.0.0.1:9/v1", "model": "judge",
              "anchors": path, "anchors_every": 10, "deadline_seconds": 20}  # fmt: skip
    return RewardSourceSection.model_validate(values | settings)


def rows(*grades: float) -> list[dict[str, Any]]:
    """Answers that are their own grade, so that a server can be told what to say of them."""
    return [
        {"question": f"q{place}", "answer": f"[{grade:g}]", "grade": grade}
        for place, grade in enumerate(grades)
    ]


# ---- the file ----


def test_grades_are_read_on_the_sources_own_scale(tmp_path: Path) -> None:
    def known(grades: Sequence[Any], **settings: Any) -> list[float]:
        path = write(
            tmp_path / "a.jsonl", [{"question": "q", "answer": "a", "grade": g} for g in grades]
        )
        return [anchor.known for anchor in read_anchors("x", judge(path, **settings))]

    assert known([1, 5.5, 10]) == [0, 0.5, 1]
    assert known([0, 3], scale=(0, 4)) == [0, 0.75]
    assert known(["Yes", "no", 1, 0.5, True], parser="yes_no") == [1, 0, 1, 0.5, 1]
    choices = {"parser": "choice", "choices": {"Good": 2.0, "Bad": -1.0}}
    assert known(["good", " Bad ", 0], **choices) == [2, -1, 0]
    digits = {"parser": "expected", "choices": {"9": 1.0, "1": 0.0}}
    assert known([9, 1, "1", 9.0, 0.5], **digits) == [1, 0, 0, 1, 0.5], "what the judge would say"
    assert known([3, 7], pairwise="all", parser="choice") == [3, 7]  # only their order counts
    other = {"base_url": None, "model": "m"}
    assert known([-4.5, 1e9], kind="disrm", **other) == [-4.5, 1e9]
    assert known([7], kind="function", function="f.py:f") == [7]


def test_other_columns_reach_templates_and_functions(tmp_path: Path) -> None:
    row = {"question": "q", "answer": "a", "grade": 2, "reference": {"x": 1}, "level": 3}
    (anchor,) = read_anchors("x", judge(write(tmp_path / "a.jsonl", [row])))
    prompt = anchor.prompt
    assert (prompt.question, prompt.text, prompt.reference) == ("q", "q", '{"x": 1}')
    assert prompt.columns == {"question": "q", "reference": {"x": 1}, "level": 3}
    assert prompt.ordinal < 0
    assert read_anchors("x", judge(tmp_path / "none", anchors=None)) == []


GOOD = '{"question": "q", "answer": "a", "grade": 3}\n'


@pytest.mark.parametrize(
    ("text", "settings", "words"),
    [
        (GOOD + "{\n", {}, ["line 2", "JSON"]),
        (GOOD + "[1]\n", {}, ["line 2", "no JSON object"]),
        (GOOD + '{"question": "q", "answer": "a"}\n', {}, ["line 2 has no grade", "question, "]),
        (GOOD + '\n{"question": "q", "grade": 1}\n', {}, ["line 3 has no answer"]),
        ('{"question": 4, "answer": "a", "grade": 1}\n', {}, ["line 1: question = 4", "a text"]),
        (GOOD.replace("3", "11"), {}, ["line 1: grade = 11", "from 1 to 10"]),
        (GOOD.replace("3", '"3"'), {}, ["line 1: grade = \"3\"", "a number"]),
        (GOOD.replace("3", "NaN"), {}, ["line 1: grade = NaN"]),
        (GOOD.replace("3", "1" + "0" * 400), {"kind": "function", "function": "f.py:f"},
         ["line 1", "finite"]),
        (GOOD.replace("3", '"maybe"'), {"parser": "yes_no"}, ["one of yes, no", "0 to 1"]),
        (GOOD.replace("3", "9"), {"parser": "choice", "choices": {"A": 1, "B": 0}},
         ["one of A, B", "0 to 1"]),
        (GOOD.replace("3", '"x"'), {"kind": "disrm", "base_url": None}, ["finite number"]),
        (GOOD, {"pairwise": "all", "parser": "choice"}, ["line 1", "pairwise", "a second one"]),
        ("", {}, ["has no rows"]),
    ],
)  # fmt: skip
def test_a_malformed_file_is_refused_with_its_line(
    tmp_path: Path, text: str, settings: dict[str, Any], words: list[str]
) -> None:
    path = write(tmp_path / "a.jsonl", text)
    with pytest.raises(UserError) as caught:
        anchors_of({"judge": judge(path, **settings)})
    said = str(caught.value)
    assert said.startswith(f"reward.judge.anchors: {path}")
    assert [word for word in words if word not in said] == [], said


def test_check_counts_them_and_refuses_what_is_malformed(
    project: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = project(reward__rule__anchors="a.jsonl", reward__rule__anchors_every=25)
    assert main(["check", str(path)]) == 2
    assert "reward.rule.anchors = " in capsys.readouterr().err
    write(tmp_path / "a.jsonl", rows(0, 1, 0.5))
    assert main(["check", str(path)]) == 0
    said = "reward/rule: 3 anchors of a.jsonl, judged at the start and every 25 steps"
    assert said in capsys.readouterr().out
    write(tmp_path / "a.jsonl", GOOD + GOOD.replace("3", "null"))
    for command in ("check", "train"):
        assert main([command, str(path)]) == 2
        assert "a.jsonl line 2 has no grade" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


# ---- looks ----


def look_at(
    section: RewardSourceSection,
    body: Callable[[Anchors, RewardSource], Awaitable[Any]],
    cache: VerdictCache | None = None,
    meta: dict[str, str] | None = None,
    step: int = 0,
) -> Any:
    """Runs `body` with the anchors of a judge on its server; `meta` is the ledger's."""

    async def judged() -> Any:
        backend = HttpBackend(section, name="judge", pause_seconds=0.02)
        source = GenRM("judge", section, backend, cache)
        await source.start()
        kept = {} if meta is None else meta
        anchors = Anchors(
            {"judge": source}, {"judge": section}, anchors_of({"judge": section}),
            step=step, kept=dict(kept), keep=kept.__setitem__,
        )  # fmt: skip
        try:
            async with asyncio.timeout(60):
                return await body(anchors, source)
        finally:
            await source.stop()

    return asyncio.run(judged())


def grade_in(text: str) -> str:
    """What the answer claims to be worth: the last number in brackets."""
    return text.rpartition("[")[2].partition("]")[0]


async def one_look(anchors: Anchors, _: RewardSource) -> AnchorReport:
    (report,) = await anchors.look(0)
    return report


def test_a_perfect_judge(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows(1, 4, 7, 10))
    with JudgeServer(reply=grade_in) as server:
        found = look_at(judge(path, base_url=server.base_url), one_look)
    assert (found.source, found.step, found.n, found.judged) == ("judge", 0, 4, 4)
    assert (found.error, found.spearman) == (0, 1)
    assert found.mean == pytest.approx(0.5)
    assert found.drift is found.repeat is found.warning is None
    assert found.failed == {}
    assert len(server.calls) == 4


def test_failures_are_counted_by_cause_and_are_in_no_number(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows(1, 4, 7, 10))
    replies = {"1": "2", "4": "5", "7": "no idea", "10": "11"}
    with JudgeServer(reply=lambda text: replies[grade_in(text)]) as server:
        found = look_at(judge(path, base_url=server.base_url), one_look)
        assert (found.judged, found.failed) == (2, {"unparseable": 1, "out_of_range": 1})
        assert found.error == pytest.approx(1 / 9)
        assert found.spearman is None  # of two
        server.reply = "none"
        found = look_at(judge(path, base_url=server.base_url), one_look)
    assert (found.mean, found.error, found.drift) == (None, None, None)
    assert found.warning == (
        "warning: none of the 4 anchors of reward.judge could be judged (unparseable 4)"
    )


def test_drift_of_a_server_whose_model_was_changed(tmp_path: Path) -> None:
    """At temperature 0, with the verdict cache on: what it knows would hide the change."""
    path = write(tmp_path / "a.jsonl", rows(1, 4, 7, 10))
    with JudgeServer(reply=grade_in) as server:

        async def body(anchors: Anchors, source: RewardSource) -> list[AnchorReport]:
            first = [a.prompt for a in read_anchors("judge", section)]
            items = [ScoreItem(p, f"[{g}]") for p, g in zip(first, (1, 4, 7, 10), strict=True)]
            assert all(r.status == "scored" for r in await source.score(items))  # cached now
            found = []
            for step, swapped in ((0, False), (10, False), (20, True), (30, True)):
                server.reply = (lambda text: str(11 - int(grade_in(text)))) if swapped else grade_in
                found += await anchors.look(step)
            assert all(r.value is not None for r in await source.score(items))
            return found

        section = judge(path, base_url=server.base_url)
        cache = VerdictCache(tmp_path / "verdicts.sqlite")
        first, second, third, fourth = look_at(section, body, cache)
        asked = len(server.calls)
    assert asked == 4 + 4 * 4  # training's own once, and each look anew; training's again: cached
    assert (first.drift, first.repeat) == (None, None)
    assert (second.drift, second.repeat, second.spearman) == (0, 0, 1)
    moved = [1, 1 / 3, 1 / 3, 1]
    assert third.drift == pytest.approx(sum(moved) / 4)
    assert third.repeat == pytest.approx(sum(m * m / 2 for m in moved) / 4)
    assert third.spearman == -1
    assert "otherwise than at first" in third.warning
    assert "0.667 away" in third.warning
    assert "1.00 -> -1.00" in third.warning
    assert (fourth.drift, fourth.repeat) == (pytest.approx(third.drift), 0)
    assert fourth.warning is None  # said already


def test_drift_across_starts_is_told_from_the_first_look(tmp_path: Path) -> None:
    """The same looks in one process and in one of its own each: what is told is the same."""
    path = write(tmp_path / "a.jsonl", rows(1, 4, 7, 10))
    swaps = {0: False, 10: False, 20: True, 30: True}

    def looks(steps: Sequence[int], meta: dict[str, str]) -> list[AnchorReport]:
        async def body(anchors: Anchors, _: RewardSource) -> list[AnchorReport]:
            found = []
            for step in steps:
                assert [n for n in range(steps[0], step + 1) if anchors.due(n)] == [step]
                server.reply = (lambda t: str(11 - int(grade_in(t)))) if swaps[step] else grade_in
                found += await anchors.look(step)
            assert anchors.notices() == []
            return [replace(report, seconds=0) for report in found]

        found: list[AnchorReport] = look_at(section, body, meta=meta, step=steps[0])
        return found

    with JudgeServer(reply=grade_in) as server:
        section = judge(path, base_url=server.base_url)
        whole = looks([*swaps], {})
        asked = sorted(str(call.body) for call in server.calls)
        meta: dict[str, str] = {}
        assert [report for step in swaps for report in looks([step], meta)] == whole
        assert sorted(str(call.body) for call in server.calls[len(asked) :]) == asked
    assert [report.warning is not None for report in whole] == [False, False, True, False]


def test_other_anchors_begin_anew_and_it_is_said(tmp_path: Path) -> None:
    meta: dict[str, str] = {}
    path = write(tmp_path / "a.jsonl", rows(1, 10))

    async def body(anchors: Anchors, _: RewardSource) -> tuple[list[str], AnchorReport]:
        said = anchors.notices()
        assert anchors.notices() == []
        (report,) = await anchors.look(5)
        return said, report

    with JudgeServer(reply=grade_in) as server:
        section = judge(path, base_url=server.base_url)
        assert look_at(section, body, meta=meta)[0] == []
        write(path, rows(10, 1))
        said, report = look_at(section, body, meta=meta, step=5)
    (line,) = said
    assert line.startswith("the anchors of reward.judge are others than before")
    assert (report.step, report.drift, report.repeat) == (5, None, None)


def test_a_judge_that_draws_judges_each_anchor_twice_with_other_seeds(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows(1, 10))
    draws = iter([1, 10, 3, 10, 5, 5, 5, 5])
    with JudgeServer(reply=lambda _: str(next(draws))) as server:

        async def body(anchors: Anchors, _: RewardSource) -> list[AnchorReport]:
            return await anchors.look(0) + await anchors.look(10)

        section = judge(path, base_url=server.base_url, temperature=0.7, concurrency=1)
        first, second = look_at(section, body)
        texts = [call.text for call in server.calls]
        seeds = [call.body["seed"] for call in server.calls]
    assert len(texts) == 8
    assert len(set(texts)) == 2
    assert len(set(seeds)) == 8  # a server that follows seeds draws anew each time
    assert first.judged == 2
    assert first.drift is None
    assert first.repeat == pytest.approx(
        sum((a - b) ** 2 / 2 for a, b in pair_values(texts[:4], [1, 10, 3, 10])) / 2
    )
    assert second.repeat == 0
    assert second.drift is not None


def pair_values(texts: list[str], said: list[int]) -> list[list[float]]:
    """The values of equal texts, whichever call came first."""
    by_text: dict[str, list[float]] = {}
    for text, grade in zip(texts, said, strict=True):
        by_text.setdefault(text, []).append((grade - 1) / 9)
    return list(by_text.values())


def test_comparisons_are_of_answers_to_one_question(tmp_path: Path) -> None:
    group = [{"question": q, "answer": f"[{g}]", "grade": g} for q in "ab" for g in (1, 5, 9)]

    def prefer(text: str) -> str:
        grades = [int(part.partition("]")[0]) for part in text.split("[") if part[:1].isdigit()]
        return "A" if grades[0] > grades[1] else "B"

    path = write(tmp_path / "a.jsonl", group)
    template = tmp_path / "t.jinja"
    template.write_text("{{ question }} A: {{ answer_a }} B: {{ answer_b }}")
    with JudgeServer(reply=prefer) as server:
        section = judge(
            path, base_url=server.base_url, pairwise="all", parser="choice", template=template
        )
        found = look_at(section, one_look)
    assert found.failed == {}
    assert (found.judged, found.spearman, found.error) == (6, 1, None)
    assert found.mean == pytest.approx(0.5)


def test_few_calls_at_once_and_an_end_to_every_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", rows(*range(1, 10)))
    with JudgeServer(reply=grade_in, delay=0.05) as server:
        found = look_at(judge(path, base_url=server.base_url), one_look)
        assert found.judged == 9
        assert server.most_at_once == anchors_module.CALLS_AT_ONCE
        server.add(Fault(hang=True))
        monkeypatch.setattr(anchors_module, "LOOK_SECONDS", 1.5)
        found = look_at(judge(path, base_url=server.base_url), one_look)
        assert found.failed == {"timeout": 1}
        assert found.judged == 8
        assert found.seconds < 10


# ---- when ----


class Source:
    """A source in this process: `score` answers by the place, `lost` calls lose their replica."""

    name = "s"
    down_since = None

    def __init__(self, lost: int = 0, broken: bool = False) -> None:
        self.calls: list[Sequence[ScoreItem]] = []
        self.lost, self.broken = lost, broken
        self.gate = asyncio.Event()
        self.gate.set()

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def drain_spans(self) -> list[Span]:
        return []

    def facts(self) -> Mapping[str, float]:
        return {}

    async def score(self, items: Sequence[ScoreItem]) -> list[Reward]:
        self.calls.append(items)
        await self.gate.wait()
        if self.broken:
            raise ZeroDivisionError("of the source")
        if self.lost:
            self.lost -= 1
            cause = "untried" if self.lost == 1 else "replica_lost"
            return [Reward.failed("s", cause) for _ in items]
        return [Reward.scored("s", float(item.completion[1:-1])) for item in items]


def anchors_on(
    tmp_path: Path,
    *sources: Source,
    every: Sequence[int] = (10,),
    meta: dict[str, str] | None = None,
    step: int = 0,
) -> Anchors:
    path = write(tmp_path / "a.jsonl", rows(1, 2, 3))
    config = {
        f"s{i}": RewardSourceSection(
            kind="function", function="f.py:f", anchors=path, anchors_every=n
        )
        for i, n in enumerate(every)
    }
    named: dict[str, RewardSource] = {f"s{i}": source for i, source in enumerate(sources)}
    kept = {} if meta is None else meta
    return Anchors(
        named, config, anchors_of(config), step=step, kept=dict(kept), keep=kept.__setitem__
    )


def test_looks_are_due_at_the_start_and_every_so_many_steps(tmp_path: Path) -> None:
    async def main() -> None:
        anchors = anchors_on(tmp_path, Source(), Source(), every=(10, 4))
        seen = []
        for step in range(21):
            if anchors.due(step):
                seen += [(step, report.source) for report in await anchors.look(step)]
        assert seen == [
            (0, "s0"), (0, "s1"), (4, "s1"), (8, "s1"), (10, "s0"), (12, "s1"), (16, "s1"),
            (20, "s0"), (20, "s1"),
        ]  # fmt: skip
        assert [(r.step, r.source) for r in anchors.drain()] == seen
        assert anchors.drain() == []

    asyncio.run(main())


def test_it_runs_beside_training_and_one_slow_source_holds_no_other_up(tmp_path: Path) -> None:
    async def main() -> None:
        slow, fast = Source(), Source()
        slow.gate.clear()
        anchors = anchors_on(tmp_path, slow, fast, every=(1, 2))
        running = asyncio.create_task(anchors.run())
        for steps in range(7):
            anchors.trained(steps)  # returns at once, whatever looks do
            await asyncio.sleep(0.02)
        assert [(r.step, r.source) for r in anchors.drain()] == [
            (0, "s1"), (2, "s1"), (4, "s1"), (6, "s1"),
        ]  # fmt: skip
        assert not anchors.due(6)
        slow.gate.set()
        await anchors.settle(10)
        assert [(r.step, r.source) for r in anchors.drain()] == [(0, "s0"), (6, "s0")]
        slow.gate.clear()
        anchors.trained(7)
        await anchors.settle(0.05)  # gives up
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


def test_a_start_that_goes_on_looks_when_the_next_look_is_due(tmp_path: Path) -> None:
    meta: dict[str, str] = {}

    async def start(step: int, *steps: int, every: int = 10) -> list[int]:
        anchors = anchors_on(tmp_path, Source(), every=(every,), meta=meta, step=step)
        running = asyncio.create_task(anchors.run())
        for done in steps:
            anchors.trained(done)
            await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            await anchors.settle(10)  # at once, where none is due
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return [report.step for report in anchors.drain()]

    async def main() -> None:
        assert await start(0) == [0]
        assert await start(0, *range(1, 9)) == []
        assert await start(5, *range(6, 15)) == [10]
        assert await start(8, *range(9, 13)) == []  # redone, the tenth too
        assert await start(20) == [20]  # it was due when the run was killed
        assert await start(24, every=4) == [24]  # and so by the new `anchors_every`

    asyncio.run(main())


def test_a_lost_replica_is_asked_again_and_a_broken_source_ends_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        anchors = anchors_on(tmp_path, Source(lost=2), Source(broken=True), every=(10, 10))
        lost, broken = await anchors.look(0)
        assert (lost.judged, lost.failed) == (3, {})
        assert (broken.judged, broken.failed) == (0, {"source_error": 3})
        again = anchors_on(tmp_path, Source(lost=100))
        (report,) = await again.look(0)
        assert report.failed == {"replica_lost": 3}

    asyncio.run(main())


def test_a_real_function(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(
        "def f(prompts, completions, level, **_):\n"
        "    return [len(c) + l for c, l in zip(completions, level)]\n"
    )
    answers = [{"question": "q", "answer": "x" * n, "grade": n + 1.5, "level": 1} for n in range(4)]
    section = RewardSourceSection(
        kind="function",
        function=f"{tmp_path / 'f.py'}:f",
        anchors=write(tmp_path / "a.jsonl", answers),
    )

    async def main() -> AnchorReport:
        source = FunctionSource("f", section, tmp_path)
        await source.start()
        try:
            anchors = Anchors({"f": source}, {"f": section}, anchors_of({"f": section}))
            (report,) = await anchors.look(0)
            return report
        finally:
            await source.stop()

    found = asyncio.run(main())
    assert (found.judged, found.error, found.spearman) == (4, 0.5, 1)


def test_reports_reach_metrics_and_summary(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, bound=2, total_steps=None, stream=None, replicas={}, started=0.0)

    async def main() -> list[AnchorReport]:
        source = Source()
        anchors = anchors_on(tmp_path, source)
        found = await anchors.look(0) + await anchors.look(10)
        source.broken = True
        return found + await anchors.look(20)

    reports = asyncio.run(main())
    for report in reports:
        recorder.anchors(report)
    summary = recorder.close("finished")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    looks = [line for line in lines if line["type"] == "anchors"]
    assert [look["step"] for look in looks] == [0, 10, 20]
    assert looks[1]["drift"] == 0
    told = summary["anchors"]["s0"]
    assert told["looks"] == 3
    assert (told["first"]["step"], told["last"]["step"]) == (0, 20)
    assert told["last"]["failed"] == {"source_error": 3}
    (event,) = [line for line in lines if line["type"] == "event"]
    assert "none of the 3 anchors of reward.s0" in event["message"]
    assert summary["health"]["warnings"] == [event["health"]]
    assert not math.isnan(looks[0]["seconds"])
