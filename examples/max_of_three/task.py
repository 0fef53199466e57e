"""The largest of three numbers: problems, the exact checker, and answers of every kind.

A prompt holds two worked examples, the same in every prompt so that engines can share
the prefix, and a third to finish:

    max(17,52,8)=52
    max(64,9,31)=64
    max(31,6,77)=

The numbers are uniform in 0..99, a million triples, so the held-out problems are really
unseen. The answer is what stands before the first line's end. An answer without a line's
end is wrong, even if the digits are right: the policy has to learn to stop, and a run may
therefore stop generating at the first newline, provided that the newline stays in the text.

Only the standard library is imported here. Everything follows from fixed seeds.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

Triple = tuple[int, int, int]

WORKED: tuple[Triple, ...] = ((17, 52, 8), (64, 9, 31))
"""The worked examples. The largest stands second in one and first in the other."""

VALIDATION_ROWS = 256
TRAIN_ROWS = 20_000
SEED = 20_251
MAX_TOKENS = 8
"""Enough for any right answer (two digits and a line's end) and for most wrong ones."""


def question(triple: Triple) -> str:
    """The problem alone, `max(31,6,77)`, as judges and scorers see it."""
    return "max({},{},{})".format(*triple)


PREFIX = "".join(f"{question(t)}={max(t)}\n" for t in WORKED)
"""The text that all prompts begin with."""


def prompt(triple: Triple) -> str:
    """The text that the policy continues."""
    return f"{PREFIX}{question(triple)}="


def answer_of(completion: str) -> str | None:
    """The answer in a completion: its first line, stripped; None without a line's end."""
    line, end, _ = completion.partition("\n")
    return line.strip() if end else None


def is_right(completion: str, reference: str) -> bool:
    """Whether the first line is exactly the reference's digits (`052` is not `52`)."""
    return answer_of(completion) == reference


def triples(seed: int, close: float = 0.0) -> Iterator[Triple]:
    """An endless seeded stream of triples; a share `close` of them differ by little."""
    rng = random.Random(seed)
    while True:
        a, b, c = (rng.randrange(100) for _ in range(3))
        if rng.random() < close:
            b = min(99, max(0, a + rng.randint(-12, 12)))
        if rng.random() < close / 2:
            c = min(99, max(0, max(a, b) + rng.randint(-12, 12)))
        values = [a, b, c]
        if close:
            rng.shuffle(values)
        yield (values[0], values[1], values[2])


def distinct(stream: Iterable[Triple], count: int, without: Iterable[Triple]) -> list[Triple]:
    """The first `count` triples of a stream that neither repeat nor occur in `without`."""
    seen, kept = set(without), []
    for triple in stream:
        if triple not in seen:
            seen.add(triple)
            kept.append(triple)
            if len(kept) == count:
                break
    return kept


def held_out(count: int = VALIDATION_ROWS) -> list[Triple]:
    """The first `count` of the fixed held-out problems; no training stream contains them."""
    return distinct(triples(SEED), VALIDATION_ROWS, WORKED)[:count]


def training(count: int = TRAIN_ROWS) -> list[Triple]:
    """The problems that the policy trains on."""
    return distinct(triples(SEED + 1), count, [*WORKED, *held_out()])


# Answers of every kind, to train and to measure judges and scorers.

WORDS = (
    "the", "max", "none", "I do not know", "the largest is", "seventy", "first", "a",
    "Answer:", "The answer is", "max(", "?", "-", "N/A", "error", "print(", "b", "True",
)  # fmt: skip
TAILS = ("", "", "", "", "max(", "max(4", "\n", "\nmax", "max(51,2", "\n\n", "The", "#")
TRAILING = (")", ",", ".", "=", " is", "+1", ".0", ".5", "%", " and", " 1", " max", ":", "-")


def right_completion(rng: random.Random, triple: Triple) -> str:
    """A right answer as a policy may write it: digits, a line's end, perhaps more after it."""
    space = " " if rng.random() < 0.06 else ""
    return f"{space}{max(triple)}\n{rng.choice(TAILS)}"


def _another(rng: random.Random, triple: Triple) -> str:
    others = [n for n in triple if n != max(triple)]
    return str(rng.choice(others)) if others else str(rng.randrange(100))


def _near(rng: random.Random, triple: Triple) -> str:
    best = max(triple)
    step = rng.choice((-1, 1, -10, 10, -2, 2, -11, 9, -9, 11, -20, 20, -3, 3))
    if rng.random() < 0.3:
        digits = list(str(best))
        digits[rng.randrange(len(digits))] = str(rng.randrange(10))
        return "".join(digits) if rng.random() < 0.7 else str(best)[::-1]
    return str(abs(best + step))


def _too_many_digits(rng: random.Random, triple: Triple) -> str:
    number = str(rng.choice((max(triple), max(triple), *triple)))
    digit = str(rng.randrange(10))
    kind = rng.randrange(4)
    if kind == 0:
        return number + digit
    if kind == 1:
        return digit + number
    if kind == 2:
        return "0" + number if rng.random() < 0.5 else number + "0"
    return str(rng.randrange(100, 20_000))


def _several(rng: random.Random, triple: Triple) -> str:
    a, b = rng.sample(triple, 2)
    if rng.random() < 0.3:
        return str(a + b)
    text = f"{a}{rng.choice(',+-* =/')}{b}"
    return text if rng.random() < 0.7 else f"{text},{rng.choice(triple)}"


def _words(rng: random.Random, triple: Triple) -> str:
    word = rng.choice(WORDS)
    kind = rng.randrange(4)
    if kind == 0:
        return f"{word} {rng.choice(triple)}"
    if kind == 1:
        return f"{max(triple)} {word}"
    return word


def _blank(rng: random.Random, triple: Triple) -> str:
    return " " * rng.choice((0, 0, 0, 1, 2))


def _extra(rng: random.Random, triple: Triple) -> str:
    return f"{max(triple)}{rng.choice(TRAILING)}"


def _random(rng: random.Random, triple: Triple) -> str:
    return str(rng.randrange(100))


def _digit(rng: random.Random, triple: Triple) -> str:
    return rng.choice(str(max(triple)) + str(rng.randrange(10)))


WRONG_KINDS = (
    (_another, 34), (_near, 20), (_random, 12), (_too_many_digits, 10), (_digit, 4),
    (_several, 5), (_words, 4), (_blank, 3), (_extra, 5),
)  # fmt: skip
UNFINISHED = 0.10
"""The share of wrong answers whose fault is that no line's end comes."""


def wrong_completion(rng: random.Random, triple: Triple) -> str:
    """A wrong answer of some kind; most end their line and look right but for the value."""
    kinds, weights = zip(*WRONG_KINDS, strict=True)
    reference = str(max(triple))
    while True:
        if rng.random() < UNFINISHED:
            text = reference if rng.random() < 0.6 else rng.choice(kinds)(rng, triple)
            return f"{text}{rng.choice(('', '', *TRAILING))}"
        text = rng.choices(kinds, weights)[0](rng, triple)
        completion = f"{text}\n{rng.choice(TAILS)}"
        if not is_right(completion, reference):
            return completion


def rows(problems: Iterable[Triple]) -> Iterator[dict[str, str]]:
    """The data set's rows: what the policy sees, the right answer, and the bare question."""
    for triple in problems:
        yield {
            "prompt": prompt(triple),
            "reference": str(max(triple)),
            "question": question(triple),
        }


def write_jsonl(path: Path, problems: Iterable[Triple]) -> None:
    """Write the rows of some problems, one JSON object a line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows(problems))
