"""Verdicts as a tree of tokens: where to look for their probabilities, and how they add up (pure).

A judge may say a verdict in several ways: `8` or ` 8`, `yes` or `Yes`, each of one token or more,
as its tokenizer writes them behind the prompt. All ways together make a tree: its inner nodes are
what has been said so far, and the judge is asked at each of them how likely the tokens below it
come next. The probability of a verdict is that the judge's words begin with it and with no longer
one: where `1` is said and could go on to `10`, what goes on is counted there and not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Path = tuple[int, ...]
"""Token ids behind the prompt."""
Found = Mapping[Path, Mapping[int, float]]
"""Of nodes that were asked: the probability of each token below."""

AT_ONCE = 4
"""Inner nodes behind the root that are asked together with it; of more only those that count."""
NEGLIGIBLE = 1e-6
"""The probability of a node that is not asked."""
BEHIND = 3
"""Tokens of the prompt that a spelling may depend on."""
_ANCHORS = (":", "\n", "(")
"""Texts to spell behind, where the prompt's end would merge with what follows."""


class CannotSpell(ValueError):
    """The tokenizer has no tokens for a verdict, or the same ones for two."""


@dataclass(frozen=True, slots=True)
class Tree:
    """`ends` are the ways to say a verdict, by its number; `below` the tokens that lead on from
    each inner node, the root `()` first, shorter paths before longer ones."""

    verdicts: tuple[str, ...]
    ends: Mapping[Path, int]
    below: Mapping[Path, tuple[int, ...]]

    @property
    def depth(self) -> int:
        """Tokens of the longest way."""
        return max(map(len, self.ends))

    def to_ask(self, found: Found) -> list[Path]:
        """The nodes that are to be asked next; none when all that counts is known."""
        if not found and len(self.below) <= 1 + AT_ONCE:
            return list(self.below)
        return [
            node
            for node in self.below
            if node not in found and (not node or node[:-1] in found)
            and self._mass(node, found) >= (NEGLIGIBLE if node else 0)
        ]  # fmt: skip

    def probabilities(self, found: Found) -> tuple[float, ...]:
        """Of each verdict, in order; at most 1 together."""
        sums = [0.0] * len(self.verdicts)
        for path, verdict in self.ends.items():
            mass = self._mass(path, found)
            sums[verdict] += mass
            shorter = next(
                (e for n in range(len(path) - 1, 0, -1) if (e := path[:n]) in self.ends), None
            )
            if shorter is not None:
                sums[self.ends[shorter]] -= mass
        return tuple(min(1.0, max(0.0, each)) for each in sums)

    def _mass(self, path: Path, found: Found) -> float:
        """How likely the judge's words begin with these tokens; 0 where nobody asked."""
        mass = 1.0
        for place, token in enumerate(path):
            mass *= found.get(path[:place], {}).get(token, 0.0)
        return mass


def ways(verdicts: Sequence[str]) -> list[tuple[str, ...]]:
    """The texts that say each verdict: in the usual cases, where no other verdict is meant then,
    and with a space in front."""
    cases = [_cases(each) for each in verdicts]
    found = []
    for number, own in enumerate(cases):
        others = set(verdicts[:number]) | set(verdicts[number + 1 :])
        others |= {text for i, more in enumerate(cases) if i != number for text in more}
        clear = sorted((own - others) | {verdicts[number]})
        found.append(tuple(space + text for text in clear for space in ("", " ")))
    return found


def _cases(verdict: str) -> set[str]:
    """A letter is itself: `a` is more often a word than the choice A."""
    if len(verdict) == 1:
        return {verdict}
    return {verdict, verdict.lower(), verdict.upper(), verdict[:1].upper() + verdict[1:]}


def spell(tokenizer: Any, prompt: Sequence[int], verdicts: Sequence[str]) -> Tree:
    """The tree of the verdicts behind a prompt; raises `CannotSpell`."""
    if not verdicts or not all(each.strip() == each != "" for each in verdicts):
        raise CannotSpell("a verdict is empty or has white space around it")
    behind = list(prompt[-BEHIND:])
    anchors = _anchors(tokenizer, behind)
    ends: dict[Path, int] = {}
    for number, texts in enumerate(ways(verdicts)):
        paths = {path for text in texts for path in _paths(tokenizer, behind, anchors, text)}
        if not paths:
            raise CannotSpell(f'it has no tokens for "{verdicts[number]}"')
        for path in sorted(paths):
            other = ends.setdefault(path, number)
            if other != number:
                said = f'"{verdicts[other]}" and "{verdicts[number]}"'
                raise CannotSpell(f"it has the same tokens for {said}")
    below: dict[Path, set[int]] = {}
    for path in ends:
        for place, token in enumerate(path):
            below.setdefault(path[:place], set()).add(token)
    inner = sorted(below, key=lambda node: (len(node), node))
    return Tree(tuple(verdicts), ends, {node: tuple(sorted(below[node])) for node in inner})


def _anchors(tokenizer: Any, behind: list[int]) -> list[tuple[str, Path]]:
    texts = dict.fromkeys((_decode(tokenizer, behind), *_ANCHORS))
    return [(text, _encode(tokenizer, text)) for text in texts if text]


def _paths(
    tokenizer: Any, behind: list[int], anchors: Sequence[tuple[str, Path]], text: str
) -> list[Path]:
    """The tokens of a text behind the prompt; none that would not be read as that text there."""
    found: list[Path] = []
    wanted = _decode(tokenizer, behind) + text
    for anchor, begun in anchors:
        whole = _encode(tokenizer, anchor + text)
        path = whole[len(begun) :]
        if whole[: len(begun)] != begun or not path or path in found:
            continue
        if _decode(tokenizer, [*behind, *path]) == wanted:
            found.append(path)
    return found


def _encode(tokenizer: Any, text: str) -> Path:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )
