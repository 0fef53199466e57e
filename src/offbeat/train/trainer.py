"""The trainer: a batch of groups becomes new weights, and weights become published versions.

Consumes `Batch`es with their payloads, one a step and in order; produces `StepResult`s,
manifests and checkpoints. All methods block: whoever calls them from an event loop uses a thread.

The invariant: after step t (counted from 0) the trainer holds version t + 1, whatever became of
the step. The gradient is that of the mean over all completion tokens of the step's samples that
have a reward. Samples of advantage 0 add nothing to it: with `train.on_no_signal = "skip"` they
are not computed, but their tokens still count in that mean. A step in which no group has a
signal then computes nothing and leaves weights and optimizer alone; it counts as applied.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offbeat.config import Config
from offbeat.errors import OffbeatError, RunFailed
from offbeat.faults import point
from offbeat.loss import policy_loss
from offbeat.rates import Rate, rate_of
from offbeat.records import Batch, Manifest, Payload, PolicyVersion, Span
from offbeat.track import moments
from offbeat.train import checkpoint
from offbeat.train.batching import plan
from offbeat.train.model import PolicyModel, resolve_device
from offbeat.train.probe import DriftMeter
from offbeat.train.step import StepResult, StepSamples, TokenStatistics, gather, mean
from offbeat.train.twin import twin_of
from offbeat.weights.transport import Transport, make_transport


class Trainer:
    """One trainer on one device. See the module for what holds."""

    def __init__(
        self,
        config: Config,
        *,
        total_steps: int,
        lineage: int = 0,
        publish_folder: Path,
        run_id: str,
        rates: Sequence[Rate] = (),
    ) -> None:
        """`rates`: those of steps before the learning rate was changed, if it was."""
        self.config = config
        self.total_steps = total_steps
        self.lineage = lineage
        self._rates = rates
        self._publish_folder = publish_folder
        self._run_id = run_id
        self._step = 0
        self._updates = 0
        self._bad_steps = 0
        self._no_signal_steps = 0
        self._spans: list[Span] = []
        self._model: PolicyModel | None = None
        self._optimizer: torch.optim.AdamW | None = None
        self._transport: Transport | None = None
        self._meter: DriftMeter | None = None
        self._last: StepResult | None = None  # of the newest step

    @property
    def version(self) -> PolicyVersion:
        """The weights' version: steps done so far."""
        return PolicyVersion(self.lineage, self._step)

    @property
    def model(self) -> PolicyModel:
        """The trained model; there is one after `setup`."""
        if self._model is None:
            raise OffbeatError("the trainer has not been set up")
        return self._model

    def setup(self, resume_from: Path | None = None) -> PolicyVersion:
        """Loads the model, or a checkpoint with the optimizer; returns (lineage, steps done)."""
        config = self.config
        device = resolve_device(config.cluster.device)
        if device.type == "cpu":
            torch.set_num_threads(config.train.threads)
        torch.manual_seed(config.seed)
        self._model = PolicyModel(
            resume_from or config.model.path,
            device=device,
            dtype=config.model.dtype,
            temperature=config.rollout.temperature,
        )
        if config.train.prefix_sharing:
            self._model.check_prefix_sharing(config.rollout.max_context)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=config.train.learning_rate,
            betas=config.train.betas,
            weight_decay=config.train.weight_decay,
            fused=True,
        )
        if resume_from is not None:
            self._restore(resume_from)
        point("trainer.setup")
        self._transport = make_transport(config, device, self._publish_folder, self._run_id)
        self._meter = DriftMeter(self._model, self._transport, config, self.lineage)
        if config.train.max_staleness > 0:  # tokens of the first version come after it has gone
            self._transport.publish(*self._model.tensors(), self.version)
        return self.version

    def step(self, batch: Batch, payloads: Sequence[Sequence[Payload]]) -> StepResult:
        """Trains on one batch; `payloads[i][j]` belongs to `batch.groups[i].samples[j]`.

        A non-finite loss or gradient leaves weights, optimizer and schedule as they were
        (`applied` False); the step number advances all the same. Asked again for the newest step,
        by a loop that had lost its answer, it gives the same answer and trains nothing.

        Raises `RunFailed`, nothing trained: a sample is staler than `train.max_staleness`. Also
        after `train.max_bad_steps` non-finite steps or `train.max_no_signal_steps` steps
        without signal on end.
        """
        started = time.perf_counter()
        point("trainer.before_step")
        if self._last is not None and batch.step == self._last.step:
            return self._last
        if batch.step != self._step:
            raise RunFailed(f"the trainer is at step {self._step} and got batch {batch.step}")
        samples = gather(batch, payloads, self.config.train, self.config.gdpo_weights)
        samples.check_staleness(self.config.train.max_staleness)
        rate = self._learning_rate()
        loss, norm, statistics = 0.0, 0.0, TokenStatistics()
        with self._span("train", samples.tokens):
            if samples.trajectories:
                loss, norm = self._gradient(samples, statistics)
            seconds = time.perf_counter() - started
            drift = self._meter_of().measure(batch, payloads, samples, statistics, seconds)
            applied = math.isfinite(loss) and math.isfinite(norm)
            point("trainer.before_update")
            if applied and samples.trajectories:
                self._update(rate, norm)
            point("trainer.after_update")
        self._optimizer_of().zero_grad(set_to_none=True)
        self._step += 1
        self._updates += applied
        self._count_failures(samples, applied)
        self._last = StepResult(
            step=batch.step,
            applied=applied,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            tokens=samples.tokens,
            computed=statistics.computed,
            micro_batches=len(statistics.ratios),
            no_signal=samples.no_signal,
            staleness=samples.staleness,
            reward_mean=moments.mean(samples.rewards),
            advantage_mean=mean(samples.sample_advantages),
            advantage_abs_mean=mean([abs(a) for a in samples.sample_advantages]),
            seconds=time.perf_counter() - started,
            **statistics.values(),
            **drift,
        )
        return self._last

    def publish(self) -> Manifest:
        """Writes the current version for the engines."""
        if self._transport is None:
            raise OffbeatError("the trainer has not been set up")
        with self._span("publish"):
            point("weights.before_publish")
            tensors, tied = self.model.tensors()
            manifest = self._transport.publish(tensors, tied, self.version)
            point("weights.published", Path(manifest.path) if manifest.kind == "full" else None)
            return manifest

    @contextlib.contextmanager
    def lent(self) -> Iterator[Any]:
        """The module's twin, for who answers with the present weights between two steps."""
        with self._span("validate"):
            yield twin_of(self.model.module)

    def save(
        self, path: Path, extra: dict[str, Any], files: Mapping[str, Path] | None = None
    ) -> None:
        """Writes a checkpoint atomically; `extra` is JSON, `files` are copied in by these names.

        Where `path` is named like a checkpoint (`checkpoint.checkpoint_name`), older ones beside
        it are pruned to the newest `train.keep_checkpoints`, those of `train.keep_every`, and the
        first.
        """
        config = self.config
        if checkpoint.named_otherwise(path, self._step):
            raise RunFailed(f"the trainer is at step {self._step}, which {path.name} is no name of")
        state = checkpoint.TrainerState(
            self.lineage,
            self._step,
            self._updates,
            self._bad_steps,
            self._no_signal_steps,
            extra,
        )

        def fill(folder: Path) -> None:
            self.model.module.save_pretrained(folder)
            point("checkpoint.model", folder)
            checkpoint.copy_tokenizer(config.model.tokenizer or config.model.path, folder)
            checkpoint.copy_files(files or {}, folder)
            record = {"optimizer": self._optimizer_of().state_dict(), "random": _random_state()}
            torch.save(record, folder / checkpoint.OPTIMIZER)
            point("checkpoint.optimizer", folder / checkpoint.OPTIMIZER)

        with self._span("save"):
            checkpoint.write(path, state, fill)
            if path.name == checkpoint.checkpoint_name(self._step):
                train = config.train
                checkpoint.prune(path.parent, self._step, train.keep_checkpoints, train.keep_every)

    def drain_spans(self) -> list[Span]:
        """Compute spans since the last call."""
        spans, self._spans = self._spans, []
        return spans

    def close(self) -> None:
        """Removes the published versions."""
        if self._transport is not None:
            self._transport.close()

    def _gradient(self, samples: StepSamples, statistics: TokenStatistics) -> tuple[float, float]:
        """Accumulates the gradient; returns the loss and the gradient's norm before clipping."""
        train, device = self.config.train, self.model.device
        behaviour = torch.from_numpy(samples.behaviour).to(device)
        advantages = torch.from_numpy(samples.advantages).to(device)
        total = 0.0
        for micro in plan(
            samples.trajectories,
            tokens_per_micro_batch=train.tokens_per_micro_batch,
            prefix_sharing=train.prefix_sharing,
            hidden_size=self.model.hidden_size,
        ):
            source = torch.from_numpy(micro.source).to(device)
            logprobs = self.model.logprobs(micro)
            recorded = behaviour[source]
            terms = policy_loss(
                logprobs,
                recorded,
                advantages[source],
                clip_low=train.clip_low,
                clip_high=train.clip_high,
            )
            loss = terms.sum / samples.tokens
            torch.autograd.backward(loss)
            total += float(loss.detach())
            statistics.add(terms, logprobs.detach(), micro)
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return total, float(torch.nn.utils.get_total_norm(grads))

    def _update(self, rate: float, norm: float) -> None:
        """Clips the gradient and moves the weights."""
        most = self.config.train.max_grad_norm
        if norm + 1e-6 > most:
            parameters = self.model.parameters()
            torch.nn.utils.clip_grads_with_norm_(
                parameters, most, torch.tensor(norm, device=self.model.device)
            )
        optimizer = self._optimizer_of()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()

    def _learning_rate(self) -> float:
        train = self.config.train
        now = rate_of(self._rates, self._step)
        if now is None:
            now = Rate(None, train.learning_rate, self.total_steps)
        return learning_rate(
            self._updates,
            peak=now.learning_rate,
            warmup_steps=train.warmup_steps,
            schedule=train.schedule,
            total_steps=now.total_steps,
        )

    def _count_failures(self, samples: StepSamples, applied: bool) -> None:
        """Ends the run after too many steps on end that taught nothing."""
        train = self.config.train
        self._bad_steps = 0 if applied else self._bad_steps + 1
        self._no_signal_steps = 0 if samples.has_signal else self._no_signal_steps + 1
        if self._bad_steps >= train.max_bad_steps:
            raise RunFailed(
                f"{self._bad_steps} steps on end had a non-finite loss or gradient "
                f"(train.max_bad_steps); the last good step was {self._step - 1 - self._bad_steps}"
            )
        if self._no_signal_steps >= train.max_no_signal_steps:
            raise RunFailed(
                f"{self._no_signal_steps} steps on end had no group with different rewards "
                f"(train.max_no_signal_steps): nothing is learnt; the last step with a signal was "
                f"{self._step - 1 - self._no_signal_steps}"
            )

    def _restore(self, path: Path) -> None:
        state = checkpoint.read(path)
        self._step, self._updates = state.step, state.updates
        self._bad_steps, self._no_signal_steps = state.bad_steps, state.no_signal_steps
        record = torch.load(path / checkpoint.OPTIMIZER, map_location="cpu", weights_only=True)
        self._optimizer_of().load_state_dict(record["optimizer"])
        torch.set_rng_state(record["random"]["cpu"])
        if self.model.device.type == "cuda" and record["random"]["cuda"]:
            torch.cuda.set_rng_state_all(record["random"]["cuda"])

    def _optimizer_of(self) -> torch.optim.AdamW:
        if self._optimizer is None:
            raise OffbeatError("the trainer has not been set up")
        return self._optimizer

    def _meter_of(self) -> DriftMeter:
        if self._meter is None:
            raise OffbeatError("the trainer has not been set up")
        return self._meter

    @contextlib.contextmanager
    def _span(self, kind: str, tokens: int = 0) -> Iterator[None]:
        start, cpu = time.time(), self._cpu_seconds()
        try:
            yield
        finally:
            used = self._cpu_seconds() - cpu
            self._spans.append(Span("train", 0, kind, start, time.time(), used, self._step, tokens))

    def _cpu_seconds(self) -> float:
        """A clock of CPU seconds of this thread, or of the process if torch uses several; on a
        GPU of wall seconds."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.thread_time() if self.config.train.threads == 1 else time.process_time()


def learning_rate(
    update: int, *, peak: float, warmup_steps: int, schedule: str, total_steps: int
) -> float:
    """The rate of an update (counted from 0); above 0 for the first and the last of a run.

    Linear warm-up reaches `peak` at the last of `warmup_steps` updates; then "constant",
    "linear" or "cosine" towards 0, which would be reached one update after the run's last.
    """
    if update < warmup_steps:
        return peak * (update + 1) / warmup_steps
    after = max(1, total_steps - warmup_steps)
    passed = min(update - warmup_steps, after - 1) / after
    if schedule == "linear":
        return peak * (1.0 - passed)
    if schedule == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * passed))
    return peak


def _random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}
