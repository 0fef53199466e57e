"""The probe: a few of a step's samples, evaluated under the weights of the version that made them.

The trainer has moved on since most of a batch was generated, so its own forward pass says nothing
about the engine. The transport still has the newest versions: for one of them a handful of samples
is computed again, without gradient, under exactly its weights. The weights are put into the model
and taken out again by reference: on the CPU nothing is copied.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.config import Config
from offbeat.errors import OffbeatError
from offbeat.records import Batch, Payload, PolicyVersion
from offbeat.train.batching import Trajectory, plan
from offbeat.train.drift import (
    MIN_TOKENS,
    DriftContext,
    DriftStats,
    Floats,
    beyond,
    compare,
    diagnose,
)
from offbeat.train.model import PolicyModel, resolve_dtype
from offbeat.train.step import StepSamples, TokenStatistics, compare_newest
from offbeat.weights.packed import dtype_name
from offbeat.weights.transport import Transport

log = logging.getLogger(__name__)
MOST_SAMPLES = 4
MOST_TOKENS = 2048
SHARE = 0.15
"""Input tokens of the probe to those of the step: a forward pass is a third of a step's work."""
TIME_SHARE = 0.05
FREE_SECONDS = 0.02
"""Of a step's time a probe may take so much on average, beyond seconds that are not counted."""
ENOUGH_TOKENS = 256
"""Tokens of the current version (or a quarter of all) that make a probe needless."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Samples whose last tokens `version` made; arrays (T,) of their concatenated completions.

    `chosen`: tokens that the version made; `mixed`: those of samples that an earlier one began.
    """

    version: int
    trajectories: list[Trajectory]
    engine: Floats
    chosen: NDArray[np.bool_]
    mixed: NDArray[np.bool_]


