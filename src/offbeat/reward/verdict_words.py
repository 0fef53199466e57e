"""Verdicts that are one of some words (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from offbeat.reward.grade import Grade, Unread

_PHRASES = re.compile(r"[.:;!?\n]+")
_NOT = re.compile(
    r"(?<!\w)(?:not|never|neither|nor|cannot|without|hardly|\w+n['\u2019]t)(?!\w)", re.IGNORECASE
)
_BEFORE = r"(?<![^\W_])(?<![^\W_]_)(?<!-)(?<![^\W_]['\u2019])(?<![0-9][.,/])"
_AFTER = r"(?![^\W_]|_[^\W_]|[-+]|['\u2019][^\W_]|[.,/][0-9])"
_LABELS = re.compile(
    r"(?<!\w)(?:verdict|choice|preference|winner|score|grade|rating|judge?ment)(?!\w)",
    re.IGNORECASE,
)
_DECORATION = " \t\r\n*_`\"'()[]{}.,;:!#>"
_MARK = "\x01"
_SHORT = 400


@dataclass(frozen=True, slots=True)
class _Words:
    """The verdicts, longest first, the pattern with a group for each, and them by bare form."""

    verdicts: tuple[str, ...]
    pattern: re.Pattern[str]
    bare: Mapping[str, str]


def choice_in_text(text: str, choices: Mapping[str, float], truncated: bool) -> Grade | Unread:
    """The value of the one verdict of a text: a whole word that nothing before it denies.

    Of two verdicts that begin alike the longer one is found (`partly correct`, not `correct`).
    A single letter counts in its own case only, or as the whole text. Where reasons name several
    verdicts, or deny one, a last line like `Verdict: A` decides.
    """
    words = _compiled(tuple(choices))
    alone = words.bare.get(_bare(text)) or _last_line(text, words)
    if alone is not None:
        said = {alone}
    else:
        denied = _denied(text, words.pattern)
        if denied is not None:
            return Unread("unparseable", f"a negated verdict: {denied[:60]}")
        matches = words.pattern.finditer(text)
        said = {words.verdicts[match.lastindex - 1] for match in matches if match.lastindex}
    if not said:
        return Unread("unparseable", f"none of {_list(choices)}")
    values = {choices[verdict] for verdict in said}
    if len(values) > 1:
        return Unread("unparseable", f"several verdicts: {_list(sorted(said))}")
    if truncated and any(_could_go_on(text, verdict, choices) for verdict in said):
        return Unread("unparseable", "cut within a verdict: raise max_tokens")
    value = float(values.pop())
    return Grade(value, value)


@lru_cache(maxsize=64)
def _compiled(choices: tuple[str, ...]) -> _Words:
    verdicts = tuple(sorted(choices, key=len, reverse=True))
    groups = []
    for verdict in verdicts:
        words = r"\s+".join(map(re.escape, verdict.split()))
        exact = len(verdict) == 1 and verdict.isalpha()
        groups.append(f"({words})" if exact else f"((?i:{words}))")
    pattern = re.compile(f"{_BEFORE}(?:{'|'.join(groups) or '(?!)'}){_AFTER}")
    return _Words(verdicts, pattern, {_bare(verdict): verdict for verdict in verdicts})


def _bare(text: str) -> str:
    """A short text without its markup, for comparison; empty for a long one."""
    return " ".join(text.casefold().split()).strip(_DECORATION) if len(text) <= _SHORT else ""


def _last_line(text: str, words: _Words) -> str | None:
    """The verdict of a last line that is a label and a verdict; other such lines must agree."""
    found: list[str | None] = []
    for line in text.splitlines():
        if not line.strip(_DECORATION):
            continue
        head, mark, rest = line.partition(":" if ":" in line else "=")
        labelled = mark and _LABELS.search(head[-60:])
        found.append(words.bare.get(_bare(rest)) if labelled else None)
    last = found[-1] if found else None
    return last if {*found} <= {last, None} else None


def _denied(text: str, pattern: re.Pattern[str]) -> str | None:
    """A verdict in whose phrase something before it denies it; its own words deny nothing."""
    for phrase in _PHRASES.split(pattern.sub(lambda match: _MARK * len(match[0]), text)):
        last = phrase.rfind(_MARK)
        denial = _NOT.search(phrase) if last >= 0 else None
        if denial is not None and denial.start() < last:
            return phrase.replace(_MARK, "").strip() or "verdict"
    return None


def _could_go_on(text: str, verdict: str, choices: Mapping[str, float]) -> bool:
    """Whether the verdict ends the text and more words would make it another one."""
    said, ends = _bare(verdict), _bare(text[-_SHORT:]).endswith(_bare(verdict))
    others = (other for other in choices if choices[other] != choices[verdict])
    return ends and any(_bare(other).startswith(said) for other in others)


def _list(words: Iterable[str]) -> str:
    return ", ".join(list(words)[:8])[:120]
