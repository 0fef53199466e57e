"""Which reward sources score a row (pure): its own list, else the sources' own conditions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offbeat.config import RewardSourceSection


class BadPick(ValueError):
    """A row's choice of sources cannot be used; the message says why and the mend."""


def picked(
    columns: Mapping[str, Any],
    sources: Mapping[str, RewardSourceSection],
    column: str,
    known: tuple[str, ...] = (),
) -> tuple[str, ...]:
    """The names of the sources that score a row with these columns, in the configuration's order.

    A row that has `column` names them itself, as a text or a list of texts; `known` are further
    names that it may hold (configured, but not in use). For other rows it is all sources whose
    `when` is true of the row. Raises `BadPick` for unknown names, for a value that is no name, and
    for a row that no source of role "add" with a weight scores.
    """
    named = columns.get(column) if column else None
    if named is None:
        chosen = {name for name, section in sources.items() if _applies(section, columns)}
        how = "no reward source's `when` is true of it; give one source no `when`"
    else:
        chosen = _names(named, column, {*sources, *known})
        how = f"{column} = {named!r} leaves no source that adds to the reward; name one"
    names = tuple(name for name in sources if name in chosen)
    if not any(sources[name].role == "add" and sources[name].weight for name in names):
        raise BadPick(how)
    return names


def _names(value: Any, column: str, known: set[str]) -> set[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise BadPick(
            f"{column} = {value!r:.80} is no list of reward sources; mend the row, or set "
            "data.reward_column to another name if that column means something else"
        )
    for name in names:
        if name not in known:
            raise BadPick(
                f'{column} names "{name}", which is no reward source; there are '
                + ", ".join(sorted(known))
            )
    return set(names)


def _applies(section: RewardSourceSection, columns: Mapping[str, Any]) -> bool:
    return all(_is(columns.get(key), wanted) for key, wanted in section.when.items())


def _is(value: Any, wanted: Any) -> bool:
    """A value of the row, or one of its values, is the wanted one or one of these."""
    wanted_ones = wanted if isinstance(wanted, list | tuple) else [wanted]
    there = value if isinstance(value, list | tuple) else [value]
    return any(one in wanted_ones for one in there)
