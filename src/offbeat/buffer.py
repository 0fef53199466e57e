"""Live groups by deadline: what may be admitted, and which groups may be batched.

The invariant, from which everything else follows: with `G` groups a step, the live groups sorted by
deadline d0 <= d1 <= ... are *feasible* at the next trainer step `t`, that is every
`d[i] >= t + i // G`. Admission, batching, retries and discards each keep it, so that every group is
trained at or before its deadline, and `deadline = floor + max_staleness` bounds its staleness.
`docs/staleness.md` has the proof. Pure: no clock, no I/O, no task.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice


class BufferStateError(ValueError):
    """A call that would break the staleness bound, or names a group that is not live."""


@dataclass(slots=True)
class _Live:
    attempt: int
    deadline: int
    ready: bool


@dataclass(frozen=True, slots=True)
class BufferSnapshot:
    """The buffer at one moment, for metrics.

    `live`, `ready`, `max_live` are groups; `floor` is a version step, `next_step` a trainer step,
    each the newest that the buffer was told. `slack` is how many steps the tightest live group may
    still be passed over, counting those due before it (0: a group has to be in the next batch;
    None: nothing is live).
    """

    live: int
    ready: int
    max_live: int
    floor: int
    next_step: int
    slack: int | None


def feasible(deadlines: Sequence[int], step: int, groups_per_step: int) -> bool:
    """Whether groups with these ascending `deadlines` (steps) can all be trained in time.

    The first `groups_per_step` of them are trained at `step`, the next ones at `step + 1`, and so
    on; true if nobody is trained after its deadline.
    """
    return all(due >= step + i // groups_per_step for i, due in enumerate(deadlines))


class Buffer:
    """Live groups by deadline. A group is live from its admission until it is taken or discarded.

    Args:
        max_staleness: steps, >= 0; 0 is synchronous training.
        groups_per_step: groups in one trainer step, >= 1.

    Raises:
        BufferStateError: an argument is out of range.
    """

    def __init__(self, max_staleness: int, groups_per_step: int) -> None:
        if max_staleness < 0 or groups_per_step < 1:
            raise BufferStateError(
                f"max_staleness must be >= 0 and groups_per_step >= 1, "
                f"got {max_staleness} and {groups_per_step}"
            )
        self.max_staleness = max_staleness
        self.groups_per_step = groups_per_step
        self._groups: dict[int, _Live] = {}
        self._order: list[tuple[int, int]] = []  # (deadline, ordinal), ascending; one per group
        self._ready = 0  # how many of the groups are ready
        self._floor = 0
        self._next_step = 0  # invariant: `_order` is feasible at this step

    @property
    def max_live(self) -> int:
        """The most groups that can be live at once."""
        return (self.max_staleness + 1) * self.groups_per_step

    def live(self) -> int:
        """How many groups are live: admitted, and neither taken nor discarded."""
        return len(self._groups)

    def is_live(self, ordinal: int, attempt: int) -> bool:
        """Whether this very attempt of this group is live (a result of any other is ignored)."""
        group = self._groups.get(ordinal)
        return group is not None and group.attempt == attempt

    def deadline(self, ordinal: int) -> int:
        """The last trainer step that may consume this live group.

        Raises:
            BufferStateError: the group is not live.
        """
        return self._group(ordinal).deadline

    def can_admit(self, floor: int, next_step: int) -> bool:
        """Whether a group admitted now keeps the live groups feasible.

        Args:
            floor: the lowest version step that every routable engine has acknowledged.
            next_step: the trainer step whose batch has not been taken yet.

        Raises:
            BufferStateError: `floor` or `next_step` fell, or `floor` is ahead of `next_step`.
        """
        self._check_floor(floor, next_step)
        return self._fits(floor + self.max_staleness, next_step)

    def admit(self, ordinal: int, attempt: int, floor: int, next_step: int) -> int:
        """Admits a group and returns its deadline, `floor + max_staleness`.

        Every token of it must come from a version step >= `floor`: it may only be sent to engines
        that are routable when it is sent.

        Raises:
            BufferStateError: infeasible (ask `can_admit` first), already live, or see `can_admit`.
        """
        self._check_floor(floor, next_step)
        deadline = floor + self.max_staleness
        self._add(ordinal, attempt, deadline, next_step, ready=False)
        self._floor = floor
        return deadline

    def restore(
        self, ordinal: int, attempt: int, deadline: int, next_step: int, *, ready: bool
    ) -> None:
        """Puts back a group whose tokens survived a restart, with the deadline it had.

        A group whose tokens did not survive is instead admitted anew as `attempt + 1`: engines
        may now be at a lower step than when it was first admitted.

        Raises:
            BufferStateError: infeasible, already live, or `next_step` fell.
        """
        self._check_step(next_step)
        self._add(ordinal, attempt, deadline, next_step, ready=ready)

    def ready(self, ordinal: int, attempt: int) -> bool:
        """Marks a group ready to be trained. False, and no effect, unless this attempt is live."""
        if not self.is_live(ordinal, attempt):
            return False
        group = self._groups[ordinal]
        self._ready += not group.ready
        group.ready = True
        return True

    def may_be_taken(self) -> bool:
        """Whether enough groups are ready for a batch, were it the last one."""
        return self._ready >= min(self.groups_per_step, len(self._order))

    def retry(
        self,
        ordinal: int,
        attempt: int,
        floor: int | None = None,
        *,
        keeps_tokens: bool = False,
    ) -> int:
        """Starts a failed group again as `attempt + 1` in its live place; returns its deadline.

        All tokens of the new attempt come from version steps >= the current floor, so its deadline
        becomes `floor + max_staleness`. The floor never falls, so this is never earlier than
        before, and a later deadline keeps every set feasible: a retry needs no room. With
        `keeps_tokens` (a sample of the old attempt stays) the old deadline stays too. Only
        after `restore` can the current floor be below the one that gave the old deadline; then
        the deadline becomes earlier, and that must be feasible.

        Args:
            ordinal: the group.
            attempt: the attempt that failed; it must be the live one (see `is_live`).
            floor: the current floor; None takes the newest that the buffer was told.
            keeps_tokens: the new attempt keeps tokens of the old one.

        Raises:
            BufferStateError: that attempt is not live, `floor` fell or is ahead of the next step,
                or (after `restore` only) the earlier deadline is infeasible: discard the group.
        """
        group = self._group(ordinal)
        if group.attempt != attempt:
            raise BufferStateError(
                f"group {ordinal} is live as attempt {group.attempt}, cannot retry {attempt}"
            )
        floor = self._floor if floor is None else floor
        self._check_floor(floor, self._next_step)
        deadline = floor + self.max_staleness
        if keeps_tokens:
            deadline = min(deadline, group.deadline)
        self._remove(ordinal)
        if not self._fits(deadline, self._next_step):
            insort(self._order, (group.deadline, ordinal))
            self._groups[ordinal] = group
            self._ready += group.ready
            raise BufferStateError(
                f"group {ordinal} cannot be retried: its deadline would fall from step "
                f"{group.deadline} to {deadline}, and the live groups could not all be in time"
            )
        self._add(ordinal, attempt + 1, deadline, self._next_step, ready=False)
        self._floor = floor
        return deadline

    def discard(self, ordinal: int, attempt: int) -> bool:
        """Removes a group. False, and no effect, unless this attempt is live."""
        if not self.is_live(ordinal, attempt):
            return False
        self._remove(ordinal)
        return True

    def take(self, step: int, final: bool = False) -> list[int] | None:
        """Takes the batch of trainer step `step`: ready groups, earliest deadline first.

        A batch may overtake groups that are not ready only if all that are left behind are
        feasible at `step + 1`. Picking the earliest ready deadline each time leaves, pick by pick,
        the latest possible deadlines behind; so one look after the last pick decides for all.

        Args:
            step: the trainer step that will consume the batch, in its starting moment. It rises
                by one with each batch taken.
            final: no further prompt will come; the last batch may be smaller.

        Returns:
            `groups_per_step` ordinals by (deadline, ordinal), which are then no longer live; None
            if the trainer must wait (see `stragglers`). With `final` and fewer than
            `groups_per_step` live groups: all of them once all are ready, and [] when none is
            left, that is the end.

        Raises:
            BufferStateError: `step` fell, or live groups would be late at `step` already.
        """
        self._check_step(step)
        size = self.groups_per_step
        if final:
            size = min(size, len(self._order))
        if self._ready < size:
            return None
        ready = (entry for entry in self._order if self._groups[entry[1]].ready)
        chosen = list(islice(ready, size))
        picked = set(chosen)
        left = [due for due, ordinal in self._order if (due, ordinal) not in picked]
        if not feasible(left, step + 1, self.groups_per_step):
            return None
        for _, ordinal in chosen:
            self._remove(ordinal)
        if chosen:
            self._next_step = step + 1
        return [ordinal for _, ordinal in chosen]

    def stragglers(self, step: int) -> list[int]:
        """The live groups, not ready, whom `take(step)` waits for; [] if it waits for none.

        The fewest, earliest deadline first, whose readiness would let the batch go. Discarding
        them lets it go too, as soon as `groups_per_step` others are ready. With fewer than
        `groups_per_step` live groups, these are all that are not ready (and the trainer waits
        for admissions as well, unless no prompt is left).

        Raises:
            BufferStateError: see `take`.
        """
        self._check_step(step)
        size = self.groups_per_step
        ready = [entry for entry in self._order if self._groups[entry[1]].ready]
        waiting = [entry for entry in self._order if not self._groups[entry[1]].ready]
        if len(self._order) < size:
            return [ordinal for _, ordinal in waiting]
        low = max(0, size - len(ready))
        high = sum(not self._groups[ordinal].ready for _, ordinal in self._order[:size])
        while low < high:  # the first `high` always suffice; fewer leave earlier deadlines behind
            middle = (low + high) // 2
            left = sorted(waiting[middle:] + ready[size - middle :])
            if feasible([due for due, _ in left], step + 1, size):
                high = middle
            else:
                low = middle + 1
        return [ordinal for _, ordinal in waiting[:low]]

    def snapshot(self) -> BufferSnapshot:
        """The buffer at this moment, for metrics."""
        slack = [
            due - self._next_step - i // self.groups_per_step
            for i, (due, _) in enumerate(self._order)
        ]
        return BufferSnapshot(
            live=len(self._groups),
            ready=self._ready,
            max_live=self.max_live,
            floor=self._floor,
            next_step=self._next_step,
            slack=min(slack, default=None),
        )

    def _group(self, ordinal: int) -> _Live:
        group = self._groups.get(ordinal)
        if group is None:
            raise BufferStateError(f"group {ordinal} is not live")
        return group

    def _add(
        self, ordinal: int, attempt: int, deadline: int, next_step: int, *, ready: bool
    ) -> None:
        if ordinal in self._groups:
            raise BufferStateError(f"group {ordinal} is live already")
        if not self._fits(deadline, next_step):
            raise BufferStateError(
                f"group {ordinal} with deadline {deadline} does not fit at step {next_step} "
                f"beside {len(self._order)} live groups"
            )
        insort(self._order, (deadline, ordinal))
        self._groups[ordinal] = _Live(attempt, deadline, ready)
        self._ready += ready
        self._next_step = next_step

    def _remove(self, ordinal: int) -> None:
        group = self._groups.pop(ordinal)
        self._ready -= group.ready
        del self._order[bisect_left(self._order, (group.deadline, ordinal))]

    def _fits(self, deadline: int, step: int) -> bool:
        """Whether the live groups and one more with `deadline` are feasible at `step`."""
        size = self.groups_per_step
        place = bisect_left(self._order, (deadline + 1,))  # behind its equals
        if step > self._next_step and not feasible([d for d, _ in self._order], step, size):
            return False
        if deadline < step + place // size:
            return False
        behind = range(place, len(self._order))  # each of these moves back by one
        return all(self._order[i][0] >= step + (i + 1) // size for i in behind)

    def _check_floor(self, floor: int, next_step: int) -> None:
        if next_step < self._next_step:
            raise BufferStateError(f"next step fell from {self._next_step} to {next_step}")
        if floor < self._floor:
            raise BufferStateError(f"floor fell from {self._floor} to {floor}")
        if floor > next_step:
            raise BufferStateError(f"floor {floor} is ahead of the next step {next_step}")

    def _check_step(self, step: int) -> None:
        if step < self._next_step:
            raise BufferStateError(f"step fell from {self._next_step} to {step}")
        if step > self._next_step and not feasible(
            [due for due, _ in self._order], step, self.groups_per_step
        ):
            raise BufferStateError(f"live groups are late at step {step}; was a step left out?")
