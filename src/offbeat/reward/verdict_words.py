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
_BESIDE = re.compile(
    r"\s+(?!(?:and|as|because|but|for|here|i|in|is|it|overall|since|the|this|was|wins|with)(?!\w))\w",
    re.IGNORECASE,
)
"""A word behind a verdict that makes it part of another one's: `A detailed look`, `no error`."""
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
    A single letter counts in its own case only, or as the whole text. A word counts where a
    sentence or a reason follows it, not where it belongs to the next word (`no error`, `A look`).
    Where reasons name several verdicts, or deny one, a last line like `Verdict: A` decides; such a
    line amid others may be quoted.
    """
    said = _said(text, _compiled(tuple(choices)), truncated)
    if isinstance(said, Unread):
        return said
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


def _said(text: str, words: _Words, truncated: bool) -> set[str] | Unread:
    """The verdicts of a text."""
    alone = words.bare.get(_bare(text)) or _labelled(text, words, truncated)
    if alone is not None:
        return {alone} if isinstance(alone, str) else alone
    denied = _denied(text, words.pattern)
    if denied is not None:
        return Unread("unparseable", f"a negated verdict: {denied[:60]}")
    matches = list(words.pattern.finditer(text))
    if matches and all(_BESIDE.match(text, match.end()) for match in matches):
        return Unread("unparseable", f"no verdict alone: {matches[0][0][:60]}")
    if truncated and matches and not _begins(text[: matches[0].start()]):
        return Unread("unparseable", "cut before its verdict is sure: raise max_tokens")
    return {words.verdicts[match.lastindex - 1] for match in matches if match.lastindex}


def _begins(before: str) -> bool:
    """Whether nothing, or only a label, stands in front of a verdict."""
    return not _LABELS.sub("", before[-60:]).strip(_DECORATION) and len(before) <= 60


def _labelled(text: str, words: _Words, truncated: bool) -> str | Unread | None:
    """The verdict of a last line that is a label and a verdict; other such lines must agree.

    `Unread` where such a line stands amid others, or the last one may go on.
    """
    found: list[str | None] = []
    for line in text.splitlines():
        if not line.strip(_DECORATION):
            continue
        head, mark, rest = line.partition(":" if ":" in line else "=")
        labelled = mark and _LABELS.search(head[-60:])
        found.append(words.bare.get(_bare(rest)) if labelled else None)
    if not any(found) or (found[0] is not None and (truncated or found[-1] is None)):
        return None
    if found[-1] is None or truncated:
        return Unread("unparseable", "a verdict amid other lines")
    return found[-1] if {*found} <= {found[-1], None} else None


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
