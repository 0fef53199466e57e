"""Verdict texts: what is a grade, what is not, and never anything else (J1, J2, J3)."""

from __future__ import annotations

import json
import math
import time
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.config import RewardSourceSection
from offbeat.reward.expected import expected_value, shown, weighed_verdicts
from offbeat.reward.verdict import Grade, Parser, Unread, parse_verdict

SCALE = (1.0, 10.0)
CHOICES = {"correct": 1.0, "partly correct": 0.5, "incorrect": 0.0, "A": -2.0, "B": 7.5}
CRITERIA = ("is right", "is short")
PARSERS = get_args(Parser)


def read(text: str, parser: Parser, truncated: bool = False, **more: Any) -> Grade | Unread:
    settings = {"choices": CHOICES, "criteria": CRITERIA} | more
    return parse_verdict(text, parser, SCALE, truncated=truncated, **settings)


@pytest.mark.parametrize(
    "text",
    [
        "8",
        " 8\n",
        "Score: 8/10",
        "**8**",
        "8.0",
        "8.",
        '{"score": 8}',
        '```json\n{"score": 8, "max": 10}\n```',
        '{"Grade": "8/10", "why": "2 errors"}',
        "8 / 10",
        "8 out of 10.",
        "\\boxed{8}",
        "There are 2 errors in 10 lines.\nScore: 8",
        "Grade (1-10): 8",
        "Score: 8\nRating: 8/10",
    ],
)
def test_j1_an_eight_is_an_eight(text: str) -> None:
    read = parse_verdict(text, "number", SCALE)
    assert read == Grade(8.0, pytest.approx(7 / 9))


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "unparseable"),
        ("I cannot judge this", "unparseable"),
        ("eight-ish", "unparseable"),
        ("11", "out_of_range"),
        ("-3", "out_of_range"),
        ("\u22123", "out_of_range"),
        ("0/10", "out_of_range"),
        ("NaN", "unparseable"),
        ("inf", "unparseable"),
        ("8 or 9", "unparseable"),
        ("8-9", "unparseable"),
        ("8,5", "unparseable"),
        ("4/5", "unparseable"),
        ("80%", "unparseable"),
        ("8e0", "unparseable"),
        ("8²", "unparseable"),
        ("Score: 8\nScore: 9", "unparseable"),
        ('{"score": NaN}', "unparseable"),
        ('{"score": true}', "unparseable"),
        ('{"score": null, "confidence": 8}', "unparseable"),
        ('{"confidence": 8}', "unparseable"),
        ('{"steps": 3, "scor', "unparseable"),
        ('{"score": 8} {"score": 9}', "unparseable"),
        ('{"score": 1e999}', "out_of_range"),
        ('{"score": ' + "9" * 4000 + "}", "out_of_range"),
    ],
)
def test_j2_no_number(text: str, cause: str) -> None:
    read = parse_verdict(text, "number", SCALE)
    assert isinstance(read, Unread)
    assert read.cause == cause
    assert read.reason


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    "text",
    [
        "8" * 10_000_000,
        "8 " * 5_000_000,
        "".join(f"{i} " for i in range(3500)),
        '{"a":' * 4000,
        "score:" * 3000,
        *(letter * 19_999 for letter in "[{/ \nn"),
        "not " * 5000,
        "n't " * 5000,
        "correct not " * 1600,
        "not correct partly " * 1000,
        "A-" * 9000,
        "verdict: " * 2000,
        "</think>" * 2000,
        '{"1": ' * 3000,
        "not 8 or 9\n" * 1600,
    ],
    ids=lambda text: f"{text[:4]!r}x{len(text)}",
)
def test_j2_bounded_time(parser: Parser, text: str) -> None:
    def seconds() -> float:
        start = time.thread_time()
        assert isinstance(read(text, parser), Unread)
        return time.thread_time() - start

    assert any(seconds() < 0.5 for _ in range(3))  # the collector may run within one of them


def test_j3_whole_words() -> None:
    assert parse_verdict("Yes.", "yes_no", SCALE) == Grade(1.0, 1.0)
    assert parse_verdict("**no**", "yes_no", SCALE) == Grade(0.0, 0.0)
    for text in ["I see it with my eyes", "yesterday", "know", "no-one can say", "", "yes and no"]:
        assert isinstance(parse_verdict(text, "yes_no", SCALE), Unread)
    assert parse_verdict("my eyes say: yes", "yes_no", SCALE) == Grade(1.0, 1.0)


