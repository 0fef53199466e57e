"""What goes into a trainer step and what comes out of it: plain values and numpy arrays.

The invariant: a sample keeps its own payload, reward and advantage. One without a reward is left
out and shifts no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.advantage import Advantages, batch_scaled, gdpo_advantages, group_advantages
from offbeat.config import TrainSection
from offbeat.errors import RunFailed
from offbeat.loss import LossTerms
from offbeat.records import Batch, Group, Payload
from offbeat.train.batching import MicroBatch, Trajectory
from offbeat.train.drift import RATIO_BAND, DriftStats, Floats, compare, outside_band

Number = TypeVar("Number", np.float32, np.int32, np.bool_)


@dataclass(frozen=True, slots=True)
class StepSamples:
    """A batch's samples with a reward.

    `tokens` counts the completion tokens of all of them: the mean's denominator. `trajectories`
    are those to compute (all, or those with advantage != 0), and the arrays (N,) belong to the
    concatenation of their completions; `mixed` are tokens of samples that another version began.
    `ordinals` and `staleness` are per sample with a reward,
    in the batch's order; `no_signal` names the groups whose advantages are all 0.
    """

    trajectories: list[Trajectory]
    behaviour: NDArray[np.float32]
    advantages: NDArray[np.float32]
    versions: NDArray[np.int32]
    mixed: NDArray[np.bool_]
    tokens: int
    ordinals: tuple[int, ...]
    staleness: tuple[int, ...]
    no_signal: tuple[int, ...]
    groups: int
    rewards: tuple[float, ...]
    sample_advantages: tuple[float, ...]

    @property
    def has_signal(self) -> bool:
        """Some group's advantages differ from 0."""
        return len(self.no_signal) < self.groups

    def check_staleness(self, bound: int) -> None:
        """Raises `RunFailed` naming the ordinal, if a sample is staler than the bound."""
        for ordinal, staleness in zip(self.ordinals, self.staleness, strict=True):
            if not 0 <= staleness <= bound:
                raise RunFailed(
                    f"prompt {ordinal} reached the trainer with staleness {staleness}, outside "
                    f"0 to train.max_staleness = {bound}: nothing was trained on it"
                )


def batch_advantages(
    batch: Batch, train: TrainSection, gdpo: Mapping[str, float] | None
) -> list[Advantages]:
    """One `Advantages` a group; `gdpo` are the weights of the sources to normalise one by one, of
    which a group's count that its row picks."""
    if gdpo is None:
        return [
            group_advantages(
                [sample.total for sample in group.samples],
                algorithm=train.algorithm,
                eps=train.advantage_eps,
                min_scored=train.min_scored,
            )
            for group in batch.groups
        ]
    found = [
        gdpo_advantages(
            [None if sample.total is None else sample.parts for sample in group.samples],
            {name: weight for name, weight in gdpo.items() if name in _sources(group)},
            eps=train.advantage_eps,
            min_scored=train.min_scored,
            vetoed=[sample.vetoed for sample in group.samples],
        )
        for group in batch.groups
    ]
    scaled = batch_scaled([one.values[one.mask] for one in found], eps=train.advantage_eps)
    for one, values in zip(found, scaled, strict=True):
        one.values[one.mask] = values
    return found


def _sources(group: Group) -> set[str]:
    return {name for sample in group.samples for name in (*sample.rewards, *sample.parts)}


def gather(
    batch: Batch,
    payloads: Sequence[Sequence[Payload]],
    train: TrainSection,
    gdpo: Mapping[str, float] | None = None,
) -> StepSamples:
    """Pairs samples with payloads and advantages; see `StepSamples` and `batch_advantages`."""
    kept: list[tuple[Payload, float, Trajectory]] = []
    ordinals, staleness, no_signal = [], [], []
    rewards, values, tokens = [], [], 0
    found = batch_advantages(batch, train, gdpo)
    for group, group_payloads, advantages in zip(batch.groups, payloads, found, strict=True):
        if not advantages.signal:
            no_signal.append(group.prompt.ordinal)
        triples = zip(group.samples, group_payloads, advantages.values, strict=True)
        for sample, payload, advantage in triples:
            if sample.total is None:
                continue
            _check_aligned(payload, group.prompt.ordinal)
            tokens += len(payload.token_ids)
            ordinals.append(group.prompt.ordinal)
            staleness.append(batch.step - int(payload.versions.min()))
            rewards.append(sample.total)
            values.append(float(advantage))
            if advantage != 0.0 or train.on_no_signal == "train":
                trajectory = Trajectory(group.prompt.token_ids, payload.token_ids)
                kept.append((payload, float(advantage), trajectory))
    lengths = [len(payload.token_ids) for payload, _, _ in kept]
    return StepSamples(
        trajectories=[trajectory for _, _, trajectory in kept],
        behaviour=_joined([p.logprobs for p, _, _ in kept], np.float32),
        advantages=np.repeat(np.array([a for _, a, _ in kept], dtype=np.float32), lengths),
        versions=_joined([p.versions for p, _, _ in kept], np.int32),
        mixed=_joined([p.versions != p.versions[0] for p, _, _ in kept], np.bool_),
        tokens=tokens,
        ordinals=tuple(ordinals),
        staleness=tuple(staleness),
        no_signal=tuple(no_signal),
        groups=len(batch.groups),
        rewards=tuple(rewards),
        sample_advantages=tuple(values),
    )


