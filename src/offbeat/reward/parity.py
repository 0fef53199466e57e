"""Whether all ways to score a row give the same number: the check before a scorer may train.

Pure: replicas say what they found (`RowCheck`), `difference` compares, `DisRM` refuses. The ways
are transformers with a row alone and in a padded batch, and each replica with a row alone and with
all of them together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

SHOWN = 40


@dataclass(frozen=True, slots=True)
class CheckRow:
    """A row of the check: the text, and the ids that the replica's tokenizer makes of it."""

    text: str
    ids: tuple[int, ...]

    def __str__(self) -> str:
        text = self.text if len(self.text) <= SHOWN else f"{self.text[:SHOWN]}..."
        tokens = "1 token" if len(self.ids) == 1 else f"{len(self.ids)} tokens"
        return f"{text!r}, {tokens}"


@dataclass(frozen=True, slots=True)
class RowCheck:
    """What one replica gives for the rows, each list in their order.

    `alone` and `together` are the replica's own scores of single rows and of all at once.
    `transformers` and `padded` are those of the model in plain transformers, a row at a time and
    in a padded batch; None where the replica was not asked for them, or the model is too large to
    be loaded a second time. `relative` is how far two scores may differ: see `allowed`.
    """

    rows: tuple[CheckRow, ...] = ()
    alone: tuple[float, ...] = ()
    together: tuple[float, ...] = ()
    transformers: tuple[float, ...] | None = None
    padded: tuple[float, ...] | None = None
    relative: float = 1e-3


Kind = Literal["not_finite", "padding", "backend", "replicas", "batch"]


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs (of which kind, for the mend) and where, in words with both numbers."""

    kind: Kind
    words: str


def allowed(wanted: Sequence[float], relative: float) -> float:
    """How far a score may be from the wanted one: `relative` is a share of how far the wanted
    scores lie apart, or of a tenth of their size where all rows get about the same."""
    spread = max(wanted) - min(wanted)
    return relative * max(spread, 0.1 * max(map(abs, wanted)))


def difference(checks: Mapping[str, RowCheck]) -> Difference | None:
    """The worst difference of the first kind that there is, over all replicas by their names."""
    return next(_differences(checks), None)


def _differences(checks: Mapping[str, RowCheck]) -> Iterator[Difference]:
    first, check = next(iter(checks.items()))
    if not check.rows:
        return
    for name, other in checks.items():
        yield from _found("not_finite", _not_finite(name, other))
    if check.transformers is not None:
        plain, whose = check.transformers, "transformers, the row alone"
        if check.padded is not None:
            padded = _worst(check, check.padded, "transformers in a padded batch", plain, whose)
            yield from _found("padding", padded)
        alone = _worst(check, check.alone, f"{first}, the row alone", plain, whose)
        yield from _found("backend", alone)
    for name, other in checks.items():
        if other.rows != check.rows:
            yield Difference("replicas", _encoded(first, check, name, other))
        me, whose = f"{name}, the row alone", f"{first}, the row alone"
        yield from _found("replicas", _worst(other, other.alone, me, check.alone, whose))
    for name, other in checks.items():
        me, whose = f"{name}, all rows together", f"{name}, the row alone"
        yield from _found("batch", _worst(other, other.together, me, other.alone, whose))


def _found(kind: Kind, words: str | None) -> Iterator[Difference]:
    if words is not None:
        yield Difference(kind, words)


def _not_finite(name: str, check: RowCheck) -> str | None:
    """The first score that is no finite number, in words."""
    for who, scores in (
        ("transformers, the row alone", check.transformers or ()),
        ("transformers in a padded batch", check.padded or ()),
        (f"{name}, the row alone", check.alone),
        (f"{name}, all rows together", check.together),
    ):
        for place, score in enumerate(scores):
            if not math.isfinite(score):
                return f"{_where(check, place)}: {who}: {score}"
    return None


def _worst(
    check: RowCheck, found: Sequence[float], who: str, wanted: Sequence[float], whose: str
) -> str | None:
    """The row where two ways differ by most, in words; None if nowhere too much."""
    limit = allowed(wanted, check.relative)
    gaps = [abs(a - b) for a, b in zip(found, wanted, strict=True)]
    worst = max(range(len(gaps)), key=lambda i: gaps[i])
    if gaps[worst] <= limit:
        return None
    return (
        f"{_where(check, worst)}: {who}: {found[worst]:.6g}; {whose}: {wanted[worst]:.6g}; "
        f"{limit:.2g} apart is allowed"
    )


def _where(check: RowCheck, place: int) -> str:
    return f"row {place + 1} of {len(check.rows)} ({check.rows[place]})"


def _encoded(first: str, check: RowCheck, name: str, other: RowCheck) -> str:
    rows = zip(check.rows, other.rows, strict=False)
    mine, theirs = next(((a, b) for a, b in rows if a != b), (check.rows[-1], other.rows[-1]))
    return (
        f"{first} reads {len(check.rows)} rows, {mine} among them, where {name} reads "
        f"{len(other.rows)}, and {theirs} instead"
    )
