"""Settings of a judge's verdicts that do not go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.config_reward import RewardSourceSection

MOST_GRADES = 101
"""Whole grades whose probabilities are asked for at most."""

_GRADES = ("number", "last_number", "json", "choice", "expected")
_FITS = {
    "grade": _GRADES,
    "grade_reference": _GRADES,
    "correct": ("yes_no", "choice", "expected"),
}
_MARKUP = " \t\r\n*_`\"'()[]{}.,;:!#>"


def check_verdicts(section: RewardSourceSection) -> None:
    """Raises `ValueError`, which begins with a setting's name, for what no verdict could meet."""
    _check_votes(section)
    _check_choices(section)
    _check_expected(section)
    _check_template(section)
    if any(not criterion.strip() for criterion in section.rubric):
        raise ValueError("rubric has an empty criterion; write each one as a text")


def _check_votes(section: RewardSourceSection) -> None:
    if section.votes == 1:
        return
    if section.parser == "expected":
        raise ValueError(
            f'votes = {section.votes} with parser = "expected", whose probabilities are the same '
            "every time; leave votes out"
        )
    if section.temperature == 0:
        raise ValueError(
            f"votes = {section.votes} with temperature = 0 would be the same verdict "
            f"{section.votes} times; set temperature above 0, or votes to 1"
        )


def _check_choices(section: RewardSourceSection) -> None:
    choices = section.choices
    if section.parser == "choice" and not choices and section.pairwise is None:
        raise ValueError(
            'choices is missing; parser = "choice" needs verdicts with their values, '
            "e.g. {correct = 1, wrong = 0}"
        )
    if choices and section.pairwise is None and section.parser not in {"choice", "expected"}:
        raise ValueError(
            f'choices is set, and parser = "{section.parser}" reads none of them; set parser to '
            '"choice" or "expected"'
        )
    said: dict[str, str] = {}
    for verdict in choices:
        bare = " ".join(verdict.casefold().split()).strip(_MARKUP)
        if not any(character.isalnum() for character in bare) or verdict != verdict.strip():
            raise ValueError(f"choices has the verdict {verdict!r}; write each one as a word")
        if bare in said:
            raise ValueError(
                f"choices has {said[bare]!r} and {verdict!r}, which a judge's words do not tell "
                "apart; rename one"
            )
        said[bare] = verdict
    if section.pairwise is not None:
        _check_preferences(choices)


def _check_preferences(choices: Mapping[str, float]) -> None:
    for verdict, share in choices.items():
        if not 0 <= share <= 1:
            raise ValueError(
                f"choices.{verdict} = {share:g} with pairwise must be within 0 to 1: the share of "
                "the comparison that goes to the answer shown first"
            )


def _check_expected(section: RewardSourceSection) -> None:
    if section.pairwise is not None:
        if section.parser not in {"number", "choice", "expected"}:
            raise ValueError(
                f'parser = "{section.parser}" reads no preference; leave it out with pairwise, '
                'or set it to "expected"'
            )
        return
    if section.parser != "expected" or section.choices:
        return
    low, high = section.scale
    if low != int(low) or high != int(high) or high - low >= MOST_GRADES:
        raise ValueError(
            f'scale = {list(section.scale)} with parser = "expected" must be of whole grades, '
            f"{MOST_GRADES} at most: the probability of each is asked for; or set choices"
        )


def _check_template(section: RewardSourceSection) -> None:
    """A ready template asks for what the parser reads; one of the user's own may do anything."""
    name = str(section.template)
    if name == "pairwise" and section.pairwise is None:
        raise ValueError(
            'template = "pairwise" compares two answers; set pairwise = "circular" or "all" too'
        )
    if section.pairwise is not None and name in {*_FITS, "rubric"}:
        raise ValueError(
            f'template = "{name}" shows one answer, and pairwise compares two; leave template '
            'out, or set it to "pairwise"'
        )
    if name in _FITS and section.parser not in _FITS[name]:
        raise ValueError(
            f'template = "{name}" does not ask for what parser = "{section.parser}" reads; it '
            f"goes with {', '.join(_FITS[name])}"
        )
    if name == "correct" and section.parser == "expected" and not section.choices:
        raise ValueError(
            'template = "correct" with parser = "expected" needs choices, e.g. {yes = 1, no = 0}'
        )
