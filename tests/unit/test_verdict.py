"""Verdict texts: what is a grade, what is not, and never anything else (J1, J2, J3)."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.reward.verdict import Grade, Parser, Unread, parse_verdict

SCALE = (1.0, 10.0)


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


@pytest.mark.parametrize("parser", ["number", "yes_no", "json"])
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
    ],
    ids=lambda text: f"{text[:4]!r}x{len(text)}",
)
def test_j2_bounded_time(parser: Parser, text: str) -> None:
    start = time.thread_time()
    assert isinstance(parse_verdict(text, parser, SCALE), Unread)
    assert time.thread_time() - start < 0.5


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


TEXTS = st.one_of(
    st.text(),
    st.text(alphabet='0123456789.-+/ \n:{}"scoreSCOREgadeinfNaNyesno*%,eE', max_size=60),
    st.from_regex(r"(Score|Grade)?:? ?-?[0-9]{1,3}(\.[0-9]+)?(/10)?( or [0-9])?", fullmatch=True),
    st.builds('{{"score": {}}}'.format, st.one_of(st.floats(), st.integers(), st.text())),
)


@settings(max_examples=250, deadline=None)
@given(
    text=TEXTS,
    parser=st.sampled_from(["number", "yes_no", "json"]),
    scale=st.sampled_from([(1.0, 10.0), (0.0, 1.0), (-5.0, 5.0), (0.5, 0.75)]),
    truncated=st.booleans(),
)
def test_never_raises_never_leaves_the_scale(
    text: str, parser: Parser, scale: tuple[float, float], truncated: bool
) -> None:
    read = parse_verdict(text, parser, scale, truncated=truncated)
    if isinstance(read, Grade):
        assert 0.0 <= read.value <= 1.0
        if parser != "yes_no":
            assert scale[0] <= read.grade <= scale[1]
    else:
        assert read.cause in {"unparseable", "out_of_range"}


@settings(max_examples=200, deadline=None)
@given(grade=st.floats(1, 10).map(lambda x: round(x, 3)), form=st.sampled_from(["{}", "**{}**"]))
def test_every_grade_of_the_scale_is_read(grade: float, form: str) -> None:
    read = parse_verdict(form.format(grade), "number", SCALE)
    assert read == Grade(grade, pytest.approx((grade - 1) / 9))
