"""Engines in processes of their own that are killed under load: their samples go on elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from engine_models import load_oracle, make_model, teacher_forced
from tests.unit.test_rollouter import FakeRewards

from offbeat.cluster.actors import EngineActor, RayEngine, remote, start_again, start_engine
from offbeat.cluster.plan import PoolPlan
from offbeat.cluster.pools import ResourcePool, create_pools, remove_pools
from offbeat.cluster.rollouter_actor import fetched
from offbeat.cluster.specs import RunSpec, policy_engine
from offbeat.config import Config, RolloutSection
from offbeat.ledger import Counts
from offbeat.records import (
    Completion,
    EngineHealth,
    GenerateRequest,
    Manifest,
    Payload,
    PolicyVersion,
    Progress,
    Prompt,
    Sampling,
    Span,
)
from offbeat.rollout.books import Books
from offbeat.rollout.engine import Engine
from offbeat.rollout.generation import Generation
from offbeat.rollout.rollouter import Rollouter
from offbeat.rollout.router import Router
from offbeat.store import Store, read_counts
from offbeat.weights.sync import Replica, SyncReport, WeightSync
from offbeat.weights.transport import FolderTransport

REPLICAS, STEPS, GROUPS, SAMPLES = 2, 5, 2, 4
MAX_TOKENS = 160
SNAPSHOT = 16
CASES = [
    ("transformers", signal.SIGKILL),
    pytest.param("transformers", signal.SIGSTOP, marks=pytest.mark.long),
    pytest.param("vllm", signal.SIGKILL, marks=[pytest.mark.vllm, pytest.mark.long]),
]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # two cores may be shared with others


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(
        address="local", num_cpus=2, resources={"offbeat_slot": REPLICAS}, include_dashboard=False,
        object_store_memory=128 << 20, log_to_driver=False,
    )  # fmt: skip
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no worker can import it
    yield
    ray.shutdown()


# -- what the test sees -------------------------------------------------------------------------


@dataclass
class Seen:
    """What the rollouter asked of its engines, in order; `on_item` sees what they gave."""

    sent: list[tuple[int, GenerateRequest]] = field(default_factory=list)
    on_item: Callable[[int, Completion | Progress], None] = lambda replica, item: None


class Witness:
    """An engine that is watched."""

    def __init__(self, replica: int, engine: Engine, seen: Seen) -> None:
        self.replica = replica
        self.engine = engine
        self.seen = seen

    async def start(self) -> None:
        await self.engine.start()

    async def generate(
        self, request: GenerateRequest
    ) -> AsyncGenerator[Completion | Progress, None]:
        self.seen.sent.append((self.replica, request))
        async with contextlib.aclosing(self.engine.generate(request)) as items:
            async for item in items:
                self.seen.on_item(self.replica, item)
                yield item

    async def load(self, manifest: Manifest) -> PolicyVersion:
        return await self.engine.load(manifest)

    async def health(self) -> EngineHealth:
        return await self.engine.health()

    async def drain_spans(self) -> list[Span]:
        return await self.engine.drain_spans()

    async def stop(self) -> None:
        await self.engine.stop()


class Killer:
    """Kills or freezes one engine's process when some of its samples run and were told of."""

    def __init__(self, pid: int, how: signal.Signals, seen: Seen) -> None:
        self.pid = pid
        self.how = how
        self.killed = False
        self._told: dict[tuple[str, int], int] = {}
        seen.on_item = self.look

    def look(self, replica: int, item: Completion | Progress) -> None:
        if replica != 0 or self.killed:
            return
        key = (item.request_id, item.index)
        if isinstance(item, Completion):
            self._told.pop(key, None)
            return
        self._told[key] = item.tokens
        if sum(tokens >= 2 * SNAPSHOT for tokens in self._told.values()) >= 3:
            self.killed = True
            os.kill(self.pid, self.how)


def config_of(tmp_path: Path, model: Path, engine: str, load_deadline: float) -> Config:
    return Config.model_validate(
        {
            "run": "interrupted",
            "runs_dir": str(tmp_path),
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train": "unused"},
            "rollout": {
                "engine": engine, "replicas": REPLICAS, "group_size": SAMPLES, "seats": 8,
                "max_tokens": MAX_TOKENS, "max_context": 256, "snapshot_tokens": SNAPSHOT,
                "deadline_seconds": 240,
            },
            "train": {"groups_per_step": GROUPS, "max_staleness": 1},
            "weights": {"deadline_seconds": load_deadline},
            "cluster": {"device": "cpu", "start_deadline_seconds": 240},
            "reward": {"r": {"kind": "function", "function": "f.py:f"}},
        }
    )  # fmt: skip