def _check_aligned(payload: Payload, ordinal: int) -> None:
    lengths = {len(payload.token_ids), len(payload.logprobs), len(payload.versions)}
    if len(lengths) != 1 or 0 in lengths:
        raise RunFailed(
            f"a sample of prompt {ordinal} has {len(payload.token_ids)} tokens, "
            f"{len(payload.logprobs)} log-probs and {len(payload.versions)} versions: all must "
            f"be the same number, at least 1"
        )


def _joined(parts: list[NDArray[Number]], kind: type[Number]) -> NDArray[Number]:
    return np.concatenate([np.zeros(0, kind), *parts]).astype(kind)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did.

    `tokens`: completion tokens of all samples with a reward. `computed`: input tokens that went
    through the model, each shared prefix once, padding not counted; `micro_batches` of them.
    `loss`: mean over `tokens`; `grad_norm`: before clipping. Over the computed completion tokens:
    `ratio_mean` and `ratio_outside` (share outside 0.9 to 1.1) of pi / mu before the update,
    `clip_fraction`; NaN where there are none. `logprob_diff_*`: |trainer - engine| in nats over
    `logprob_diff_tokens` tokens, the trainer's under the weights of the version that made each, so
    that it measures the engine and not the policy's change; where those weights are gone, under
    the newest ones (`logprob_diff_exact` False). `logprob_diff_outside`: share of these tokens
    with a ratio outside 0.9 to 1.1. `drift`: what `drift.diagnose` says of it.
    """

    step: int
    applied: bool
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    computed: int
    micro_batches: int
    no_signal: tuple[int, ...]
    staleness: tuple[int, ...]
    ratio_mean: float
    ratio_outside: float
    clip_fraction: float
    logprob_diff_mean: float
    logprob_diff_p99: float
    logprob_diff_max: float
    logprob_diff_outside: float
    logprob_diff_tokens: int
    logprob_diff_exact: bool
    drift: str | None
    reward_mean: float
    advantage_mean: float
    advantage_abs_mean: float
    seconds: float


@dataclass(slots=True)
class TokenStatistics:
    """Collects over a step's micro-batches what `StepResult` says about tokens."""

    ratios: list[Tensor] = field(default_factory=list)
    clipped: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    sources: list[NDArray[np.int64]] = field(default_factory=list)
    computed: int = 0

    def add(self, terms: LossTerms, logprobs: Tensor, micro: MicroBatch) -> None:
        """One micro-batch: its loss terms, and the trainer's log-probs before the update."""
        self.ratios.append(terms.ratios)
        self.clipped.append(terms.clipped_count)
        self.logprobs.append(logprobs)
        self.sources.append(micro.source)
        self.computed += micro.computed

    def values(self) -> dict[str, Any]:
        """The fields of `StepResult` about ratios, by name."""
        ratios = torch.cat(self.ratios or [torch.zeros(0)]).double().cpu().numpy()
        outside = (ratios < RATIO_BAND[0]) | (ratios > RATIO_BAND[1])
        clipped = sum(int(count) for count in self.clipped)
        return {
            "ratio_mean": mean(ratios),
            "ratio_outside": mean(outside),
            "clip_fraction": clipped / len(ratios) if len(ratios) else float("nan"),
        }

    def newest(self, samples: StepSamples) -> Floats:
        """(N,) the trainer's log-probs of all tokens under the weights before the update."""
        found = np.full(len(samples.behaviour), np.nan)
        if self.sources:
            found[np.concatenate(self.sources)] = torch.cat(self.logprobs).double().cpu().numpy()
        return found


def compare_newest(
    samples: StepSamples, newest: Floats, step: int
) -> tuple[DriftStats, DriftStats]:
    """Of the tokens that the current version made (exact) and of all tokens, from the training's
    own forward pass; both with what each lag adds."""
    engine = samples.behaviour.astype(np.float64)
    current = samples.versions == step
    exact = compare(engine[current], newest[current], samples.mixed[current], exact=True)
    everything = compare(engine, newest, samples.mixed, exact=False)
    off, lags = np.abs(newest - engine), step - samples.versions
    by_lag = {int(lag): float(off[lags == lag].mean()) for lag in np.unique(lags)}
    share = outside_band(newest - engine)
    return (
        replace(exact, by_lag=by_lag, ratio_outside=share),
        replace(everything, by_lag=by_lag, ratio_outside=share),
    )


def mean(values: NDArray[Any] | Sequence[float]) -> float:
    """The mean; NaN of nothing."""
    return float(np.mean(values)) if len(values) else float("nan")
