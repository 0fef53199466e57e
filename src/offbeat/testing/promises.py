"""Watches a simulated run: every promise is looked at whenever something happens that could break
it, from the outside, with books of its own.

Numbers are those of `docs/reliability.md`. What is broken is kept and raised: a fake raises it into
the code under test, which may take it for a failure to heal; the simulation looks here.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

from offbeat.ledger import Counts, Row
from offbeat.records import Batch, Group, Payload, PolicyVersion

ARROWS = {
    (None, "admitted"),
    ("admitted", "generated"),
    ("generated", "scored"),
    ("scored", "ready"),
    ("ready", "batched"),
    ("batched", "trained"),
    ("trained", "batched"),
    *((state, "admitted") for state in ("admitted", "generated", "scored", "ready")),
    *((state, "discarded") for state in ("admitted", "generated", "scored", "ready", "batched")),
}
EVENTS_KEPT = 60
ENDS = ("trained", "discarded")


class Broken(AssertionError):
    """A promise does not hold; says which."""


class Promises:
    """What has been seen of one run, across all its starts. `clock` gives virtual seconds;
    `committed` are the rows of the store."""

    def __init__(
        self,
        clock: Callable[[], float],
        bound: int,
        group_size: int,
        committed: Mapping[int, Row],
    ) -> None:
        self.clock = clock
        self.broken: list[str] = []
        self.trace = 0  # changes with every event and its second
        self.last: deque[str] = deque(maxlen=EVENTS_KEPT)
        self.seen: Counter[str] = Counter()
        self._bound, self._size, self._committed = bound, group_size, committed
        self._rows: dict[int, Row] = {}
        self._counts: Counter[str] = Counter()  # groups by state
        self._batches: dict[int, tuple[int, int]] = {}  # step -> fingerprint, groups
        self._step_of: dict[int, int] = {}  # ordinal -> the step that trained it
        self._makers: dict[int, int] = {}  # lineage -> the trainer that has it
        self._loading: Counter[PolicyVersion] = Counter()  # by engines that are in routing

    def event(self, what: str) -> None:
        """Notes what happened."""
        line = f"{self.clock():.4f} {what}"
        self.trace = zlib.crc32(line.encode(), self.trace)
        self.last.append(line)

    def check(self, holds: bool, promise: int, what: str) -> None:
        """Notes and raises what is broken."""
        if not holds:
            said = f"promise {promise}: {what} (at {self.clock():.3f} s)"
            self.broken.append(said)
            raise Broken(said)

    # -- 1, 2, 7: the ledger ---------------------------------------------------------------------

    def put(self, rows: Iterable[Row]) -> None:
        """Rows on their way to the store, in order."""
        for row in rows:
            before = self._rows.get(row.ordinal)
            state = None if before is None else before.state
            self.event(f"{row.ordinal}.{row.attempt} {row.state} {row.step} {row.reason or ''}")
            if (state, row.state) not in ARROWS:
                self.check(False, 1, f"group {row.ordinal}: {state} to {row}")
            if before is not None:
                if row.attempt != before.attempt + (row.state == "admitted"):
                    self.check(False, 1, f"attempt of {before} became {row}")
                self._counts[before.state] -= 1
            self._counts[row.state] += 1
            self._rows[row.ordinal] = row
            if row.state in ("discarded", "admitted"):
                self.seen[row.reason or ("retried" if row.attempt else "admitted")] += 1
                if row.ordinal in self._step_of:
                    self.check(False, 1, f"{row} was trained in {self._step_of[row.ordinal]}")

    def crashed(self, committed: dict[int, Row]) -> None:
        """What was not committed is lost: the books are what the store has."""
        self._rows = dict(committed)
        self._counts = Counter(row.state for row in committed.values())
        self._loading.clear()

    def balance(self, counts: Counts, live: int, most: int) -> None:
        """Counts as the ledger gives them; `live` groups of the buffer, `most` at most."""
        lost = sum(counts["discarded"].values())
        admitted = counts["trained"] + lost + counts["live"]
        self.check(counts["admitted"] == admitted, 2, f"{counts} do not balance")
        mine = (sum(self._counts.values()), self._counts["trained"], self._counts["discarded"])
        theirs = (counts["admitted"], counts["trained"], lost)
        self.check(mine == theirs, 2, f"the ledger says {theirs}, its rows say {mine}")
        self.check(live <= most, 7, f"{live} groups are live, {most} at most")

    def ended(self, counts: Counts, steps: int, size: int) -> None:
        """A run that says it is done: each ordinal has its end, each step its batch."""
        live = {row.ordinal for row in self._rows.values() if row.state not in ENDS}
        self.check(not live and counts["live"] == 0, 1, f"done, with groups {sorted(live)[:9]}")
        done = len(self._batches)
        self.check(sorted(self._batches) == list(range(steps)), 9, f"done, with {done} of {steps}")
        trained = {row.ordinal: row.step for row in self._rows.values() if row.state == "trained"}
        self.check(trained == self._step_of, 1, "the ledger and the trainer differ")
        small = [step for step, (_, groups) in self._batches.items() if groups != size]
        self.check(small in ([], [steps - 1]), 9, f"steps {small} are smaller")

    # -- 1, 3, 6: what is trained ----------------------------------------------------------------

    def trained(self, batch: Batch, version: int) -> int:
        """A batch has come to the trainer; returns its fingerprint."""
        self.check(batch.step == version, 3, f"batch {batch.step} came to version {version}")
        found = zlib.crc32(str(batch.step).encode())
        for group in batch.groups:
            found = self._group(group, batch.step, found)
        self.event(f"step {batch.step} {found}")
        first = self._batches.setdefault(batch.step, (found, len(batch.groups)))
        again = found == first[0]
        self.check(again, 6, f"the batch of step {batch.step} is another one than it was")
        return found

    def _group(self, group: Group, step: int, found: int) -> int:
        ordinal = group.prompt.ordinal
        before = self._step_of.setdefault(ordinal, step)
        if before != step:
            self.check(False, 1, f"group {ordinal} is trained in {before} and in {step}")
        row = self._rows.get(ordinal)
        well = row is not None and (row.state, row.step) == ("batched", step)
        if not well:
            self.check(False, 1, f"step {step} trains {row}")
        kept = self._committed.get(ordinal)
        durable = kept is not None and kept.step == step
        if not durable:
            self.check(False, 6, f"step {step} trains {ordinal}, of which the store has {kept}")
        places = {sample.completion.index for sample in group.samples}
        whole = places == set(range(self._size)) and len(group.samples) == self._size
        if not whole:
            self.check(False, 1, f"group {ordinal} has the samples {sorted(places)}")
        for sample in group.samples:
            payload: Payload = sample.completion.ref
            ids = payload.token_ids
            mine = int(ids[0]) == ordinal and int(ids[1]) == group.attempt
            if not mine:
                self.check(
                    False, 1, f"group {ordinal}.{group.attempt} has tokens of {ids.tolist()}"
                )
            staleness = step - int(payload.versions.min())
            self.seen["at the bound"] += staleness == self._bound
            well = 0 <= staleness <= self._bound
            if not well:
                self.check(False, 3, f"group {ordinal} is trained {staleness} steps late")
            found = zlib.crc32(payload.versions.tobytes() + repr(sample.total).encode(), found)
        return zlib.crc32(f"{ordinal}.{group.attempt}".encode(), found)

    # -- 4: versions and engines -----------------------------------------------------------------

    def made(self, version: PolicyVersion, maker: int) -> None:
        """A trainer, one number a start, has published a version."""
        self.event(f"published {version} by {maker}")
        first = self._makers.setdefault(version.lineage, maker)
        self.check(first == maker, 4, f"version {version}: two trainers have its lineage")

    def asked(self, name: str, acknowledged: int, floor: int, routable: bool) -> None:
        """An engine gets a request."""
        self.check(routable, 4, f"{name} is asked and not in routing")
        well = acknowledged >= floor
        self.check(well, 4, f"{name} is asked, has acknowledged {acknowledged}, floor {floor}")

    def load_begins(self, version: PolicyVersion) -> None:
        """An engine in routing is told to load a version."""
        self._loading[version] += 1
        self.check(len(self._loading) == 1, 4, f"{sorted(self._loading)} are loaded at once")

    def load_ends(self, version: PolicyVersion) -> None:
        """It has, or has failed, or nobody waits for it any more."""
        self._loading[version] -= 1
        if self._loading[version] <= 0:
            del self._loading[version]

    # -- 6: nothing is made twice ----------------------------------------------------------------

    def generated_again(self, name: str, kept: int | None, attempt: int) -> None:
        """A group is to be generated; `kept` is the attempt whose tokens the store has."""
        self.check(kept != attempt, 6, f"group {name} is generated again, its tokens are kept")
