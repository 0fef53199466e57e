"""A user's function in worker processes: batches, deadlines, deaths, and whose fault is whose."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.config import RewardSourceSection
from offbeat.errors import UserError
from offbeat.records import Prompt, Reward, ScoreItem
from offbeat.reward import function as module
from offbeat.reward.function import FunctionSource, WorkerFailed, load_function
from offbeat.reward.loop import RewardLoop

CODE = '''
import asyncio, os, sys, time
from neighbour import HELP

def length(prompts, completions):
    print("this line must not break the protocol", flush=True)
    os.write(1, b"nor this one")
    return [float(len(c)) for c in completions]

def by_column(prompts, completions, *, reference, level, bonus=0.5):
    assert isinstance(prompts, list) and isinstance(reference, list)
    return [float(c == r) + l + bonus for c, r, l in zip(completions, reference, level)]

def everything(prompts, completions, **columns):
    assert sorted(columns) == ["level", "reference"], columns
    return [HELP] * len(completions)

async def later(prompts, completions):
    await asyncio.sleep(0.01)
    return [1.0] * len(completions)

def calls(prompts, completions):
    return [float(len(completions))] * len(completions)

def odd(prompts, completions):
    answers = {"none": None, "nan": float("nan"), "inf": float("inf"), "text": "7", "true": True,
               "big": 10**400, "list": [1]}
    if "die" in completions:
        os._exit(3)
    if "exit" in completions:
        sys.exit("bye")
    if "raise" in completions:
        raise ValueError("no such luck")
    if "hang" in completions:
        time.sleep(60)
    if "short" in completions:
        return []
    return [answers.get(c, 0.25) for c in completions]

class Rude:
    """Raises at whatever is asked of it."""

    def rude(self, *_):
        raise RuntimeError("ask me nothing")

    __repr__ = __str__ = __float__ = __len__ = __iter__ = __getitem__ = rude

    @property
    def __class__(self):
        raise RuntimeError("ask me nothing")

class Lazy(list):
    """Says that it has values."""

    def __iter__(self):
        yield 0.25
        raise RuntimeError("no more of them")

def rude(prompts, completions):
    import numpy
    nested = []
    nested.append(nested)
    values = {"rude": Rude(), "exits": type("E", (), {"__float__": lambda _: sys.exit(4)})(),
              "nested": nested, "array": numpy.zeros(2), "dict": {("a", 1): Rude()}}
    wholes = {"whole": Rude(), "lazy": Lazy([1]), "scalar": numpy.array(0.5), "more": Lazy()}
    for text, whole in wholes.items():
        if text in completions:
            return whole
    if "unraised" in completions:
        raise type("Mine", (BaseException,), {"__str__": Rude.rude})
    return [values.get(c, 0.25) for c in completions]

async def exits(prompts, completions):
    if "exit" in completions:
        sys.exit("bye")
    return [float(os.getpid())] * len(completions)

def scalar(prompts, completions):
    return 1.0

def array(prompts, completions):
    import numpy
    return numpy.ones(len(completions), dtype=numpy.float32)

def modules(prompts, completions):
    return [float("torch" in sys.modules or "ray" in sys.modules)] * len(completions)

def pid(prompts, completions):
    return [float(os.getpid())] * len(completions)

def reads(prompts, completions):
    return [float(len(sys.stdin.read()))] * len(completions)

def sleepy(prompts, completions):
    time.sleep(0.2 * len(completions))
    return [float(len(completions))] * len(completions)

def one(prompts):
    return [1.0]

number = 3
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("rewards")
    (base / "rewards.py").write_text(CODE)
    (base / "neighbour.py").write_text("HELP = 0.75\n")
    (base / "broken.py").write_text("x = 1\nimport not_there_at_all\n")
    return base


def item(completion: str, **more: Any) -> ScoreItem:
    columns = {"level": 2.0}
    prompt = Prompt(0, np.zeros(1, np.int32), "prompt", "question", None, "right", columns)
    return ScoreItem(prompt, completion, **more)


def scored(folder: Path, name: str, completions: list[str], **settings: Any) -> list[Reward]:
    async def body(source: FunctionSource) -> list[Reward]:
        return await source.score([item(text) for text in completions])

    return with_source(folder, name, body, **settings)


def section_of(name: str, **settings: Any) -> RewardSourceSection:
    spec = name if ":" in name else f"rewards.py:{name}"
    return RewardSourceSection.model_validate(
        {"kind": "function", "function": spec, "deadline_seconds": 20} | settings
    )


def with_source(
    folder: Path, name: str, body: Callable[[FunctionSource], Awaitable[Any]], **settings: Any
) -> Any:
    section = section_of(name, **settings)

    async def main() -> Any:
        source = FunctionSource("rule", section, folder)
        await source.start()
        try:
            return await asyncio.wait_for(body(source), 60)
        finally:
            await source.stop()

    return asyncio.run(main())


def values(rewards: list[Reward]) -> list[float | None]:
    assert all(reward.status == "scored" for reward in rewards), rewards
    return [reward.value for reward in rewards]


def test_prints_do_not_break_the_protocol(folder: Path) -> None:
    assert values(scored(folder, "length", ["", "a", "bcd"])) == [0.0, 1.0, 3.0]


def test_columns_follow_the_signature(folder: Path) -> None:
    assert values(scored(folder, "by_column", ["right", "wrong"])) == [3.5, 2.5]
    assert values(scored(folder, "everything", ["a"])) == [0.75]


def test_async_arrays_and_packages(folder: Path) -> None:
    assert values(scored(folder, "later", ["a", "b"])) == [1.0, 1.0]
    assert values(scored(folder, "array", ["a", "b"])) == [1.0, 1.0]
    assert values(scored(folder, "rewards:length", ["abc"])) == [3.0]


def test_waiting_samples_share_a_call(folder: Path) -> None:
    assert values(scored(folder, "calls", ["x"] * 100)) == [64.0] * 64 + [36.0] * 36
    assert values(scored(folder, "calls", ["x"] * 6, concurrency=4)) == [4.0] * 4 + [2.0] * 2


def test_large_answers_share_no_call(folder: Path) -> None:
    """Sixty-four of them packed at once would stop the event loop for a second."""
    large = ["x" * 400_000] * 6
    assert values(scored(folder, "calls", large)) == [2.0] * 6
    assert values(scored(folder, "calls", ["x" * 2_000_000, "a"])) == [1.0, 1.0]


def test_workers_are_clean_processes(folder: Path) -> None:
    import torch  # noqa: F401 - the parent has it

    assert values(scored(folder, "modules", ["x"])) == [0.0]
    assert values(scored(folder, "reads", ["x"])) == [0.0]

    async def body(source: FunctionSource) -> set[float | None]:
        rewards = await asyncio.gather(*(source.score([item(str(i))]) for i in range(40)))
        spans = await source.drain_spans()
        assert {span.role for span in spans} == {"reward/rule"}
        assert all(span.end >= span.start and span.cpu >= 0 for span in spans)
        assert await source.drain_spans() == []
        return {reward.value for (reward,) in rewards}

    pids = with_source(folder, "pid", body, workers=2)
    assert len(pids) == 2
    assert os.getpid() not in pids


@pytest.mark.parametrize(
    ("text", "status", "cause"),
    [
        ("none", "abstained", None),
        ("nan", "failed", "non_finite"),
        ("inf", "failed", "non_finite"),
        ("big", "failed", "non_finite"),
        ("text", "failed", "bad_result"),
        ("list", "failed", "bad_result"),
        ("true", "scored", None),
        ("raise", "failed", "raised"),
        ("exit", "failed", "raised"),
        ("short", "failed", "bad_result"),
        ("die", "failed", "worker_died"),
    ],
)
def test_one_samples_trouble_is_its_own(
    folder: Path, text: str, status: str, cause: str | None
) -> None:
    first, odd, last = scored(folder, "odd", ["fine", text, "fine"])
    assert (first.value, last.value) == (0.25, 0.25)
    assert (odd.status, odd.cause) == (status, cause)
    assert status == "scored" or odd.value is None
    if text == "raise":
        assert "ValueError: no such luck" in odd.reason
        assert "rewards.py:" in odd.reason


def test_whole_result_of_another_type(folder: Path) -> None:
    (reward,) = scored(folder, "scalar", ["a"])
    assert reward.cause == "bad_result"
    assert "float" in reward.reason


def test_whatever_is_returned_the_worker_goes_on(folder: Path) -> None:
    texts = ["a", "rude", "exits", "nested", "array", "dict", "whole", "lazy", "scalar", "more"]
    first, *odd, last = scored(folder, "rude", [*texts, "z"])
    assert (first.value, last.value) == (0.25, 0.25)
    assert {reward.cause for reward in odd} == {"bad_result"}
    reasons = dict(zip(texts[1:], [reward.reason for reward in odd], strict=True))
    assert reasons["rude"] == "<Rude> is not a number (ask me nothing)"
    assert reasons["exits"].endswith("is not a number (4)")
    assert reasons["nested"] == "[[...]] is not a number"
    assert reasons["whole"] == "returned Rude that is no list (ask me nothing)"
    assert reasons["lazy"] == "returned Lazy that is no list (no more of them)"
    (raised,) = scored(folder, "rude", ["unraised"])
    assert raised.cause == "raised"
    assert raised.reason.startswith("Mine: <Mine> (rewards.py:")


def test_an_exit_in_what_is_awaited_ends_no_worker(folder: Path) -> None:
    async def body(source: FunctionSource) -> list[Reward]:
        return [(await source.score([item(text)]))[0] for text in ("a", "exit", "b")]

    before, exited, after = with_source(folder, "exits", body)
    assert exited.cause == "raised"
    assert before.value == after.value


def test_a_hanging_call_is_killed_and_others_go_on(folder: Path) -> None:
    start = time.monotonic()
    rewards = scored(folder, "odd", ["fine", "hang", "fine"], deadline_seconds=1)
    assert [reward.value for reward in rewards] == [0.25, None, 0.25]
    assert rewards[1].cause == "timeout"
    assert time.monotonic() - start < 30


class StubWorker:
    """Answers at once, and is late where it is told to hang."""

    one_by_one, pid = False, None

    def __init__(self, *_: Any) -> None:
        self.sizes: list[int] = []

    async def start(self) -> None: ...

    async def kill(self) -> None: ...

    async def call(self, items: Sequence[ScoreItem], deadline: float) -> dict[str, Any]:
        self.sizes.append(len(items))
        if any(one.completion == "hang" for one in items):
            raise WorkerFailed("timeout", "the function took too long")
        outcomes = [{"value": 0.25} for _ in items]
        return {"outcomes": outcomes, "start": 0.0, "end": 0.0, "cpu": 0.0}


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubWorker:
    worker = StubWorker()
    monkeypatch.setattr(module, "WorkerProcess", lambda *_: worker)
    return worker


def test_samples_that_hang_take_no_other_along(folder: Path, stub: StubWorker) -> None:
    async def body(source: FunctionSource) -> list[Reward]:
        loop = RewardLoop({"rule": source}, {"rule": section_of("odd", retries=0)})
        items = [item(text) for text in [*["hang"] * 3, "fine", "good"]]
        return [one.rewards["rule"] for one in await loop.score_group(items)]

    *hung, fine, good = with_source(folder, "odd", body)
    assert stub.sizes[:4] == [5, 1, 1, 1]
    assert [(reward.cause, reward.retries) for reward in hung] == [("timeout", 0)] * 3
    assert [(reward.value, reward.retries) for reward in (fine, good)] == [(0.25, 1)] * 2


def test_a_function_that_hangs_on_everything_is_not_asked_for_each(
    folder: Path, stub: StubWorker
) -> None:
    hung = scored(folder, "odd", ["hang"] * 20)
    assert stub.sizes == [20, 1, 1, 1]
    assert [reward.cause for reward in hung] == ["timeout"] * 3 + ["untried"] * 17
    assert hung[-1].reason.endswith("its call failed: the function took too long")


def test_answers_are_set_against_timeouts(folder: Path, stub: StubWorker) -> None:
    """As long as a call is answered here and there it is gone through to its end."""
    texts = ["fine"] * 5 + ["hang"] * 7 + ["fine"] * 2
    found = scored(folder, "odd", texts)
    assert [reward.value for reward in found] == [{"fine": 0.25}.get(text) for text in texts]
    assert scored(folder, "odd", ["fine", *["hang"] * 4, "fine"])[-1].cause == "untried"


def test_calls_shrink_when_all_samples_are_in_time_and_their_call_is_not(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(source: FunctionSource) -> list[list[Reward]]:
        return [await source.score([item("x") for _ in range(20)]) for _ in range(2)]

    first, second = with_source(folder, "sleepy", body, deadline_seconds=2)
    assert values(first) == [1.0] * 20, "4 s in one call; alone they are in time"
    assert 1 < max(size or 0 for size in values(second)) <= 5
    assert "too long for one call with deadline_seconds = 2; from now on a call has" in caplog.text


def test_a_killed_worker_is_replaced(folder: Path) -> None:
    async def body(source: FunctionSource) -> list[Reward]:
        (first,) = await source.score([item("x")])
        os.kill(int(first.value or 0), 9)
        await asyncio.sleep(0.1)
        (second,) = await source.score([item("x")])
        return [first, second]

    first, second = values(with_source(folder, "pid", body))
    assert first != second


def test_stop_fails_what_waits(folder: Path) -> None:
    async def body(source: FunctionSource) -> Reward:
        waiting = asyncio.create_task(source.score([item("hang")]))
        await asyncio.sleep(0.3)
        await source.stop()
        (reward,) = await asyncio.wait_for(waiting, 5)
        return reward

    reward = with_source(folder, "odd", body)
    assert (reward.status, reward.cause) == ("failed", "unavailable")


def test_the_worker_ends_with_its_parent(folder: Path) -> None:
    """A parent killed in the middle of a call leaves no worker behind."""
    script = f"""