@pytest.mark.parametrize(
    "text",
    ["not a yes", "I cannot say yes", "I don\u2019t think yes fits.", "Never no", "isn't YES"],
)
def test_j3_a_negated_word_is_none(text: str) -> None:
    assert isinstance(parse_verdict(text, "yes_no", SCALE), Unread)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("No, it is not right.", 0.0),
        ("The answer is not right: no", 0.0),
        ("It isn't wrong.\nYes", 1.0),
        ("Yes, I cannot find a fault", 1.0),
        ("a knot, yes", 1.0),
    ],
)
def test_j3_a_negation_elsewhere_takes_nothing_away(text: str, value: float) -> None:
    assert parse_verdict(text, "yes_no", SCALE) == Grade(value, value)


def test_json_parser_wants_an_object() -> None:
    assert isinstance(parse_verdict("8", "json", SCALE), Unread)
    found = parse_verdict('I think {"reason": "{\\"score\\": 3}", "score": 8}.', "json", SCALE)
    assert found == Grade(8.0, pytest.approx(7 / 9))


def test_truncated_verdicts() -> None:
    def read(text: str) -> Grade | Unread:
        return parse_verdict(text, "number", SCALE, truncated=True)

    assert isinstance(read("8"), Grade)
    assert isinstance(read("Score: 10"), Grade)
    assert isinstance(read("Score: 8 because the"), Grade)
    assert isinstance(read("1"), Unread)  # of a 10, perhaps
    assert isinstance(parse_verdict("1", "number", SCALE), Grade)
    assert isinstance(parse_verdict("1", "number", (0, 1), truncated=True), Grade)
    assert isinstance(read('{"score": 8'), Unread)


WORDS = [*CHOICES, "not", "n't", "no", "yes", "verdict", ":", "\n", ".", " ", "8", '{"1": 8', "}"]
TEXTS = st.one_of(
    st.text(),
    st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join),
    st.text(alphabet='0123456789.-+/ \n:{}"scoreSCOREgadeinfNaNyesno*%,eE', max_size=60),
    st.from_regex(r"(Score|Grade)?:? ?-?[0-9]{1,3}(\.[0-9]+)?(/10)?( or [0-9])?", fullmatch=True),
    st.builds('{{"score": {}}}'.format, st.one_of(st.floats(), st.integers(), st.text())),
)


@settings(max_examples=250, deadline=None)
@given(
    text=TEXTS,
    parser=st.sampled_from(PARSERS),
    scale=st.sampled_from([(1.0, 10.0), (0.0, 1.0), (-5.0, 5.0), (0.5, 0.75)]),
    truncated=st.booleans(),
)
def test_never_raises_never_leaves_the_scale(
    text: str, parser: Parser, scale: tuple[float, float], truncated: bool
) -> None:
    found = parse_verdict(
        text, parser, scale, truncated=truncated, choices=CHOICES, criteria=CRITERIA
    )
    if isinstance(found, Unread):
        assert found.cause in {"unparseable", "out_of_range"}
    elif parser == "choice":
        assert found.value in CHOICES.values()
    else:
        assert 0.0 <= found.value <= 1.0
        if parser != "yes_no":
            assert scale[0] <= found.grade <= scale[1]


@settings(max_examples=200, deadline=None)
@given(grade=st.floats(1, 10).map(lambda x: round(x, 3)), form=st.sampled_from(["{}", "**{}**"]))
def test_every_grade_of_the_scale_is_read(grade: float, form: str) -> None:
    read = parse_verdict(form.format(grade), "number", SCALE)
    assert read == Grade(grade, pytest.approx((grade - 1) / 9))


@pytest.mark.parametrize("parser", ["number", "last_number", "json"])
@pytest.mark.parametrize("text", ["8", "Score: 8/10", "**8**", "8.0", '{"score": 8}'])
def test_j1_for_every_parser_of_numbers(parser: Parser, text: str) -> None:
    if parser == "json" and "{" not in text:
        assert read(text, parser) == Unread(
            "unparseable", "no JSON object with a score, grade, rating or verdict"
        )
    else:
        assert read(text, parser) == Grade(8.0, pytest.approx(7 / 9))


