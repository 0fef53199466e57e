"""Functions written for TRL and verl, called as those would call them, in worker processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.cli import main as offbeat
from offbeat.config import RewardSourceSection
from offbeat.errors import UserError
from offbeat.records import Prompt, Reward, ScoreItem
from offbeat.reward.function import FunctionSource, calls_of
from offbeat.reward.function_style import SHAPES, Caller
from offbeat.reward.loader import load_caller

CODE = '''
import asyncio, time

# -- TRL

def length(completions, **kwargs):
    return [float(len(c)) for c in completions]

def conversational(prompts, completions, **kwargs):
    """1 where both are messages, as TRL hands out a conversational data set."""
    return [
        float(p[-1]["role"] == "user" and c[0]["role"] == "assistant" and c[0]["content"] == "yes")
        if isinstance(p, list) else float(isinstance(c, str)) / 2
        for p, c in zip(prompts, completions)
    ]

def everything(prompts, completions, **kwargs):
    wanted = {"answer", "reference", "trainer_state", "log_extra", "log_metric"}
    assert set(kwargs) == wanted, sorted(kwargs)
    assert kwargs["trainer_state"] is None
    kwargs["log_extra"]("seen", [1] * len(prompts))
    kwargs["log_metric"]("accuracy", 0.5)
    return [1.0] * len(prompts)

def not_applicable(completions, answer, **kwargs):
    return [None if a is None else float(c == a) for c, a in zip(completions, answer)]

async def awaited(prompts, completions, answer, **kwargs):
    await asyncio.sleep(0.01)
    return [float(c == a) for c, a in zip(completions, answer)]

def with_ids(completions, completion_ids, **kwargs):
    return [float(len(i)) for i in completion_ids]

def without_ids(completions, completion_ids=None, environments=None, **kwargs):
    return [float(completion_ids is None)] * len(completions)

def bonus(completions, answer, factor=1.0, **kwargs):
    return [factor * (c == a) for c, a in zip(completions, answer)]

def strict(prompts, completions, factor):
    return [factor] * len(completions)

def counted(completions, completion_tokens, finish_reason, **kwargs):
    assert "completion_tokens" not in kwargs
    return [t + 0.5 * (r == "length") for t, r in zip(completion_tokens, finish_reason)]

def only_prompts(prompts):
    return [1.0]

# -- verl

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    more = extra_info.get("more", 0)
    return float(solution_str == ground_truth) + (data_source == "gsm8k") + more

def with_dict(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "nothing":
        return {"acc": 1}
    return {"score": float(solution_str == ground_truth), "pred": solution_str, "big": {1, 2} and 3}

def short(solution_str, ground_truth, method="strict", factor=1.0):
    return factor * (solution_str == ground_truth) if method == "strict" else -1.0

def odd(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "raise":
        raise KeyError(data_source)
    if solution_str == "hang":
        time.sleep(60)
    return {"none": None, "text": "7", "nan": float("nan")}.get(solution_str, 0.25)

class Rude(dict):
    """Raises at whatever is asked of it."""

    def rude(self, *_):
        raise RuntimeError("ask me nothing")

    __repr__ = __str__ = __float__ = __iter__ = keys = items = rude

def rude(solution_str, **kwargs):
    nested = {}
    nested["self"] = nested
    return {
        "key": {"score": 1.0, ("a", 1): 2, "right": True},
        "words": {"score": 1.0, "why": Rude, "half": "\\ud800", "by": {("a",): 1}},
        "value": {"score": 1.0, "more": {1: object.__new__(type("Mute", (), {"__str__": 3}))}},
        "nested": {"score": 1.0, "more": nested},
        "score": {"score": Rude({1: 2})},
        "whole": Rude({"score": 1.0}),
    }[solution_str]

async def leaves(solution_str, **kwargs):
    if solution_str == "exit":
        raise SystemExit("bye")
    if solution_str == "cancel":
        raise asyncio.CancelledError
    if solution_str == "stop":
        asyncio.get_running_loop().stop()
        await asyncio.sleep(5)
    return 1.0

async def slowly(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "raise":
        raise KeyError(data_source)
    await asyncio.sleep(0.5)
    return float(solution_str == ground_truth)

def truth(data_source, solution_str, ground_truth, extra_info):
    return float(ground_truth["answers"][0] == solution_str and extra_info["index"] == 3)

def tokens(solution_str, completion_tokens, **kwargs):
    return float(completion_tokens)

def offbeat_style(prompts, completions):
    return [1.0]
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("adapters")
    (base / "rewards.py").write_text(CODE)
    return base


def item(text: str, /, *, chat: bool = False, tokens: int = 0, **columns: Any) -> ScoreItem:
    messages = ({"role": "user", "content": "q"},) if chat else None
    columns = {"answer": "yes"} | columns
    prompt = Prompt(0, np.zeros(0, np.int32), "q", "q", messages, "yes", columns)
    return ScoreItem(prompt, text, tokens=tokens)


def scored(folder: Path, style: str, name: str, items: list[Any], **settings: Any) -> list[Reward]:
    section = RewardSourceSection.model_validate(
        {"kind": "function", "function": f"rewards.py:{name}", "style": style}
        | {"deadline_seconds": 30}
        | settings
    )

    async def main() -> list[Reward]:
        source = FunctionSource("rule", section, folder)
        await source.start()
        try:
            asked = [i if isinstance(i, ScoreItem) else item(i) for i in items]
            return await asyncio.wait_for(source.score(asked), 100)
        finally:
            await source.stop()

    return asyncio.run(main())


def values(rewards: list[Reward]) -> list[float | None]:
    assert all(reward.status == "scored" for reward in rewards), rewards
    return [reward.value for reward in rewards]


# -- TRL


def test_trl_is_called_by_name(folder: Path) -> None:
    assert values(scored(folder, "trl", "length", ["", "abc"])) == [0.0, 3.0]
    assert values(scored(folder, "trl", "everything", ["a", "b"])) == [1.0, 1.0]
    assert values(scored(folder, "trl", "awaited", ["yes", "no"])) == [1.0, 0.0]


def test_trl_conversations_are_messages_and_texts_are_texts(folder: Path) -> None:
    items = [item("yes", chat=True), item("no", chat=True), item("yes")]
    assert values(scored(folder, "trl", "conversational", items)) == [1.0, 0.0, 0.5]


def test_trl_none_is_no_opinion(folder: Path) -> None:
    first, second = scored(folder, "trl", "not_applicable", ["yes", item("yes", answer=None)])
    assert (first.value, second.status, second.value) == (1.0, "abstained", None)


def test_trl_leaves_out_the_columns_that_trl_leaves_out(folder: Path) -> None:
    more = {"prompt": "p", "completion": "c", "completion_ids": [1]}
    assert values(scored(folder, "trl", "everything", [item("a", **more)])) == [1.0]


def test_trl_ids_are_said_to_be_missing_only_where_they_are_required(folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"with_ids .* requires completion_ids, and a reward source"
    ):
        scored(folder, "trl", "with_ids", [])
    assert values(scored(folder, "trl", "without_ids", ["a"])) == [1.0]


def test_arguments_win_over_columns_and_unknown_ones_are_refused(folder: Path) -> None:
    found = scored(folder, "trl", "bonus", ["yes"], arguments={"factor": 2, "answer": ["yes"]})
    assert values(found) == [2.0]
    assert values(scored(folder, "trl", "strict", ["a"], arguments={"factor": 3})) == [3.0]
    with pytest.raises(UserError) as caught:
        scored(folder, "trl", "strict", [], arguments={"faktor": 3})
    assert "reward.rule.arguments.faktor is no parameter of strict" in str(caught.value)
    assert str(caught.value).endswith("which takes factor")
    with pytest.raises(UserError, match=r"arguments\.completions is what .* for every sample"):
        scored(folder, "trl", "strict", [], arguments={"completions": []})


def test_special_columns_go_to_functions_that_name_them(folder: Path) -> None:
    cut = ScoreItem(item("a").prompt, "a", "length", 7)
    assert values(scored(folder, "trl", "counted", [cut, item("ab", tokens=2)])) == [7.5, 2.0]
    assert values(scored(folder, "verl", "tokens", [cut])) == [7.0]
    counts = calls_of([item("not counted"), item(""), item("a", tokens=1)]).tokens
    assert counts == [None, 0, 1]


@pytest.mark.parametrize(
    ("style", "name", "says"),
    [
        ("trl", "only_prompts", "does not take completions by name"),
        ("verl", "length", None),  # **kwargs take all
        ("verl", "only_prompts", 'does not take solution_str by name, as style = "verl" gives'),
        ("offbeat", "length", "must take (prompts, completions"),
        ("verl", "offbeat_style", "it takes prompts, completions"),
    ],
)
def test_what_cannot_be_called_so_is_refused_at_start(
    folder: Path, style: Any, name: str, says: str | None
) -> None:
    if says is None:
        load_caller(f"rewards.py:{name}", base=folder, style=style)
        return
    with pytest.raises(UserError) as caught:
        load_caller(f"rewards.py:{name}", "reward.rule.function", folder, style)
    assert says in str(caught.value)
    assert set(SHAPES) == {"offbeat", "trl", "verl"}


# -- verl


def test_verl_numbers_and_columns(folder: Path) -> None:
    items = [
        item("yes"), item("no", data_source="gsm8k"),
        item("yes", data_source="gsm8k", extra_info={"more": 0.5}),
    ]  # fmt: skip
    assert values(scored(folder, "verl", "compute_score", items)) == [1.0, 1.0, 2.5]


def test_verl_reads_its_parquets_columns(folder: Path) -> None:
    model = {"style": "rule", "ground_truth": {"answers": ["18"]}}
    row = item("18", reward_model=model, extra_info={"index": 3, "split": "train"})
    assert values(scored(folder, "verl", "truth", [row])) == [1.0]


def test_verl_dicts_keep_the_rest_as_text(folder: Path) -> None:
    right, without = scored(folder, "verl", "with_dict", ["yes", "nothing"])
    assert right.value == 1.0
    assert json.loads(right.raw) == {"score": 1.0, "pred": "yes", "big": 3}
    assert (without.status, without.cause) == ("failed", "bad_result")
    assert without.reason == "returned a dict without score"
    assert without.raw == '{"acc": 1}'


def test_verl_dicts_that_are_no_json_are_written_as_well_as_they_can_be(folder: Path) -> None:
    texts = ["key", "words", "value", "nested", "score", "whole"]
    key, words, value, nested, score, whole = scored(folder, "verl", "rude", texts)
    assert values([key, words, value, nested]) == [1.0] * 4
    assert json.loads(key.raw) == {"score": 1.0, "('a', 1)": 2, "right": True}
    found = json.loads(words.raw)
    assert (found["half"], found["by"]) == ("?", "{('a',): 1}")
    assert json.loads(value.raw)["more"] == {"1": "<Mute>"}
    assert json.loads(nested.raw)["more"] == "{'self': {...}}"
    assert (score.cause, whole.cause) == ("bad_result", "bad_result")
    assert whole.reason == "returned Rude that cannot be read (ask me nothing)"


def test_verl_async_functions_that_leave_take_nobody_along(folder: Path) -> None:
    found = scored(folder, "verl", "leaves", ["yes", "exit", "cancel", "yes"], retries=0)
    assert [reward.cause for reward in found] == [None, "raised", "raised", None]
    found = scored(folder, "verl", "leaves", ["stop"])
    assert found[0].cause == "raised"


def test_verl_functions_that_take_less_and_more(folder: Path) -> None:
    assert values(scored(folder, "verl", "short", ["yes"])) == [1.0]
    arguments = {"factor": 0.5, "ground_truth": "no"}
    assert values(scored(folder, "verl", "short", ["no"], arguments=arguments)) == [0.5]
    with pytest.raises(UserError, match="which takes ground_truth, method, factor"):
        scored(folder, "verl", "short", [], arguments={"metod": "loose"})


def test_verl_one_samples_trouble_is_its_own(folder: Path) -> None:
    texts = ["fine", "raise", "none", "text", "nan", "hang", "fine"]
    found = scored(folder, "verl", "odd", texts, deadline_seconds=2)
    assert [reward.status for reward in found] == [
        "scored", "failed", "abstained", "failed", "failed", "failed", "scored",
    ]  # fmt: skip
    causes = [reward.cause for reward in found]
    assert causes == [None, "raised", None, "bad_result", "non_finite", "timeout", None]
    assert "KeyError" in found[1].reason
    assert "rewards.py:" in found[1].reason


def test_verl_async_functions_are_awaited_together(folder: Path) -> None:
    found = scored(folder, "verl", "slowly", ["yes", "raise", *["no"] * 30], deadline_seconds=8)
    assert [reward.value for reward in found] == [1.0, None, *[0.0] * 30]
    assert found[1].cause == "raised"  # one by one it would be 15 s, past the deadline


def test_a_deadline_is_one_samples_where_they_are_scored_one_by_one(folder: Path) -> None:
    def sync(solution_str: str) -> float:
        return 1.0

    async def later(solution_str: str) -> float:
        return 1.0

    assert Caller(sync, "verl", {}).one_by_one
    assert not Caller(later, "verl", {}).one_by_one
    assert not Caller(sync, "trl", {}).one_by_one


# -- check


def test_check_tries_each_style_on_rows_that_it_scores(
    project: Callable[..., Path], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = project(("rule",))
    good = (
        path.read_text()
        + f"""