import asyncio, sys, numpy
from pathlib import Path
from offbeat.config import RewardSourceSection
from offbeat.records import Prompt, ScoreItem
from offbeat.reward.function import FunctionSource
async def main():
    section = RewardSourceSection(kind="function", function="rewards.py:odd")
    source = FunctionSource("rule", section, Path({str(folder)!r}))
    await source.start()
    print(source._workers[0].pid, flush=True)
    await source.score([ScoreItem(Prompt(0, numpy.zeros(1, "int32"), "", ""), "hang")])
asyncio.run(main())
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    try:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        time.sleep(0.3)
    finally:
        parent.kill()
        parent.wait(10)
    until = time.monotonic() + 10
    while time.monotonic() < until and not _gone(worker):
        time.sleep(0.05)
    assert _gone(worker)


def _gone(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("rewards.py", "write file.py:name"),
        ("nowhere.py:f", "there is no file"),
        ("broken.py:f", "not_there_at_all"),
        ("rewards.py:lenght", "did you mean length"),
        ("rewards.py:number", "not a function"),
        ("rewards.py:one", "must take (prompts, completions"),
        ("no.such.package:f", "importing no.such.package"),
    ],
)
def test_import_problems_are_the_users(folder: Path, spec: str, says: str) -> None:
    with pytest.raises(UserError, match=r"reward\.rule\.function") as caught:
        load_function(spec, "reward.rule.function", folder)
    assert says in str(caught.value)


def test_import_problems_at_start(folder: Path) -> None:
    with pytest.raises(UserError, match=r"reward\.rule\.function: importing .*broken\.py"):
        scored(folder, "broken.py:f", [])


def test_load_in_process(folder: Path) -> None:
    assert load_function("rewards.py:length", base=folder)([], ["ab"]) == [2.0]