@pytest.mark.parametrize("parser", ["number", "last_number", "json", "rubric"])
@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "unparseable"), ("I cannot judge this", "unparseable"), ("eight-ish", "unparseable"),
        ("11", "out_of_range"), ("-3", "out_of_range"), ("NaN", "unparseable"),
        ("8 or 9", "unparseable"), ("8 " * 5_000_000, "unparseable"),
    ],
    ids=lambda value: value[:12],
)  # fmt: skip
def test_j2_for_every_parser_of_numbers(parser: Parser, text: str, cause: str) -> None:
    if parser in {"json", "rubric"}:
        cause = "unparseable"
        said = text if len(text) < 20 else "many"
        forms = [text, json.dumps({"score": said}), json.dumps({"1": said, "2": 8})]
    else:
        forms = [text]
    for form in forms:
        found = read(form, parser)
        assert isinstance(found, Unread)
        expected = cause
        if form != text and text in {"11", "-3"} and found.cause == "out_of_range":
            expected = "out_of_range"
        assert found.cause == expected


@pytest.mark.parametrize(
    ("text", "grade"),
    [
        ("There are 2 errors in 10 lines.\nSo it is worth\n8", 8),
        ("Reasons 1 and 2.\n\n**Score: 8/10**\n\n", 8),
        ("It is 3 of 4 right.\nScore (1-10): 8", 8),
        ("Score: 10\nNo, that was wrong.\nGrade = 2", 2),
        ("because\n8 out of 10.", 8),
        ('because\n```json\n{"score": 8}\n```', 8),
        ('I weigh it.\n{\n  "score": 8,\n  "max": 10\n}', 8),
        ("<think>maybe 3, maybe 4</think>\n8", 8),
        ("1 2 3</think>8", 8),
        ("x\n" * 100_000 + "8", 8),
        ("I give it an 8", 8),
    ],
    ids=lambda value: str(value)[:20],
)
def test_the_last_line_counts(text: str, grade: float) -> None:
    assert read(text, "last_number") == Grade(grade, pytest.approx((grade - 1) / 9))


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("8\nThat is all.", "unparseable"),
        ("There are 2 errors. Score: 8", "unparseable"),
        ("8\n8 or 9", "unparseable"),
        ("8\n7-9", "unparseable"),
        ("8\n8 and 8", "unparseable"),
        ('8\n{"score": 8', "unparseable"),
        ("Score (1-5): 8", "unparseable"),
        ("Score: 8\n11", "out_of_range"),
        ("8\n```\n", None),
        ("8\n{", "unparseable"),
        ('{"score": 3}\n{"score": 8}}', None),
        ('{"score": 3}\n}', None),
        ("8\n" + "9" * 30_000, "unparseable"),
        ("8\n" * 300_000, "unparseable"),
        (" \n** \n", "unparseable"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_other_lines_do_not(text: str, cause: str | None) -> None:
    found = read(text, "last_number")
    assert isinstance(found, Grade) if cause is None else found.cause == cause  # type: ignore[union-attr]


def test_a_last_line_that_may_go_on_is_no_verdict() -> None:
    for text in ("I see 3", "8", "Score: 8\n", '{"score": 8}'):
        found = read(text, "last_number", truncated=True)
        assert isinstance(found, Unread)
        assert "max_tokens" in found.reason


def test_what_is_only_thought_is_no_verdict() -> None:
    for parser in PARSERS:
        assert isinstance(read("<think>8 correct yes", parser), Unread)
        assert isinstance(read('<think>8 correct yes {"1":8,"2":8}</think>', parser), Unread)
    assert read("<think>no, 3</think> yes", "yes_no") == Grade(1.0, 1.0)
    assert read('<think>{"score": 2}</think>{"score": 8}', "json") == Grade(
        8.0, pytest.approx(7 / 9)
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("correct", 1.0),
        ("**Correct.**", 1.0),
        ("The answer is partly  correct.", 0.5),
        ("incorrect, as the sum is wrong", 0.0),
        ("Incorrect: it is not right.", 0.0),
        ("A", -2.0),
        ("b", 7.5),
        ("(A)", -2.0),
        ("'B'", 7.5),
        ("_B_", 7.5),
        ("a better one: B", 7.5),
        ("I can't say that it is incorrect.\nVerdict: partly correct", 0.5),
        ("Not incorrect. Not correct.\n\n**Verdict:** partly correct\n", 0.5),
        ("It isn't wrong.\ncorrect", 1.0),
    ],
)
def test_choices(text: str, value: float) -> None:
    assert read(text, "choice") == Grade(value, value)