class Prompts:
    """Prompts that differ from the first token on."""

    total = STEPS * GROUPS

    def prompt(self, ordinal: int) -> Prompt:
        ids = np.random.default_rng(ordinal).integers(1, 257, 12).astype(np.int32)
        return Prompt(ordinal, ids, "p", "p")


def versions_of(model: Path, transport: FolderTransport) -> Callable[[int], Manifest]:
    """Publishes version `step`: the model's weights with noise of that step."""

    def publish(step: int) -> Manifest:
        policy = noisy(model, step)
        tensors = {name: weight.detach() for name, weight in policy.named_parameters()}
        return transport.publish(tensors, {}, PolicyVersion(0, step))

    return publish


def noisy(model: Path, step: int) -> Any:
    policy = load_oracle(model)
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for weight in policy.parameters() if step else ():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(noise * 0.1 * weight.std().nan_to_num(0.1))
    return policy


# -- the run ------------------------------------------------------------------------------------


def pid_of(replica: int, run_id: str) -> int:
    """The process of an engine actor."""
    name = f"{run_id}/rollout/{replica}"
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "EngineActor" not in " ".join(process.cmdline()):
                continue
            if process.environ().get("OFFBEAT_REPLICA") == name:
                return process.pid
    raise AssertionError(f"{name} has no process")


@dataclass
class Outcome:
    seen: Seen
    batches: list[Any]
    counts: Counts
    reports: list[SyncReport]
    rejoined: tuple[bool, PolicyVersion]
    again: Completion
    lost: int


async def run(
    config: Config,
    how: signal.Signals,
    publish: Callable[[int], Manifest],
    pools: dict[str, ResourcePool],
    store: Store,
) -> Outcome:
    spec = RunSpec("interrupted-run", "cpu", config.run_dir)
    specs = [policy_engine(config, spec, i) for i in range(REPLICAS)]
    handles = [start_engine(s, pools["rollout"], spec) for s in specs]
    seen = Seen()
    raw = [RayEngine(handle, payloads=True) for handle in handles]
    for engine in raw:
        await engine.start()
    killer = Killer(pid_of(0, spec.run_id), how, seen)

    async def replace(index: int) -> Engine:
        start = partial(start_engine, specs[index], pools["rollout"], spec, named=False)
        fresh = RayEngine(await start_again(handles, index, start), payloads=True)
        return Witness(index, fresh, seen)

    rollouter = Rollouter(
        config, prompts=Prompts(), engines=[Witness(i, e, seen) for i, e in enumerate(raw)],
        rewards=FakeRewards(), version=PolicyVersion(0, 0),  # type: ignore[arg-type]
        books=Books(store, config.train, Prompts().prompt), fetch=fetched,
        total_steps=STEPS, replace=replace,
    )  # fmt: skip
    task = asyncio.create_task(rollouter.run())
    await rollouter.running.wait()
    try:
        batches = []
        for step in range(STEPS):
            batches.append(await rollouter.batch(step))
            ordinals = [group.prompt.ordinal for group in batches[-1].groups]
            await rollouter.trained(step, dict.fromkeys(ordinals, "signal"))
            await rollouter.published(publish(step + 1))
        counts, (_, reports, _) = await rollouter.counts(), await rollouter.drain()
        assert killer.killed, "nothing was killed: the test shows nothing"
        replica = rollouter.replicas[0]
        for _ in range(1200):
            if replica.routable:
                break
            await asyncio.sleep(0.2)
        request = GenerateRequest("after", Prompts().prompt(0).token_ids, 1, Sampling(8))
        again = [c async for c in replica.engine.generate(request) if isinstance(c, Completion)]
        rejoined = (replica.routable, (await replica.engine.health()).version)
        return Outcome(seen, batches, counts, reports, rejoined, again[0], killer.pid)
    finally:
        await rollouter.stop()
        await asyncio.gather(task, return_exceptions=True)
        for handle in handles:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(RayEngine(handle, payloads=True).stop(), 30)
            ray.kill(handle)


