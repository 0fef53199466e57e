"""The stepping thread's half of the engine: who has a seat, one step, what a load does to them.

A step is one flat forward pass: the pending token of every running sample, and the prompts that
joined. A sample's `length` counts the columns computed in its seat; its newest token is pending
until the next step. `rows[i]` holds seat i. A sample that is resumed joins with its tokens behind
its prompt, as a job of its own: what siblings share is computed once all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from offbeat.errors import RunFailed
from offbeat.records import (
    Completion,
    FinishReason,
    GenerateRequest,
    Manifest,
    Payload,
    PolicyVersion,
    Progress,
    Sampling,
)
from offbeat.rollout.kv import Segment, Tokens, chunked, share_prefixes
from offbeat.rollout.policy_model import PolicyModel
from offbeat.rollout.spans import SpanLog
from offbeat.rollout.stop_strings import StopStrings

OnUpdate = Literal["recompute", "keep_kv"]
Deliver = Callable[[Completion | Progress | BaseException], None]


@dataclass(slots=True, eq=False)
class Job:
    """Samples `indices` of one request on their way; `deliver` is called on the stepping thread.

    `prompt` is what is prefilled: the request's prompt, and behind it the tokens of `resumed`.
    """

    request: GenerateRequest
    prompt: Tokens
    deliver: Deliver
    indices: tuple[int, ...]
    resumed: Payload | None = None
    seated: int = 0

    @property
    def unseated(self) -> int:
        """Samples that have no seat yet."""
        return len(self.indices) - self.seated


def jobs_of(request: GenerateRequest, deliver: Deliver) -> list[Job]:
    """A request's jobs: one for each sample that is resumed, and one for all that begin."""
    prompt = np.asarray(request.prompt_ids, np.int64)
    # What is watched belongs to the first token: such a sample begins anew.
    going_on = () if request.sampling.watch else request.resume
    resumed = {index: tokens for index, tokens in going_on if len(tokens.token_ids)}
    jobs = [
        Job(request, np.concatenate([prompt, tokens.token_ids]), deliver, (index,), tokens)
        for index, tokens in resumed.items()
    ]
    known = request.done | resumed.keys()
    fresh = tuple(index for index in range(request.n) if index not in known)
    return [*jobs, Job(request, prompt, deliver, fresh)] if fresh else jobs


@dataclass(slots=True, eq=False)
class _Row:
    """One running sample."""

    job: Job
    index: int
    stop_ids: frozenset[int]
    length: int
    kv_version: PolicyVersion
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    told: int = 0  # tokens of the newest snapshot
    watched: tuple[float, ...] = ()

    @property
    def sequence(self) -> Tokens:
        """Prompt and tokens but the pending one: what its seat has computed."""
        begun = 0 if self.job.resumed is None else len(self.job.resumed.token_ids)
        return np.concatenate([self.job.prompt, np.array(self.ids[begun:-1], np.int64)])

    def payload(self) -> Payload:
        """A copy of the token arrays so far."""
        return Payload(
            np.array(self.ids, np.int32),
            np.array(self.logprobs, np.float32),
            np.array(self.versions, np.int32),
        )


@dataclass(frozen=True, slots=True)
class _Join:
    """A request's samples that take seats in this step."""

    job: Job
    rows: list[_Row]