@pytest.mark.parametrize(
    "text",
    [
        "", "correctly", "correctness", "incorrectly", "correct or incorrect", "not correct",
        "It isn't correct", "never partly correct", "neither A nor B", "A or B", "A-", "B+", "AB",
        "correct-ish", "Verdict: A\nVerdict: B", "It says\nVerdict: A\nbut B is better",
        "I cannot judge this", "correct. Or incorrect.", "A.5", "1", "c o r r e c t",
    ],
)  # fmt: skip
def test_no_choice(text: str) -> None:
    found = read(text, "choice")
    assert isinstance(found, Unread)
    assert found.cause == "unparseable"


def test_choices_of_equal_value_do_not_contradict() -> None:
    same = {"right": 1.0, "correct": 1.0, "wrong": 0.0}
    assert read("Right, it is correct", "choice", choices=same) == Grade(1.0, 1.0)
    assert isinstance(read("Right or wrong", "choice", choices=same), Unread)


def test_a_choice_that_denies_in_its_own_words() -> None:
    both = {"not correct": 0.0, "correct": 1.0}
    assert read("It is not correct.", "choice", choices=both) == Grade(0.0, 0.0)
    assert isinstance(read("It is never not correct.", "choice", choices=both), Unread)


def test_a_choice_that_was_cut() -> None:
    longer = {"partly": 0.2, "partly correct": 0.5, "correct": 1.0}
    assert isinstance(read("partly", "choice", True, choices=longer), Unread)
    assert isinstance(read("It is partly ", "choice", True, choices=longer), Unread)
    assert read("partly", "choice", choices=longer) == Grade(0.2, 0.2)
    assert read("partly correct", "choice", True, choices=longer) == Grade(0.5, 0.5)
    assert read("correct because", "choice", True, choices=longer) == Grade(1.0, 1.0)


@given(
    st.sampled_from(sorted(CHOICES)),
    st.sampled_from(["{}", "**{}**", "Verdict: {}", "({}).", "{}\n"]),
)
def test_every_choice_is_read(choice: str, form: str) -> None:
    assert read(form.format(choice), "choice") == Grade(CHOICES[choice], CHOICES[choice])


@pytest.mark.parametrize(
    ("text", "grade"),
    [
        ('{"1": 8, "2": 10}', 9.0),
        ('Here: {"2": 10, "1": "8/10"}', 9.0),
        ('```json\n{"1": 8.0, "2": 10, "reason": "2 lines"}\n```', 9.0),
        ('{"Is right": 8, "is short.": 10}', 9.0),
        ('{"grades": {"1": 1, "2": 1}}', 1.0),
    ],
)
def test_a_rubric_is_the_mean_of_its_criteria(text: str, grade: float) -> None:
    assert read(text, "rubric") == Grade(grade, pytest.approx((grade - 1) / 9))


@pytest.mark.parametrize(
    ("text", "cause", "word"),
    [
        ('{"1": 8}', "unparseable", "no grade for criterion 2"),
        ('{"1": 8, "2": 9, "3": 1}', "unparseable", "not among the criteria"),
        ('{"1": 8, "2": 9, "total": 17}', "unparseable", "not among the criteria"),
        ('{"1": 8, "is right": 9, "2": 3}', "unparseable", "graded twice"),
        ('{"1": 8, "2": 11}', "out_of_range", "criterion 2"),
        ('{"1": 8, "2": null}', "unparseable", "criterion 2"),
        ('{"1": 8, "2": true}', "unparseable", "criterion 2"),
        ('{"1": 8, "2": [9]}', "unparseable", "criterion 2"),
        ('{"1": 8, "2": "8 or 9"}', "unparseable", "criterion 2"),
        ('{"1": 8, "2": NaN}', "unparseable", "no JSON"),
        ('{"1": 8, "1": 9, "2": 3}', "unparseable", "no JSON"),
        ('{"1": 8, "2": 9', "unparseable", "no JSON"),
        ('{"1": 8, "2": 9} or {"1": 8, "2": 9}', "unparseable", "2 JSON objects"),
        ("[8, 9]", "unparseable", "no JSON"),
        ("8\n9", "unparseable", "no JSON"),
    ],
)
def test_no_rubric(text: str, cause: str, word: str) -> None:
    found = read(text, "rubric")
    assert isinstance(found, Unread)
    assert (found.cause, word in found.reason) == (cause, True), found


