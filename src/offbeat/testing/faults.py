"""Breaks a run at named points, once and repeatably: the injector behind Offbeat's own tests.

    plan = FaultPlan((Fault("ledger.batched", "kill", nth=2),), log=tmp_path / "faults")
    subprocess.run(command, env=os.environ | plan.environment())     # all processes of a run
    plan.assert_fired()

    with inject(Fault("store.before_commit", "enospc")) as plan:     # this process alone
        ...
    plan.assert_fired()

`offbeat.faults.POINTS` lists the points and says what has happened at each. Before a fault acts, a
file in `log` says so. It is made exclusively: a fault with `times=1` fires once over all processes
and restarts of a run, so that a run which was killed can be resumed with the same environment.
"""

from __future__ import annotations

import asyncio
import builtins
import errno
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, get_args

from offbeat import errors
from offbeat.faults import POINTS, VARIABLES, install

Kind = Literal["kill", "hang", "delay", "stall", "raise", "corrupt", "enospc"]
FOREVER = 86_400.0 * 365
FLIPPED = 16  # bytes that `corrupt` changes


class FaultPlanError(ValueError):
    """A plan that makes no sense: no such point, kind or error, or no file to damage."""


class InjectedFault(RuntimeError):
    """What `raise` raises if the fault names no other error."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at a point.

    Kinds: `kill` (SIGKILL of the process), `hang` (for ever; an event loop goes on), `delay` (for
    `seconds`; likewise), `stall` (the thread or event loop stands still for `seconds`), `raise`
    (`error`), `corrupt` (bytes of the file that the point names, or of one in the folder), `enospc`
    (the disk is full).

    Args:
        nth: the first passing, counted in each process from 1, at which it may fire.
        times: how often it fires at most, over all processes; None: no limit.
        share: probability that it fires at a passing from the `nth` on.
        seconds: of `delay` and `stall`.
        error: name of an exception of Python's or of `offbeat.errors`, for `raise`.
        seed: of the draws by `share` and of the bytes that `corrupt` changes.

    Raises:
        FaultPlanError: an unknown point (the nearest is named), kind or error, or a bad number.
    """

    point: str
    kind: Kind
    nth: int = 1
    times: int | None = 1
    share: float = 1.0
    seconds: float = 1.0
    error: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.point not in POINTS:
            near = get_close_matches(self.point, POINTS, 1, 0.0)[0]
            raise FaultPlanError(f"there is no point {self.point!r}; the nearest is {near!r}")
        if self.kind not in get_args(Kind):
            known = ", ".join(get_args(Kind))
            raise FaultPlanError(f"there is no kind {self.kind!r} of fault; there are {known}")
        if self.nth < 1 or (self.times is not None and self.times < 1):
            raise FaultPlanError("nth and times of a fault count from 1")
        if not 0 < self.share <= 1 or self.seconds < 0:
            raise FaultPlanError("share of a fault lies in (0, 1], seconds are not negative")
        _error(self.error, self.point)


@dataclass(frozen=True, slots=True)
class Firing:
    """One time that a fault fired; `index` is the fault's in its plan, `passing` counts those of
    the point in the process `pid`, `time` is `time.time()`."""

    index: int
    point: str
    kind: str
    passing: int
    pid: int
    time: float
    path: str | None


