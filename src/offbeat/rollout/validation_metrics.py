"""From a validation's answers to its numbers (pure).

Means are over what is there: a completion that the checker did not score, and a reward that failed
or abstained, enter none of them and are counted. A number without anything to be the mean of is
nan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from offbeat.records import FinishReason, Reward
from offbeat.track.ranks import spearman

RIGHT = 0.5
"""A completion is right for pass@k when the checker's score is above this."""
MOST_SOURCES = 50
"""Data sources told apart at most: a column with more values is no column of data sources."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion of held-out prompt `place`. `score` is the checker's, None where it has none;
    `total` the combined reward, None where it was dropped or nothing was asked."""

    place: int
    tokens: int
    finish_reason: FinishReason
    score: float | None = None
    rewards: Mapping[str, Reward] = field(default_factory=dict)
    total: float | None = None


def summarise(
    answers: Sequence[Answer],
    *,
    samples: int,
    sources: Sequence[str | None],
    rewards: Iterable[str] = (),
) -> dict[str, float]:
    """The metrics of a validation.

    `sources` are the prompts' data sources (None where the row has none), one for each of the n
    prompts; `samples` completions were asked for of each; `rewards` names the reward sources.

    `accuracy` is the mean score over completions; `n` counts prompts; `unscored` the completions
    without a score, those that the engine refused among them; `truncated` is the share that ended
    at max_tokens. With several data sources `accuracy/<data source>` and `n/<data source>` follow;
    with several samples `pass@k`; `reward` is the mean total, `reward/<source>` the mean of a
    reward source's values, `failed/<source>` counts its failures, and `agreement/<source>` is the
    rank correlation (Spearman's) of its values and the checker's scores.
    """
    scores = [answer.score for answer in answers if answer.score is not None]
    found = {
        "accuracy": mean(scores),
        "n": float(len(sources)),
        "mean_tokens": mean([float(answer.tokens) for answer in answers]),
        "truncated": mean([float(answer.finish_reason == "length") for answer in answers]),
        "unscored": float(len(sources) * samples - len(scores)),
    }
    found |= _pass_at(answers, samples)
    found |= _by_data_source(answers, sources)
    return found | _rewards(answers, rewards)


def pass_at_k(scored: int, right: int, k: int) -> float:
    """Chance that one of `k` of `scored` completions is right, `right` of them being so: the
    unbiased estimator 1 - C(scored - right, k) / C(scored, k) (arXiv 2107.03374)."""
    if not (0 <= right <= scored and 1 <= k <= scored):
        raise ValueError(f"{right} right of {scored}, and k = {k}")
    return 1.0 - math.comb(scored - right, k) / math.comb(scored, k)


def ks(samples: int) -> list[int]:
    """The k of pass@k: 1, 2, 4, ... below the number of samples, and that number."""
    found = [2**power for power in range(samples.bit_length()) if 2**power < samples]
    return [*found, samples]


def mean(values: Sequence[float]) -> float:
    """The mean, nan of nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def _pass_at(answers: Sequence[Answer], samples: int) -> dict[str, float]:
    """pass@k over the prompts with at least k scored completions."""
    if samples == 1:
        return {}
    by_prompt: dict[int, list[bool]] = {}
    for answer in answers:
        if answer.score is not None:
            by_prompt.setdefault(answer.place, []).append(answer.score > RIGHT)
    return {
        f"pass@{k}": mean(
            [pass_at_k(len(of), sum(of), k) for of in by_prompt.values() if len(of) >= k]
        )
        for k in ks(samples)
    }


def _by_data_source(answers: Sequence[Answer], sources: Sequence[str | None]) -> dict[str, float]:
    names = sorted({source for source in sources if source is not None})
    if not names or len(names) > MOST_SOURCES:
        return {}
    scores: dict[str, list[float]] = {name: [] for name in names}
    for answer in answers:
        source = sources[answer.place]
        if source is not None and answer.score is not None:
            scores[source].append(answer.score)
    found: dict[str, float] = {}
    for name in names:
        found[f"accuracy/{name}"] = mean(scores[name])
        found[f"n/{name}"] = float(sum(source == name for source in sources))
    return found


def _rewards(answers: Sequence[Answer], names: Iterable[str]) -> dict[str, float]:
    """An "abstained" with a cause is a failure that `on_failure` turned into no opinion."""
    found: dict[str, float] = {}
    for name in names:
        of = [answer.rewards[name] for answer in answers if name in answer.rewards]
        values = [r.value for r in of if r.status == "scored" and r.value is not None]
        found[f"reward/{name}"] = mean(values)
        found[f"failed/{name}"] = float(sum(reward.cause is not None for reward in of))
        if any(answer.score is not None for answer in answers):
            found[f"agreement/{name}"] = _agreement(answers, name)
    if found:
        totals = [answer.total for answer in answers if answer.total is not None]
        found = {"reward": mean(totals), **found}
    return found


def _agreement(answers: Sequence[Answer], name: str) -> float:
    """Over answers that have both; nan where either never changes."""
    pairs = [
        (reward.value, answer.score)
        for answer in answers
        if answer.score is not None
        and (reward := answer.rewards.get(name)) is not None
        and reward.status == "scored"
        and reward.value is not None
    ]
    found = spearman([value for value, _ in pairs], [score for _, score in pairs])
    return math.nan if found is None else found