@given(st.lists(st.integers(1, 10), min_size=1, max_size=6))
def test_a_rubric_of_any_size(grades: list[int]) -> None:
    said = {str(number): grade for number, grade in enumerate(grades, 1)}
    found = read(json.dumps(said), "rubric", criteria=[f"criterion {i}" for i in said])
    mean = sum(grades) / len(grades)
    assert found == Grade(pytest.approx(mean), pytest.approx((mean - 1) / 9))


def weighed(**settings: Any) -> dict[str, float]:
    base = {"kind": "genrm", "model": "m", "parser": "expected"}
    return weighed_verdicts(RewardSourceSection.model_validate(base | settings))


def test_which_verdicts_are_weighed() -> None:
    assert weighed(scale=(1, 3)) == {"1": 0.0, "2": 0.5, "3": 1.0}
    assert weighed(scale=(-1, 1)) == {"-1": 0.0, "0": 0.5, "1": 1.0}
    assert weighed(choices={"good": 3.0, "bad": -1.0}) == {"good": 3.0, "bad": -1.0}
    assert weighed(pairwise="all") == {"A": 1.0, "B": 0.0}
    assert list(weighed()) == [str(grade) for grade in range(1, 11)]


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12), st.floats(0.01, 1), st.floats(-1e6, 1e6))
def test_expected_values(weights: list[float], mass: float, shift: float) -> None:
    total = sum(weights)
    if total < 1e-6:
        return
    shares = [mass * weight / total for weight in weights]
    verdicts = {str(i): shift + i for i in range(len(weights))}
    found = expected_value(verdicts, shares)
    if math.fsum(shares) < 0.5:
        assert isinstance(found, Unread)
        assert (found.cause, f"mass {math.fsum(shares):.3f}" in found.reason) == (
            "unparseable",
            True,
        )
    else:
        mean = sum(i * weight / total for i, weight in enumerate(weights))
        assert isinstance(found, Grade)
        assert found.value == pytest.approx(shift + mean, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("shares", [(float("nan"), 0.5), (0.9, -0.1), (1.0,), (0.2, 0.2, 0.2)])
def test_probabilities_that_are_none(shares: tuple[float, ...]) -> None:
    assert isinstance(expected_value({"A": 1.0, "B": 0.0}, shares), Unread)


def test_a_distribution_in_words() -> None:
    assert shown(("8", "9", "10"), (0.3, 0.62, 0.0)) == "9: 0.620, 8: 0.300 (mass 0.920)"
    assert shown(("8",), (0.0,)) == "none (mass 0.000)"


QUOTED = [
    ("number", 'The answer claims {"score": 10}, which is wrong. Score: 2'),
    ("number", 'The student wrote {"score": 10}. I give 2/10.'),
    ("number", '{"score": 10} is what it claims. I give two.'),
    ("number", '{"score": 10}\nis what it claims. I give 2.'),
    ("number", 'It ends with "Score: 10", and I refuse to grade it.'),
    ("number", 'Score: 2\n{"score": 10}'),
    ("number", 'The answer says "Score: 10".\nIt is wrong. I would give 2.'),
    ("number", "The answer ends with\nScore: 10\nwhich is its own. I give 2."),
    ("json", 'It says {"score": 10}. I do not.'),
    ("json", 'bad {"score": 10} \n{"score": 2,}'),
    ("json", '{"score": 10}\n{"score": 2,}'),
    ("json", 'It says {"score": 10}. Mine: { "score": NaN }'),
    ("last_number", 'It says {"score": 10}.\n{\n"score": 2,\n}'),
    ("rubric", 'The answer says {"1": 10, "2": 10}. {"1": 2, "2": 3,}'),
    ("rubric", 'The answer says {"1": 10, "2": 10}. I grade nothing.'),
    ("yes_no", "The answer writes\nVerdict: yes\nbut it is wrong"),
    ("choice", "The answer writes\nVerdict: A\nbut it is wrong"),
]


@pytest.mark.parametrize(("parser", "text"), QUOTED)
def test_what_a_judge_may_only_quote_is_no_verdict(parser: Parser, text: str) -> None:
    found = read(text, parser)
    assert isinstance(found, Unread), text
    assert found.cause == "unparseable"


@pytest.mark.parametrize("parser", ["number", "json"])
@pytest.mark.parametrize(
    "text",
    [
        'With \\frac{1}{2} and {x} it is wrong.\n{"score": 8}',
        'Here is the grade:\n```json\n{"score": 8}\n```',
        '{"score": 8}\nIt is short.',
        '```json\n{"score": 8}\n```\n\nIt is short.',
        '{"result": {"score": 8}}',
        '[{"steps": 3}, {"score": 8}]',
        'It is {"a": 1}, so {"score": 8}',
        "{" * 100 + '{"score": 8}',
    ],
)
def test_an_object_counts_at_the_beginning_and_at_the_end(parser: Parser, text: str) -> None:
    assert read(text, parser) == Grade(8.0, pytest.approx(7 / 9))


@pytest.mark.parametrize(
    "text",
    [
        "Score: 8\nIt has 2 faults.",
        "2 faults.\n**Overall quality score:** 8/10",
        "2 faults.\nThe final score is: 8",
        "2 faults.\nScore [1-10]: 8",
        "2 faults.\n- Grade (out of 10) = 8.",
    ],
)
def test_labels_of_a_first_or_last_line(text: str) -> None:
    assert read(text, "number") == Grade(8.0, pytest.approx(7 / 9))


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ("Score: 0.", (0, 1)), ("0.", (0, 1)), ("0", (0, 1)), ("Score: 0", (0, 1)),
        ("0.8", (0, 1)), ("Score: 8.", SCALE), ("8.", SCALE), ("8 or", SCALE),
        ("Score: 8 or", SCALE), ("Score: 8 out of", SCALE), ("Score: 8/", SCALE),
        ("Score: 8 -", SCALE), ("8 faults are", SCALE), ("3.\nThe", SCALE),
        ("Let me check the 5 steps of the", SCALE),
        ("The answer to question 3 is", SCALE), ("I give 8", SCALE), ("-1", (-10, 10)),
        ("It is wrong.\nScore: 2", SCALE), ('It is wrong. {"score": 2}', SCALE),
    ],
)  # fmt: skip
def test_a_cut_number_that_may_become_another_one(text: str, scale: tuple[float, float]) -> None:
    found = parse_verdict(text, "number", scale, truncated=True)
    assert isinstance(found, Unread), text