[reward.verl]
kind = "function"
function = "{folder}/rewards.py:short"
style = "verl"
arguments = {{ factor = 2 }}

[reward.trl]
kind = "function"
function = "{folder}/rewards.py:length"
style = "trl"

[reward.long]
kind = "function"
function = "offbeat.rewards:overlong_penalty"
arguments = {{ max_tokens = 8, buffer = 2 }}

[reward.other]
kind = "function"
function = "{folder}/rewards.py:odd"
when = {{ reference = "none of these" }}
"""
    )
    path.write_text(good)
    assert offbeat(["check", str(path)]) == 0
    said = capsys.readouterr().out
    verl, trl, long = (
        said.split(f"reward.{name}.function = ")[1] for name in ("verl", "trl", "long")
    )
    assert "reference answers: 2, 2, 2 (" in verl
    assert "empty answers: 0, 0, 0 (" in trl
    assert "short answers: 0, 0, 0 (" in long
    assert "is not tried, as it scores no row" in said
    for before, after, says in (
        ("factor = 2", "faktor = 2", "reward.verl.arguments.faktor is no parameter of short in "),
        ("max_tokens = 8, buffer = 2", "", "missing 2 required keyword-only arguments"),
        ("rewards.py:length", "rewards.py:with_ids", "requires completion_ids"),
        ('style = "verl"', 'style = "trl"', "does not take completions by name"),
    ):
        path.write_text(good.replace(before, after))
        assert offbeat(["check", str(path)]) == 2
        assert says in capsys.readouterr().err
