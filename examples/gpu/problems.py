"""Word problems of two to four steps with exact answers, made from a seed: five families.

Each family draws whole numbers such that every step comes out whole, and writes its steps in
GSM8K's form, the last line `#### answer`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

NAMES = (
    "Ada",
    "Ben",
    "Chloe",
    "Dev",
    "Elif",
    "Femi",
    "Grace",
    "Hugo",
    "Ines",
    "Jun",
    "Kofi",
    "Lea",
)
GOODS = ("notebooks", "apples", "candles", "stamps", "mugs", "plants", "ribbons", "marbles")


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, the worked steps that end in `#### answer`, and the answer."""

    question: str
    steps: str
    answer: int


def problems(seed: int) -> Iterator[Problem]:
    """Endless distinct problems; the same for the same seed."""
    rng = random.Random(seed)
    seen: set[str] = set()
    while True:
        problem = rng.choice(FAMILIES)(rng)
        if problem.question not in seen:
            seen.add(problem.question)
            yield problem


def _problem(question: str, steps: list[str], answer: int) -> Problem:
    return Problem(question, "\n".join([*steps, f"#### {answer}"]), answer)


def shopping(rng: random.Random) -> Problem:
    """Two kinds of goods and the change: three steps."""
    name, (one, other) = rng.choice(NAMES), rng.sample(GOODS, 2)
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    price_a, price_b = rng.randint(2, 12), rng.randint(2, 12)
    cost_a, cost_b = a * price_a, b * price_b
    paid = (cost_a + cost_b) // 50 * 50 + 50
    change = paid - cost_a - cost_b
    question = (
        f"{name} buys {a} {one} at ${price_a} each and {b} {other} at ${price_b} each, and pays "
        f"with ${paid}. How many dollars of change does {name} get?"
    )
    steps = [
        f"The {one} cost {a} * {price_a} = {cost_a}.",
        f"The {other} cost {b} * {price_b} = {cost_b}.",
        f"The change is {paid} - {cost_a} - {cost_b} = {change}.",
    ]
    return _problem(question, steps, change)


def sharing(rng: random.Random) -> Problem:
    """A part is given away and the rest is shared: three steps."""
    name, good = rng.choice(NAMES), rng.choice(GOODS)
    friends, each, given = rng.randint(2, 8), rng.randint(3, 15), rng.randint(2, 20)
    boxes = rng.choice([n for n in range(2, 7) if (friends * each + given) % n == 0] or [1])
    total = friends * each + given
    per_box = total // boxes
    question = (
        f"{name} has {boxes} box{'es' if boxes > 1 else ''} of {per_box} {good}. {given} of the "
        f"{good} go to a neighbour, and {friends} friends share the rest equally. How many {good} "
        "does each friend get?"
    )
    steps = [
        f"There are {boxes} * {per_box} = {total} {good}.",
        f"After the gift {total} - {given} = {total - given} are left.",
        f"Each friend gets {total - given} / {friends} = {each}.",
    ]
    return _problem(question, steps, each)


def discount(rng: random.Random) -> Problem:
    """A price goes down by a percentage and several are bought: three steps."""
    name, good = rng.choice(NAMES), rng.choice(GOODS)
    percent, price, count = (
        rng.choice((10, 20, 25, 40, 50)),
        20 * rng.randint(1, 9),
        rng.randint(2, 8),
    )
    off = price * percent // 100
    question = (
        f"A set of {good} costs ${price}. In a sale it is {percent}% cheaper. How many dollars "
        f"does {name} pay for {count} sets?"
    )
    steps = [
        f"The sale takes off {price} * {percent} / 100 = {off}.",
        f"A set then costs {price} - {off} = {price - off}.",
        f"{count} sets cost {count} * {price - off} = {count * (price - off)}.",
    ]
    return _problem(question, steps, count * (price - off))


def journey(rng: random.Random) -> Problem:
    """Two legs at their own speeds: two steps, or three with the way back."""
    name = rng.choice(NAMES)
    fast, slow = rng.randint(30, 90), rng.randint(5, 25)
    hours, more = rng.randint(2, 6), rng.randint(2, 5)
    first, second = fast * hours, slow * more
    back = rng.random() < 0.5
    asked = "in all, there and back the same way" if back else "in all"
    question = (
        f"{name} drives for {hours} hours at {fast} km an hour and then cycles for {more} hours "
        f"at {slow} km an hour. How many kilometres does {name} travel {asked}?"
    )
    answer = (first + second) * (2 if back else 1)
    steps = [
        f"By car: {hours} * {fast} = {first}. By bicycle: {more} * {slow} = {second}.",
        f"One way is {first} + {second} = {first + second}.",
    ]
    if back:
        steps.append(f"There and back is 2 * {first + second} = {answer}.")
    return _problem(question, steps, answer)


def savings(rng: random.Random) -> Problem:
    """Pay by the hour, a regular cost, and a goal: four steps."""
    name = rng.choice(NAMES)
    rate, hours, days = rng.randint(8, 20), rng.randint(3, 8), rng.randint(3, 6)
    spent = rng.randint(5, rate * hours * days // 2)
    week = rate * hours * days - spent
    weeks, extra = rng.randint(2, 9), rng.randint(10, 200)
    question = (
        f"{name} earns ${rate} an hour, works {hours} hours a day on {days} days a week, and "
        f"spends ${spent} of it every week. {name} had ${extra} at the start. How many dollars "
        f"does {name} have after {weeks} weeks?"
    )
    steps = [
        f"A week's pay is {rate} * {hours} * {days} = {rate * hours * days}.",
        f"Of it {rate * hours * days} - {spent} = {week} are saved.",
        f"In {weeks} weeks that is {weeks} * {week} = {weeks * week}.",
        f"With the start it is {weeks * week} + {extra} = {weeks * week + extra}.",
    ]
    return _problem(question, steps, weeks * week + extra)


FAMILIES: tuple[Callable[[random.Random], Problem], ...] = (
    shopping,
    sharing,
    discount,
    journey,
    savings,
)