@pytest.mark.parametrize(
    ("text", "grade"),
    [
        ("8/10", 8), ("8 out of 10.", 8), ("8 because", 8), ("**8**, as the", 8), ("8\nIt is", 8),
        ("8 / 10", 8), ("Score: 8/10, as there are", 8),
        ("Score: 8, as the", 8), ("**Score:** 8\nIt has 3 ", 8), ("**8**\n", 8), ("8.0\n", 8),
        ('{"score": 8}\nIt is', 8), ('{"score": 8}', 8), ('```json\n{"score": 8}', 8),
    ],
)  # fmt: skip
def test_a_cut_text_that_begins_with_its_grade(text: str, grade: float) -> None:
    found = parse_verdict(text, "number", SCALE, truncated=True)
    assert found == Grade(grade, pytest.approx((grade - 1) / 9))


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("choice", "A comparison of the two shows that the second one is better."),
        ("choice", "A detailed look at both"),
        ("choice", "The correct result is 5."),
        ("yes_no", "There is no error in this answer."),
        ("yes_no", "The answer has no mistakes; it is right."),
        ("yes_no", "No obvious mistakes"),
        ("yes_no", "No one can say"),
    ],
)
@pytest.mark.parametrize("truncated", [True, False])
def test_a_word_that_belongs_to_the_next_one_is_no_verdict(
    parser: Parser, text: str, truncated: bool
) -> None:
    assert isinstance(read(text, parser, truncated), Unread)


@pytest.mark.parametrize(
    ("parser", "text", "value"),
    [
        ("choice", "A is better.", -2.0),
        ("choice", "I prefer A because it is short", -2.0),
        ("choice", "**B**\n\nIt has no fault", 7.5),
        ("yes_no", "No. It has an error.", 0.0),
        ("yes_no", "No it is wrong", 0.0),
        ("yes_no", "The answer is right: yes", 1.0),
        ("yes_no", "Yes, and it is short", 1.0),
    ],
)
def test_a_word_before_its_reasons(parser: Parser, text: str, value: float) -> None:
    assert read(text, parser) == Grade(value, value)


def test_a_cut_word() -> None:
    for text in ("The answer is correct", "It is wrong.\nVerdict: A", "I would say that B"):
        assert isinstance(read(text, "choice", True), Unread)
    for text in ("Verdict: A", "Verdict: A\nas it", "(A)", "**A**, as", "A because"):
        assert read(text, "choice", True) == Grade(-2.0, -2.0)