def choose(
    batch: Batch, payloads: Sequence[Sequence[Payload]], versions: Sequence[int], computed: int
) -> Probe | None:
    """A handful of the batch's samples for the version of `versions` that ended most of them.

    Half of them are mixed where there are such. `computed`: input tokens of the step. Samples of
    versions not in `versions` are passed over; None if no other is left.
    """
    ended: dict[int, list[tuple[Trajectory, Payload]]] = {}
    for group, found in zip(batch.groups, payloads, strict=True):
        for payload in found:
            pair = Trajectory(group.prompt.token_ids, payload.token_ids), payload
            ended.setdefault(int(payload.versions[-1]), []).append(pair)
    known = [version for version in ended if version in versions]
    if not known:
        return None
    version = max(known, key=lambda v: (len(ended[v]), v))
    # Spread over the groups, mixed and unmixed in turns.
    pairs = ended[version][:: max(1, len(ended[version]) // (4 * MOST_SAMPLES))]
    mixed = [pair for pair in pairs if pair[1].versions[0] != version]
    plain = [pair for pair in pairs if pair[1].versions[0] == version]
    turns = [pair for both in zip(mixed, plain, strict=False) for pair in both]
    turns += mixed[len(plain) :] + plain[len(mixed) :]
    kept: list[tuple[Trajectory, Payload]] = []
    left = min(MOST_TOKENS, int(SHARE * computed))
    for pair in turns[:MOST_SAMPLES]:
        left -= len(pair[0].inputs)
        if kept and left < 0:
            break
        kept.append(pair)
    made = [payload.versions == version for _, payload in kept]
    return Probe(
        version,
        [trajectory for trajectory, _ in kept],
        np.concatenate([p.logprobs for _, p in kept]).astype(np.float64),
        np.concatenate(made),
        np.concatenate(
            [m & (p.versions[0] != version) for m, (_, p) in zip(made, kept, strict=True)]
        ),
    )


@torch.no_grad()
def evaluate(
    model: PolicyModel,
    probe: Probe,
    tokens_per_micro_batch: int,
    dtype: torch.dtype | None = None,
) -> Floats:
    """(T,) log-probs of the probe's tokens under the weights that the model holds, in its compute
    type or another."""
    found = np.full(len(probe.engine), np.nan)
    for micro in plan(
        probe.trajectories, tokens_per_micro_batch=tokens_per_micro_batch, prefix_sharing=False
    ):
        found[micro.source] = model.logprobs(micro, dtype).double().cpu().numpy()
    return found


@contextlib.contextmanager
def holding(model: PolicyModel, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The model holds other weights meanwhile; its own come back whatever happens.

    On a GPU, weights that lie elsewhere are copied there: room for a second set is needed.
    """
    own = {
        name: t for name, t in model.module.state_dict(keep_vars=True).items() if name in weights
    }
    saved = {name: tensor.data for name, tensor in own.items()}
    try:
        for name, tensor in own.items():
            tensor.data = weights[name].to(model.device, tensor.dtype)
        yield
    finally:
        for name, tensor in own.items():
            tensor.data = saved[name]


class DriftMeter:
    """Compares engine and trainer at every step, before the update; remembers the diagnosis.

    A probe runs where the current version made too few of the step's tokens, and takes at most 5 %
    of the time (and 20 ms, for tiny steps): one that took longer is followed by steps without.
    Those, and steps whose versions are all gone, are compared under the newest weights if there is
    nothing better, and keep the last diagnosis.
    """

    def __init__(
        self, model: PolicyModel, transport: Transport, config: Config, lineage: int
    ) -> None:
        self._model, self._transport, self._lineage = model, transport, lineage
        self._budget = config.train.tokens_per_micro_batch
        self._engine_dtype = resolve_dtype(config.rollout_dtype, model.device)
        self._context = DriftContext(
            engine_dtype=dtype_name(self._engine_dtype),
            trainer_dtype=dtype_name(model.compute_dtype),
            on_update=config.rollout.on_update,
            temperature=config.rollout.temperature,
        )
        self._credit = 0.0
        self._diagnosis: str | None = None

    def measure(
        self,
        batch: Batch,
        payloads: Sequence[Sequence[Payload]],
        samples: StepSamples,
        statistics: TokenStatistics,
        seconds: float,
    ) -> dict[str, Any]:
        """The fields of `StepResult` about drift, by name; `seconds`: the step's so far."""
        newest = statistics.newest(samples)
        stats, everything = compare_newest(samples, newest, batch.step)
        self._credit += TIME_SHARE * seconds
        trained = len(newest)
        enough = trained > 0 and stats.tokens >= min(ENOUGH_TOKENS, trained // 4)
        wanted = beyond(stats, self._context) if enough else True
        if wanted and (self._credit >= 0 or not trained):
            started = time.perf_counter()
            try:
                stats = self._probe(batch, payloads, stats, statistics.computed, enough)
            except (OffbeatError, OSError, RuntimeError) as error:
                # boundary: a measurement that fails (no memory) never ends training
                log.warning("engine and trainer were not compared: %s", error)
            self._credit -= max(0.0, time.perf_counter() - started - FREE_SECONDS)
        if not stats.tokens:
            stats = everything
        if stats.exact and stats.tokens >= MIN_TOKENS:
            self._diagnosis = diagnose(stats, self._context)
        return {
            "logprob_diff_mean": stats.mean,
            "logprob_diff_p99": stats.p99,
            "logprob_diff_max": stats.max,
            "logprob_diff_outside": stats.outside,
            "logprob_diff_tokens": stats.tokens,
            "logprob_diff_exact": stats.exact,
            "drift": self._diagnosis,
        }

    def _probe(
        self,
        batch: Batch,
        payloads: Sequence[Sequence[Payload]],
        stats: DriftStats,
        computed: int,
        enough: bool,
    ) -> DriftStats:
        """`stats` with what a probe adds: tokens, and if they are off how other versions fit."""
        kept = {v.step: v for v in self._transport.kept() if v.lineage == self._lineage}
        steps = [batch.step, *(step for step in kept if step != batch.step)]
        exact = True
        probe = choose(batch, payloads, steps, computed)
        if probe is None:  # made by versions that are all gone
            made = sorted({int(v) for group in payloads for p in group for v in p.versions[-1:]})
            probe, exact = choose(batch, payloads, made, computed), False
            if probe is None or computed:
                return stats
        own = probe.version if exact else batch.step
        values = self._under(None if own == batch.step else kept[own], probe)
        if not enough and probe.chosen.sum() > stats.tokens:
            found = compare(
                probe.engine[probe.chosen],
                values[probe.chosen],
                probe.mixed[probe.chosen],
                exact=exact,
            )
            stats = replace(found, by_lag=stats.by_lag, ratio_outside=stats.ratio_outside)
        if not beyond(stats, self._context):
            return stats
        under = {own: values}
        for step in steps:
            if step != own:
                under[step] = self._under(None if step == batch.step else kept[step], probe)
        tokens = probe.chosen & ~probe.mixed
        tokens = tokens if tokens.any() else probe.chosen
        fits = {s: float(np.abs(v - probe.engine)[tokens].mean()) for s, v in under.items()}
        like = None
        if self._engine_dtype != self._model.compute_dtype:
            held = None if own == batch.step else kept[own]
            rounded = self._under(held, probe, self._engine_dtype)
            like = float(np.abs(rounded - probe.engine)[tokens].mean())
        return replace(stats, version=probe.version, fits=fits, like_engine=like)

    def _under(
        self, version: PolicyVersion | None, probe: Probe, dtype: torch.dtype | None = None
    ) -> Floats:
        """The probe's log-probs under a kept version (None: what the model holds)."""
        if version is None:
            return evaluate(self._model, probe, self._budget, dtype)
        with holding(self._model, self._transport.recall(version)):
            return evaluate(self._model, probe, self._budget, dtype)
