"""offbeat.rewards: the number, the mathematics, the length and the form of an answer."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat import rewards
from offbeat.config import RewardSourceSection
from offbeat.errors import UserError
from offbeat.records import Prompt, Reward, ScoreItem
from offbeat.reward.function import FunctionSource
from offbeat.rewards.number import final_number, numbers

GSM8K = os.environ.get("OFFBEAT_GSM8K")
ONE = [""]


def exact(answer: str, reference: str | None, **arguments: Any) -> float | None:
    (value,) = rewards.exact_number(ONE, [answer], reference=[reference], **arguments)
    return value


def equal(answer: str, reference: str | None) -> float | None:
    (value,) = rewards.math_verify(ONE, [answer], reference=[reference])
    return value


# -- exact_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", 18), ("18.0", 18), ("18.", 18), ("$18", 18), ("18%", 18), ("18 dollars", 18),
        ("18kg", 18), ("1,600", 1600), ("12,345,678.90", Fraction(1234567890, 100)),
        ("1{,}600", 1600), ("-5", -5), ("-$5", -5), ("$-5", -5), ("\u22127", -7), ("(-3)", -3),
        ("10-5", 5), ("10 - 5", 5), (".5", Fraction(1, 2)), ("1/2", Fraction(1, 2)),
        ("1 1/2 hours", Fraction(3, 2)), (r"\frac{3}{4}", Fraction(3, 4)), ("1e3", 1000),
        ("It is 5. Then 7.", 7), ("1,2", 2), ("", None), ("none", None), ("3/0", None),
        ("9" * 5000, None),
        # what is marked as final goes before what comes last
        ("#### 18\nBecause 3 + 15", 18), ("A: 18\nBecause 3 + 15", 18),
        ("Answer: 12 apples, 3 a box", 12), ("**Answer:** 12", 12), ("Final answer: 7\n8", 7),
        ("A: 2 + 3 = 5 apples", 5), (r"so \boxed{x = 5} in 3 steps", 5), ("#### none\n5", None),
        ("#### 1\n#### 2", 2), ("A: 1\n#### 2\nA: 3", 2),
        # the last mark counts, wherever the lines end
        ("#### 7 #### 42", 42), ("#### 42 #### 7", 7), ("#### 42 #### none", None),
        ("#### 42 ####", 42), ("#### 7 ##### 42 #####", 42), ("######## 42", 42),
        (r"First try: \boxed{7}, corrected: \boxed{42}", 42), (r"\boxed{42} or \boxed{7}", 7),
        ("\\boxed{42}\nor \\boxed{7}, or \\boxed {8}", 8), (r"\boxed{\boxed{5}}", 5),
        (r"#### 7, no: \boxed{42} #### 9", 9),
        # and of a box only what is in it
        (r"\boxed{42}, for 2 = 2", 42), (r"\boxed{}, not 5", None), (r"\boxed{42", 42),
        ("\\boxed{\n42\n}", 42),
        (r"\boxed{x = \frac{6}{2}} = 9", 3), (r"\boxed{1{,}600}", 1600), (r"\boxed{\{5\}}", 5),
    ],
)  # fmt: skip
def test_the_number_of_an_answer(text: str, number: Any) -> None:
    assert final_number(text) == (None if number is None else Fraction(number))


def test_exact_number() -> None:
    worked = "He has 3*6=<<3*6=18>>18 eggs.\n#### 18"
    assert exact("so 18.0", worked) == 1.0
    assert exact("3 * 6 = 18 eggs\nA: 19", worked) == 0.0
    assert exact("I do not know", worked) == 0.0
    assert exact("18", None) is None
    assert exact("18", "no number") is None
    assert exact("0.3333", "1/3") == 0.0
    assert exact("0.3333", "1/3", tolerance=1e-3) == 1.0


@given(st.integers(-(10**12), 10**12), st.sampled_from(["", "$", "A: ", "#### ", "so it is "]))
def test_numbers_are_read_as_they_are_written(number: int, before: str) -> None:
    for text in (f"{number}", f"{number:,}", f"{number}.00", f"{number * 2}/2"):
        assert final_number(f"{before}{text} of them") == number


@given(st.text(max_size=300))
def test_any_text_has_numbers_or_none(text: str) -> None:
    assert all(isinstance(number, Fraction) for number in numbers(text))
    assert exact(text, "18") in (0.0, 1.0)


def test_long_answers_take_no_time() -> None:
    began = time.monotonic()
    marks = ("#" * 200_000, "#### " * 40_000, "####" + " " * 200_000, "\\boxed{" * 30_000)
    for text in ("1" * 200_000, "1," * 100_000, "1/" * 100_000, "-$" * 100_000, "A: " * 60_000):
        exact(text, "18")
    for text in marks:
        exact(text, "18")
        exact(f"{text}x", "18")
    assert time.monotonic() - began < 20


# -- math_verify


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        (r"so \boxed{1/2}", r"\frac{1}{2}"), (r"$\frac{2}{4}$", "0.5"), ("$(1,2]$", "(1,2]"),
        ("A: 1,600", "A: 1600"), ("#### 18.0", "worked\n#### 18"), (r"\boxed{x=5}", "5"),
        ("5", "x=5"), (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"), (r"\boxed{\{1,2\}}", r"\{2,1\}"),
        (r"\boxed{x^2-1}", "(x-1)(x+1)"), (r"\boxed{(-\infty,3)}", r"(-\infty, 3)"),
        ("the answer is $0.333333$", "1/3"), ("18 dollars", "$18"), (r"\boxed{\text{B}}", "B"),
        ("A: 12 dollars", "12"), ("1600", "1,600 dollars"), ("50%", "50"), ("A: (1,2]", "(1,2]"),
        (r"#### \frac{1}{2}", "0.5"), ("#### 7 #### 42", "42"), ("42", "#### 7 #### 42"),
        (r"A: 2\text{ cm}", "2"), ("A: 2, 3", r"\{2,3\}"),
    ],
)  # fmt: skip
def test_equal_by_mathematics(answer: str, reference: str) -> None:
    assert equal(answer, reference) == 1.0


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("", "5"), ("I do not know", "5"), ("2", "(1,2]"), ("$[1,2]$", "(1,2]"), ("6", "5"),
        ("A: (1,2]", "2"), (r"\boxed{1/3}", "0.5"), (r"\boxed{x+1}", "x-1"), ("A: 18\n", "19"),
        ("#### 42 #### 7", "42"), (r"\boxed{42} or \boxed{7}", "42"),
    ],
)  # fmt: skip
def test_not_equal(answer: str, reference: str) -> None:
    assert equal(answer, reference) == 0.0


def test_a_reference_that_cannot_be_read_gives_no_opinion() -> None:
    assert equal("5", None) is None
    assert equal("5", "") is None


def test_its_own_timeouts_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be alarms, which only a main thread may set."""
    import signal

    def alarm(seconds: int) -> int:
        raise AssertionError("an alarm was set")

    monkeypatch.setattr(signal, "alarm", alarm)
    assert equal(r"\boxed{7/2}", "3.5") == 1.0