@pytest.mark.parametrize(("engine", "how"), CASES)
def test_an_engine_killed_or_frozen_under_load_loses_nothing(
    cluster: None, tmp_path: Path, engine: str, how: signal.Signals
) -> None:
    """A frozen one does not fail: it misses the deadline of its load, and is taken out for that."""
    if engine == "vllm":
        pytest.importorskip("vllm")
    model = make_model(
        tmp_path / "model", hidden_size=64, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=256,
    )  # fmt: skip
    config = config_of(tmp_path, model, engine, 10.0 if how == signal.SIGSTOP else 120.0)
    config.run_dir.mkdir(parents=True)
    transport = FolderTransport(tmp_path / "weights", "interrupted")
    store = Store(tmp_path / "ledger.sqlite")
    plan = PoolPlan("rollout", "rollout", REPLICAS, 1)
    pools = create_pools([plan], "cpu", deadline_seconds=60)
    try:
        outcome = asyncio.run(run(config, how, versions_of(model, transport), pools, store))
    finally:
        store.close()
        remove_pools(pools)
        transport.close()
    check_books(outcome, read_counts(tmp_path / "ledger.sqlite"))
    check_tokens(outcome, model)
    check_carried_on(outcome)
    check_rolled(outcome.reports)
    assert outcome.rejoined == (True, PolicyVersion(0, STEPS)), "it rejoined at the newest version"
    assert outcome.again.version_min == STEPS
    assert not psutil.pid_exists(outcome.lost)


def check_books(outcome: Outcome, stored: Counts) -> None:
    """No ordinal is lost or trained twice, none is discarded; attempts stay the first."""
    counts = outcome.counts
    assert counts == stored
    assert counts["discarded"] == {}
    assert counts["admitted"] == counts["trained"] + counts["live"] == STEPS * GROUPS
    ordinals = [group.prompt.ordinal for batch in outcome.batches for group in batch.groups]
    assert sorted(ordinals) == list(range(STEPS * GROUPS))


def check_tokens(outcome: Outcome, model: Path) -> None:
    """Every log-prob is teacher forcing's under its token's version; staleness is bounded."""
    oracles: dict[int, Any] = {}
    for batch in outcome.batches:
        for group in batch.groups:
            assert sorted(s.completion.index for s in group.samples) == list(range(SAMPLES))
            for sample in group.samples:
                payload: Payload = ray.get(sample.completion.ref)
                assert len(payload.token_ids) == sample.completion.tokens <= MAX_TOKENS
                assert (np.diff(payload.versions) >= 0).all()
                assert batch.step - payload.versions.min() <= 1
                ids = torch.from_numpy(payload.token_ids.astype(np.int64))[:, None]
                for step in set(payload.versions.tolist()):
                    if step not in oracles:
                        oracles[step] = noisy(model, step)
                    likely = teacher_forced(
                        oracles[step], group.prompt.token_ids, payload.token_ids
                    )
                    made = payload.versions == step
                    expected = likely.gather(1, ids)[:, 0].numpy()
                    np.testing.assert_allclose(payload.logprobs[made], expected[made], atol=1e-4)


def check_carried_on(outcome: Outcome) -> None:
    """What the killed engine had told of is the beginning of what the other one ended."""
    ended = {
        (f"{group.prompt.ordinal}.{group.attempt}", sample.completion.index): sample.completion
        for batch in outcome.batches
        for group in batch.groups
        for sample in group.samples
    }
    carried = 0
    for replica, request in outcome.seen.sent:
        for index, reference in request.resume:
            assert isinstance(reference, ray.ObjectRef), "the rollouter holds references only"
            begun: Payload = ray.get(reference)  # its maker is dead
            whole: Payload = ray.get(ended[request.request_id, index].ref)
            size = len(begun.token_ids)
            assert size >= SNAPSHOT
            assert len(whole.token_ids) > size
            for name in ("token_ids", "logprobs", "versions"):
                np.testing.assert_array_equal(
                    getattr(whole, name)[:size], getattr(begun, name), err_msg=name
                )
            assert replica == 1
            carried += 1
    assert carried >= 3, "the samples that were told of went on"
    for _, request in outcome.seen.sent:
        assert not {index for index, _ in request.resume} & request.done


def check_rolled(reports: list[SyncReport]) -> None:
    """One of the two engines loads at a time; the other generates meanwhile."""
    for version in range(1, STEPS + 1):
        loads = sorted((r.start, r.end) for r in reports if r.version == version)
        assert loads
        assert all(ended <= begun for (_, ended), (begun, _) in pairwise(loads))


# -- references ---------------------------------------------------------------------------------

LARGE = 60_000