class Stepper:
    """Continuous batching over the seats of one model."""

    def __init__(
        self,
        model: PolicyModel,
        *,
        seats: int,
        version: PolicyVersion,
        on_update: OnUpdate,
        prefill_budget: int,
        spans: SpanLog,
    ) -> None:
        self.model = model
        self.seats = seats
        self.version = version
        self.rows: list[_Row] = []
        self.waiting: deque[Job] = deque()
        self._on_update = on_update
        self._budget = prefill_budget
        self._spans = spans
        self._stops = StopStrings(model.decode)
        self._outbox: list[tuple[Job, Completion | Progress]] = []

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.rows and not self.waiting

    def waiting_samples(self) -> int:
        """Samples of taken requests that have no seat yet. Read from other threads, too."""
        return sum(job.unseated for job in tuple(self.waiting))

    def submit(self, jobs: list[Job]) -> None:
        """Queues a request whose size was checked."""
        self.waiting.extend(jobs)

    def cancel(self, jobs: list[Job]) -> None:
        """Frees the request's seats; nothing more is delivered."""
        for job in jobs:
            if job in self.waiting:
                self.waiting.remove(job)
        for seat in reversed(range(len(self.rows))):
            if self.rows[seat].job in jobs:
                self._leave(seat)

    def abort_all(self) -> None:
        """Ends every sample as "aborted", with what it has."""
        for row in self.rows:
            self._finish(row, "aborted")
        for job in self.waiting:
            for index in job.indices[job.seated :]:
                self._finish(self._row(job, index), "aborted")
        self.rows.clear()
        self.waiting.clear()
        self._deliver()

    def fail_all(self, error: BaseException) -> None:
        """Hands the error to every request."""
        jobs = {id(job): job for job in [*self.waiting, *(row.job for row in self.rows)]}
        for job in jobs.values():
            job.deliver(error)
        self.rows.clear()
        self.waiting.clear()

    def step(self) -> None:
        """Emits one token of every running sample, and the first ones of those that join."""
        begun = self._spans.begin()
        running = len(self.rows)
        joins, segments = self._admit()
        logits, items = self._forward(running, segments)
        jobs = [*(row.job for row in self.rows[:running]), *(joins[i].job for i in items)]
        counts = [1] * running + [len(joins[i].rows) for i in items]
        heat = [job.request.sampling.temperature for job in jobs]
        ids, logprobs = self.model.draw(logits, heat, counts)
        for place, item in enumerate(items, running):
            if watch := joins[item].job.request.sampling.watch:
                scores = logits[place].float().log_softmax(-1)
                watched = tuple(scores[list(watch)].tolist())
                for row in joins[item].rows:
                    row.watched = watched
        order = [*range(running)]
        seat = {id(row): i for i, row in enumerate(self.rows)}
        for i in items:
            order.extend(seat[id(row)] for row in joins[i].rows)
        for row in self.rows[:running]:
            row.length += 1
        self._emit(order, ids, logprobs)
        prefilled = sum(len(segment.tokens) for segment in segments)
        kind = "prefill" if prefilled > running else "decode"
        self._spans.end(begun, kind, self.version.step, len(order))
        # After the span: who has the last completion may drain the spans at once.
        self._deliver()

    def load(self, loads: list[tuple[Manifest, Mapping[str, torch.Tensor]]]) -> None:
        """Copies weights; running samples' keys and values are computed anew, or kept."""
        begun = self._spans.begin()
        for manifest, tensors in loads:
            self.model.copy_weights(manifest, tensors)
            self.version = manifest.version
        self._spans.end(begun, "load", self.version.step, 0)
        if self._on_update == "recompute" and self.rows:
            self._recompute()
        self._spans.pause(begun, self.version.step)

    def _recompute(self) -> None:
        begun = self._spans.begin()
        items: list[tuple[Tokens, tuple[int, ...]]] = []
        for seat, row in enumerate(self.rows):
            items.append((row.sequence, (seat,)))
            row.kv_version = self.version
        # What siblings and prompts share is computed once, as at a prefill.
        for chunk in chunked(share_prefixes(items), self._budget):
            self.model.forward([], [], chunk, logits=False)
        self._spans.end(begun, "prefill", self.version.step, 0)

    def _admit(self) -> tuple[list[_Join], list[Segment]]:
        """Seats who waits, first come first served, up to the free seats and the budget."""
        joins: list[_Join] = []
        fresh: list[tuple[Tokens, tuple[int, ...]]] = []
        fresh_joins: list[int] = []
        late: list[Segment] = []
        left = self._budget
        while self.waiting and len(self.rows) < self.seats:
            job = self.waiting[0]
            sibling = self._sibling(job)
            cost = 1 if sibling is not None else _cost(job.prompt, fresh)
            if joins and cost > left:
                break
            left -= cost
            first = len(self.rows)
            join = self._seat(job, self.seats - first)
            seats = tuple(range(first, len(self.rows)))
            if sibling is None:
                fresh.append((job.prompt, seats))
                fresh_joins.append(len(joins))
            else:
                # The prompt lies in a sibling's seat: only its last token is computed again.
                self.model.cache.copy(sibling, seats, len(job.prompt) - 1)
                late.append(Segment(job.prompt[-1:], len(job.prompt) - 1, seats, len(joins)))
            joins.append(join)
        segments = [
            Segment(
                segment.tokens,
                segment.start,
                segment.seats,
                fresh_joins[segment.item] if segment.item >= 0 else -1,
            )
            for segment in share_prefixes(fresh)
        ]
        return joins, late + segments

    def _seat(self, job: Job, free: int) -> _Join:
        """Gives the request's next samples their seats; it waits on if some remain."""
        indices = job.indices[job.seated : job.seated + free]
        rows = [self._row(job, index) for index in indices]
        self.rows.extend(rows)
        job.seated += len(rows)
        if not job.unseated:
            self.waiting.popleft()
        return _Join(job, rows)

    def _row(self, job: Job, index: int) -> _Row:
        row = _Row(job, index, self.stop_ids(job.request.sampling), len(job.prompt), self.version)
        if job.resumed is not None:
            row.ids = job.resumed.token_ids.tolist()
            row.logprobs = job.resumed.logprobs.tolist()
            row.versions = job.resumed.versions.tolist()
            row.told = len(row.ids)
        return row

    def stop_ids(self, sampling: Sampling) -> frozenset[int]:
        """Tokens that end a sample."""
        end = self.model.eos_token_id
        return frozenset(
            sampling.stop_token_ids if end is None else (*sampling.stop_token_ids, end)
        )

    def _sibling(self, job: Job) -> int | None:
        """A seat that holds this request's prompt, computed by the current weights."""
        if not job.seated:
            return None
        for seat, row in enumerate(self.rows):
            if row.job is job and row.kv_version == self.version:
                return seat
        return None

    def _forward(
        self, running: int, segments: list[Segment]
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Runs the step's passes (more than one only for a prompt beyond the budget)."""
        pending = [row.ids[-1] for row in self.rows[:running]]
        lengths = [row.length for row in self.rows[:running]]
        found: list[torch.Tensor] = []
        items: list[int] = []
        chunks = list(chunked(segments, self._budget)) or [[]]
        for number, chunk in enumerate(chunks):
            decoding = number == 0
            logits, part = self.model.forward(
                pending if decoding else [], lengths if decoding else [], chunk, logits=True
            )
            items.extend(part)
            if logits is not None:
                found.append(logits)
        return (found[0] if len(found) == 1 else torch.cat(found)), tuple(items)

    def _emit(self, order: list[int], ids: list[int], logprobs: list[float]) -> None:
        step = self.version.step
        ended: list[int] = []
        for seat, token, logprob in zip(order, ids, logprobs, strict=True):
            row = self.rows[seat]
            if not -1e30 < logprob <= 1e-3:
                raise RunFailed(f"version {self.version} gives a log-prob of {logprob}")
            row.ids.append(token)
            row.logprobs.append(logprob)
            row.versions.append(step)
            reason = self.reason_to_end(row.job.request.sampling, row.ids, row.stop_ids)
            if reason is not None:
                self._finish(row, reason)
                ended.append(seat)
            elif 0 < row.job.request.snapshot_every <= len(row.ids) - row.told:
                self._tell(row)
        for seat in sorted(ended, reverse=True):
            self._leave(seat)

    def reason_to_end(
        self, sampling: Sampling, ids: Sequence[int], stop_ids: frozenset[int]
    ) -> FinishReason | None:
        """Why a sample ends with its newest token, whichever engine made those before it."""
        if ids[-1] in stop_ids or (sampling.stop and self._stops.check(ids, sampling.stop)):
            return "stop"
        return "length" if len(ids) >= sampling.max_tokens else None

    def _tell(self, row: _Row) -> None:
        row.told = len(row.ids)
        progress = Progress(row.job.request.request_id, row.index, row.told, row.payload())
        self._outbox.append((row.job, progress))

    def _finish(self, row: _Row, reason: FinishReason) -> None:
        completion = Completion(
            request_id=row.job.request.request_id,
            index=row.index,
            text=self.model.decode(row.ids),
            tokens=len(row.ids),
            version_min=min(row.versions, default=self.version.step),
            version_max=max(row.versions, default=self.version.step),
            finish_reason=reason,
            ref=row.payload(),
            watched=row.watched,
        )
        self._outbox.append((row.job, completion))

    def _deliver(self) -> None:
        for job, item in self._outbox:
            job.deliver(item)
        self._outbox.clear()

    def _leave(self, seat: int) -> None:
        """Frees a seat; the last running sample moves into it, so that seats stay compact."""
        last = self.rows.pop()
        if seat < len(self.rows):
            self.rows[seat] = last
            self.model.cache.move(len(self.rows), seat, last.length)


def _cost(prompt: Tokens, joined: list[tuple[Tokens, tuple[int, ...]]]) -> int:
    """New tokens that a prompt adds beside those that join with it (at most this many)."""
    if not joined:
        return len(prompt)
    other = joined[0][0]
    size = min(len(prompt), len(other))
    differs = np.flatnonzero(prompt[:size] != other[:size])
    return len(prompt) - (int(differs[0]) if len(differs) else size - 1)