HANGS = r"\boxed{10^{10^{10}}}"


def test_what_hangs_is_killed_at_the_deadline_and_others_go_on() -> None:
    section = RewardSourceSection.model_validate(
        {"kind": "function", "function": "offbeat.rewards:math_verify", "deadline_seconds": 5}
    )

    async def main() -> list[Reward]:
        source = FunctionSource("math", section, Path.cwd())
        await source.start()
        try:
            prompt = Prompt(0, np.zeros(0, np.int32), "", "", None, "18")
            items = [ScoreItem(prompt, text) for text in ("18", HANGS, "A: 18")]
            return await asyncio.wait_for(source.score(items), 120)
        finally:
            await source.stop()

    first, hung, last = asyncio.run(main())
    assert (first.value, last.value) == (1.0, 1.0)
    assert (hung.status, hung.cause) == ("failed", "timeout")


def test_without_the_library_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('not here')\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from offbeat.errors import UserError
from offbeat.reward.loader import load_function
import offbeat.rewards
load_function("offbeat.rewards:exact_number")
try:
    load_function("offbeat.rewards:math_verify", "reward.m.function")
except UserError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.startswith("reward.m.function: offbeat.rewards:math_verify needs the libr")
    assert "pip install -e '.[math]'" in done.stdout


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, offbeat.rewards; print([m for m in ('sympy', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError):
        rewards.nothing  # noqa: B018


# -- overlong_penalty and format_match


def penalty(tokens: int | None, **arguments: int) -> float | None:
    settings = {"max_tokens": 20, "buffer": 4} | arguments
    (value,) = rewards.overlong_penalty(ONE, [""], completion_tokens=[tokens], **settings)
    return value


def test_overlong_penalty_is_dapos() -> None:
    """Equation 13 of arXiv 2503.14476 with L_max = 20 and L_cache = 4."""
    found = {tokens: penalty(tokens) for tokens in (0, 15, 16, 17, 18, 20, 21, 1000)}
    assert found == {0: 0, 15: 0, 16: 0, 17: -0.25, 18: -0.5, 20: -1.0, 21: -1.0, 1000: -1.0}
    assert str(penalty(0)) == "0.0"
    assert penalty(None) is None
    with pytest.raises(ValueError, match="buffer = 30 must be at least 1 and at most max_tokens"):
        penalty(1, buffer=30)


def test_format_match() -> None:
    def match(text: str, **arguments: Any) -> float:
        (value,) = rewards.format_match(ONE, [text], **arguments)
        return value

    pattern = r"<think>.*</think>\s*\d+"
    assert match("<think>a\nb</think>\n18\n", pattern=pattern) == 1.0
    assert match("well: <think>a</think> 18", pattern=pattern) == 0.0
    assert match("well: <think>a</think> 18", pattern=pattern, anywhere=True) == 1.0


@pytest.mark.skipif(GSM8K is None, reason="OFFBEAT_GSM8K names no folder with GSM8K's files")
@pytest.mark.parametrize("function", [rewards.exact_number, rewards.math_verify])
def test_agreement_with_gsm8ks_labels(function: Any) -> None:
    import json

    path = Path(str(GSM8K)) / "model_solutions.jsonl"
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    tried = [(r["ground_truth"], a) for r in rows for a in r.values() if isinstance(a, dict)]
    found = function(
        [""] * len(tried), [a["solution"] for _, a in tried], reference=[r for r, _ in tried]
    )
    agree = [value == a["is_correct"] for value, (_, a) in zip(found, tried, strict=True)]
    assert len(tried) == 2400
    assert sum(agree) >= 0.99 * len(tried)


def test_unknown_arguments_are_refused_with_what_there_is() -> None:
    from offbeat.reward.loader import load_caller

    with pytest.raises(UserError, match="which takes completion_tokens, max_tokens, buffer"):
        load_caller("offbeat.rewards:overlong_penalty", arguments={"max_token": 3})