class Scribe:
    """Tells of a sample of `LARGE` tokens and then of one of 5; ends what is resumed with one more.

    The first payload is too large to travel inside a message: it lies in the object store.
    """

    async def start(self) -> None: ...

    async def generate(
        self, request: GenerateRequest
    ) -> AsyncGenerator[Completion | Progress, None]:
        begun = dict(request.resume)
        if not begun:
            for index, size in enumerate((LARGE, 5)):
                yield Progress(request.request_id, index, size, _count(size))
            await asyncio.sleep(600)
        for index, tokens in begun.items():
            size = len(tokens.token_ids) + 1
            whole = _count(size)
            assert whole.token_ids[:-1].tolist() == tokens.token_ids.tolist()
            yield Completion(request.request_id, index, "", size, 0, 0, "stop", whole)

    async def health(self) -> EngineHealth:
        return EngineHealth(PolicyVersion(0, 0), 0, 0, 8)


def _count(size: int) -> Payload:
    ids = np.arange(size, dtype=np.int32)
    return Payload(ids, -ids.astype(np.float32), np.zeros(size, np.int32))


class ScribeActor(EngineActor):
    def __init__(self) -> None:
        self._engine: Any = Scribe()
        self._keep_payloads = True
        self._requests = set()

    async def start(self) -> None: ...

    async def pid(self) -> int:
        return os.getpid()


async def carry(
    engines: list[Any], request: GenerateRequest, on_item: Callable[[Any], None] = lambda item: None
) -> list[Completion]:
    """A request through `Generation` on these engines; engines that fail are not replaced."""
    changed = asyncio.Condition()
    section = RolloutSection.model_validate({"snapshot_tokens": 2, "deadline_seconds": 60})
    seen = Seen(on_item=lambda replica, item: on_item(item))
    replicas: list[Replica[Any]] = [
        Replica(i, Witness(i, e, seen), PolicyVersion(0, 0)) for i, e in enumerate(engines)
    ]

    async def replace(index: int) -> Any:
        await asyncio.sleep(600)

    async def on_change() -> None: ...

    found: list[Completion] = []
    with contextlib.suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as tasks:
            sync = WeightSync(
                replicas, deadline_seconds=10, start_deadline_seconds=600, replace=replace,
                on_change=on_change, tasks=tasks,
            )  # fmt: skip
            generation = Generation(Router(replicas, changed, 8), lambda: sync, section)
            async for completion in generation.once(request):
                found.append(completion)
            raise _Enough
    return found


class _Enough(Exception):
    """Ends the tasks."""


def test_snapshots_outlive_the_process_that_made_them_large_and_small(cluster: None) -> None:
    actors = [remote(ScribeActor, health=True).remote() for _ in range(2)]
    pid = ray.get(actors[0].pid.remote())

    def kill(item: Any) -> None:
        if isinstance(item, Progress) and item.tokens == 5:
            assert isinstance(item.ref, ray.ObjectRef)
            os.kill(pid, signal.SIGKILL)

    request = GenerateRequest("r", np.array([1], np.int32), 2, Sampling(LARGE + 9))
    engines = [RayEngine(actor, payloads=True) for actor in actors]
    found = asyncio.run(carry(engines, request, kill))
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert sorted((c.index, c.tokens) for c in found) == [(0, LARGE + 1), (1, 6)]
    assert [len(ray.get(c.ref).token_ids) for c in found] == [c.tokens for c in found]
    ray.kill(actors[1])


class Talker(Scribe):
    """Tells of four samples, 60 times each."""

    async def generate(
        self, request: GenerateRequest
    ) -> AsyncGenerator[Completion | Progress, None]:
        for size in range(1, 61):
            for index in range(4):
                yield Progress(request.request_id, index, size, _count(size))
        for index in range(4):
            yield Completion(request.request_id, index, "", 61, 0, 0, "stop", _count(61))


class TalkerActor(ScribeActor):
    def __init__(self) -> None:
        self._engine = Talker()
        self._keep_payloads = True
        self._requests = set()


def test_superseded_snapshots_are_freed(cluster: None) -> None:
    """At any time only the newest of each sample is referenced, and what is on its way."""
    from ray._private.worker import global_worker

    actor = remote(TalkerActor, health=True).remote()
    ray.get(actor.pid.remote())

    def referenced() -> int:
        return len(global_worker.core_worker.get_all_reference_counts())

    before = referenced()
    held: list[int] = []
    request = GenerateRequest("r", np.array([1], np.int32), 4, Sampling(99))
    engine = RayEngine(actor, payloads=True)

    def look(item: Any) -> None:
        # The stream runs ahead of its reader: what is made and not read yet is referenced too.
        if isinstance(item, Completion):
            held.append(referenced() - before)

    found = asyncio.run(carry([engine], request, look))
    assert len(found) == 4
    assert max(held) <= 24, f"{held} references beside those of 240 snapshots"
    ray.kill(actor)