@dataclass(slots=True)
class FaultPlan:
    """Faults, and the folder that remembers which have fired; made if it is not there."""

    faults: tuple[Fault, ...]
    log: Path
    _passed: list[int] = field(init=False)
    _draws: list[random.Random] = field(init=False)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _over: threading.Event = field(init=False, default_factory=threading.Event)
    _kept: list[Firing] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.log = Path(self.log).resolve()
        self.log.mkdir(parents=True, exist_ok=True)
        self._passed = [0] * len(self.faults)
        self._draws = [random.Random(fault.seed) for fault in self.faults]

    @classmethod
    def from_environment(cls) -> FaultPlan:
        """The plan of OFFBEAT_FAULTS and OFFBEAT_FAULTS_LOG; raises `FaultPlanError`."""
        text, log = (os.environ.get(name) for name in VARIABLES)
        if not text or not log:
            raise FaultPlanError(f"{VARIABLES[0]} and {VARIABLES[1]} are set together")
        try:
            faults = tuple(Fault(**values) for values in json.loads(text))
        except (json.JSONDecodeError, TypeError) as error:
            raise FaultPlanError(f"{VARIABLES[0]} is no list of faults: {error}") from error
        return cls(faults, Path(log))

    def environment(self) -> dict[str, str]:
        """The variables that give this plan to processes that are started with them."""
        faults = json.dumps([asdict(fault) for fault in self.faults])
        return dict(zip(VARIABLES, (faults, str(self.log)), strict=True))

    def install(self) -> None:
        """Every point of this process obeys the plan from now on."""
        install(self._point, self._apoint)

    def fired(self) -> list[Firing]:
        """What fired so far, in all processes, oldest first."""
        if self._kept is not None:
            return self._kept
        found = [Firing(**json.loads(path.read_text())) for path in self.log.glob("*.json")]
        return sorted(found, key=lambda firing: firing.time)

    def assert_fired(self) -> None:
        """Raises `AssertionError` if one of the faults never fired: its test has shown nothing."""
        seen = {firing.index for firing in self.fired()}
        missed = [fault for i, fault in enumerate(self.faults) if i not in seen]
        if missed:
            names = ", ".join(
                f"{fault.kind} at {fault.point} (nth {fault.nth})" for fault in missed
            )
            raise AssertionError(f"faults that never fired: {names}")

    def end(self) -> None:
        """Points do nothing any more, and threads that hang go on, with `InjectedFault`."""
        install(None, None)
        self._over.set()

    def _point(self, name: str, path: Path | None) -> None:
        for fault in self._due(name, path):
            if fault.kind in ("hang", "delay", "stall"):
                seconds = FOREVER if fault.kind == "hang" else fault.seconds
                if self._over.wait(seconds) and fault.kind == "hang":
                    raise InjectedFault(f"{name}: hung until the plan's end")
            else:
                _act(fault, path)

    async def _apoint(self, name: str, path: Path | None) -> None:
        for fault in self._due(name, path):
            if fault.kind in ("hang", "delay"):
                await asyncio.sleep(FOREVER if fault.kind == "hang" else fault.seconds)
            elif fault.kind == "stall":
                self._over.wait(fault.seconds)
            else:
                _act(fault, path)

    def _due(self, name: str, path: Path | None) -> Iterator[Fault]:
        """The faults that fire at this passing, each booked before it is returned."""
        for index, fault in enumerate(self.faults):
            if fault.point != name:
                continue
            with self._lock:
                self._passed[index] += 1
                passing = self._passed[index]
                fires = passing >= fault.nth and self._draws[index].random() < fault.share
            if fires and self._book(index, fault, passing, path):
                yield fault

    def _book(self, index: int, fault: Fault, passing: int, path: Path | None) -> bool:
        """Whether it may fire; if so, that is on disk before this returns."""
        named = None if path is None else str(path)
        firing = Firing(index, fault.point, fault.kind, passing, os.getpid(), time.time(), named)
        count = 0
        while fault.times is None or count < fault.times:
            count += 1
            name = f"{index:03d}-{fault.point}-{count:04d}"
            try:
                fd = os.open(self.log / f"{name}.lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                continue
            os.close(fd)
            whole = self.log / f"{name}.tmp"  # whoever reads a firing meanwhile reads all of it
            whole.write_text(json.dumps(asdict(firing)))
            whole.rename(self.log / f"{name}.json")
            return True
        return False


@contextmanager
def inject(*faults: Fault, log: Path | None = None) -> Iterator[FaultPlan]:
    """Faults at the points of this process while the block runs. One plan at a time."""
    with tempfile.TemporaryDirectory(prefix="offbeat-faults-") as folder:
        plan = FaultPlan(faults, log or Path(folder))
        plan.install()
        try:
            yield plan
        finally:
            plan.end()
            plan._kept = plan.fired()


def _act(fault: Fault, path: Path | None) -> None:
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(FOREVER)  # the signal may take a moment
    if fault.kind == "enospc":
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected at {fault.point})")
    if fault.kind == "corrupt":
        _flip(fault, path)
        return
    raise _error(fault.error, fault.point)


def _flip(fault: Fault, path: Path | None) -> None:
    """Changes bytes in place, as a disk would: size and time stay."""
    if path is None:
        raise FaultPlanError(f"corrupt: the point {fault.point} names no file")
    draw = random.Random(fault.seed)
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    full = [file for file in files if file.stat().st_size > 0]
    if not full:
        raise FaultPlanError(f"corrupt: there are no bytes at {path}")
    file = draw.choice(full)
    before = file.stat()
    with file.open("r+b") as stream:
        for at in sorted(draw.sample(range(before.st_size), min(FLIPPED, before.st_size))):
            stream.seek(at)
            (byte,) = stream.read(1)
            stream.seek(at)
            stream.write(bytes([byte ^ draw.randrange(1, 256)]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _error(name: str, where: str) -> Exception:
    """What `raise` raises; `FaultPlanError` if there is no such exception."""
    said = f"injected at {where}"
    if not name:
        return InjectedFault(said)
    found = vars(errors).get(name, vars(builtins).get(name))
    if not (isinstance(found, type) and issubclass(found, Exception)):
        raise FaultPlanError(f"error: neither Python nor offbeat.errors has an exception {name!r}")
    try:
        return found(said)
    except TypeError:
        raise FaultPlanError(f"error: {name} is not made of a message alone") from None
