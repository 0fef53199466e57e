"""Starts a run's roles on a Ray cluster: its own, or the one that RAY_ADDRESS names."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from offbeat.cluster.actors import (
    NAMESPACE,
    RayTrainer,
    TrainerActor,
    of_role,
    remote,
    result,
    start_engine,
    tagged,
)
from offbeat.cluster.leftovers import end_run
from offbeat.cluster.plan import PoolPlan, check_memory, plan_pools
from offbeat.cluster.pools import SLOT, ResourcePool, create_pools, process_env, remove_pools
from offbeat.cluster.ray_rewards import (
    Replacer,
    by_place,
    make_judges,
    make_scorers,
    start_reward_replica,
)
from offbeat.cluster.roles import Roles
from offbeat.cluster.rollouter_actor import RayRollouter, RollouterActor
from offbeat.cluster.signals import Signals
from offbeat.cluster.specs import GoOn, RunSpec, policy_engine, standing, validators
from offbeat.config import Config
from offbeat.data import planned_steps
from offbeat.errors import OffbeatError, RoleDied, UserError

log = logging.getLogger(__name__)
OBJECT_STORE_BYTES = 256 << 20  # token arrays only; weights go through files
STOP_SECONDS = 20.0
REPLICA_STOP_SECONDS = 10.0
ALIVE_SECONDS = 15.0


def connect(config: Config, kind: str) -> None:
    """Joins the cluster of RAY_ADDRESS, or starts one on this machine."""
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    for chatty in ("ray._private.authentication", "ray._private.worker"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    common: dict[str, Any] = {
        "namespace": NAMESPACE,
        "log_to_driver": False,
        "configure_logging": False,
    }
    address = os.environ.get("RAY_ADDRESS")
    try:
        if address:
            ray.init(address=address, **common)
        else:
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                resources={SLOT: config.cluster.slots} if kind == "cpu" else None,
                **common,
            )
    except (ConnectionError, ValueError) as error:
        raise UserError(f"RAY_ADDRESS={address}: no Ray cluster answers there ({error})") from None


@asynccontextmanager
async def ray_roles(
    config: Config, run: RunSpec, say: Callable[[str], None], signals: Signals
) -> AsyncIterator[Roles]:
    """Reserves the pools, starts every actor on its own, and ends them all."""
    address = os.environ.get("RAY_ADDRESS")
    check_memory(config, run.device)
    directory = config.run_dir.resolve()
    await asyncio.to_thread(end_run, directory)
    run = replace(run, directory=directory)
    say(f"joining Ray at {address}" if address else "starting Ray on this machine")
    connect(config, run.device)  # in the main thread: Ray sets signal handlers
    signals.take()  # Ray has put its own in place
    pools: dict[str, ResourcePool] = {}
    starter = _Starter(config, run)
    try:
        say("reserving devices, one pool a role")
        pools = await reserve(config, plan_pools(config), run.device)
        say("starting " + ", ".join(pools))
        try:
            async with asyncio.timeout(config.cluster.start_deadline_seconds):
                roles = await starter.start(pools)
        except TimeoutError:
            raise OffbeatError(
                "the roles did not start within cluster.start_deadline_seconds = "
                f"{config.cluster.start_deadline_seconds:.0f}; waiting for {starter.waiting}"
            ) from None
        yield roles
    finally:
        await starter.stop()
        await asyncio.to_thread(leave, pools)
        await asyncio.to_thread(end_run, directory)


async def reserve(config: Config, plans: Sequence[PoolPlan], kind: str) -> dict[str, ResourcePool]:
    """All pools of the plans, within the placement's deadline."""
    seconds = config.cluster.placement_deadline_seconds
    return await asyncio.to_thread(create_pools, plans, kind, deadline_seconds=seconds)


class _Starter:
    """Starts actors and remembers them, to end them."""

    def __init__(self, config: Config, run: RunSpec) -> None:
        self.config = config
        self.run = run
        self.handles: list[ActorHandle] = []
        self.rollouter: RayRollouter | None = None
        self.trainer: RayTrainer | None = None
        self.waiting = "the rollouter"
        self._replicas: dict[str, list[ActorHandle]] = {}
        self._pools: dict[str, ResourcePool] = {}
        self._total_steps = 0

    async def start(self, pools: dict[str, ResourcePool]) -> Roles:
        """Starts everything; the order is engines and scorers, rollouter, trainer."""
        config, run = self.config, self.run
        specs = [policy_engine(config, run, i) for i in range(config.rollout.replicas)]
        engines = [start_engine(spec, pools["rollout"], run) for spec in specs]
        judges, scorers = make_judges(config, run, pools), make_scorers(config, run, pools)
        own = [policy_engine(config, run, i, "validate") for i in range(validators(config))]
        replicas = {"rollout": engines}
        if own:
            replicas["validate"] = [start_engine(spec, pools["validate"], run) for spec in own]
        replicas |= {f"reward/{name}": found for name, found in (judges | scorers).items()}
        self.handles += [handle for handles in replicas.values() for handle in handles]
        self._replicas, self._pools = replicas, pools
        handle = self._start_rollouter(named=True)
        rollouter = self.rollouter = RayRollouter(handle, self._rollouter_again)
        trainer = self.trainer = RayTrainer(
            self._start_trainer(run.lineage, named=True), self._start_trainer
        )
        self.waiting = "engines and reward replicas"
        await started(by_place(pools, replicas))
        self.waiting = "the rollouter's reward loop and prompts"
        total = await result(handle.start.remote(judges, scorers, pools))
        self._total_steps = trainer.total_steps = planned_steps(config, total)
        self.waiting = "the trainer"
        await trainer.setup(None if run.go_on is None else run.go_on.checkpoint)
        await result(self._begin(handle, run.go_on))
        return Roles(rollouter, trainer, self._total_steps)

    def _begin(self, rollouter: ActorHandle, go_on: GoOn | None) -> Any:
        """The call's reference."""
        specs = [
            policy_engine(self.config, self.run, i) for i in range(self.config.rollout.replicas)
        ]
        return rollouter.begin.remote(
            self._replicas["rollout"],
            self._pools["rollout"],
            specs,
            self._total_steps,
            self._replicas.get("validate", []),
            self._pools.get("validate"),
            go_on,
        )

    def _start_rollouter(self, *, named: bool) -> ActorHandle:
        options = self._beside_driver("rollouter", named=named)
        tagged(options, self.run, f"{self.run.run_id}/rollouter/0")
        actor = remote(RollouterActor).options(max_concurrency=1000, **options)
        handle: ActorHandle = actor.remote(self.config, self.run)
        return handle

    def _start_trainer(self, lineage: int, *, named: bool = False) -> ActorHandle:
        """The trainer of a lineage; a replacement has no name: its predecessor's may be taken."""
        options = self._pools["train"].options(0, threads=self.config.train.threads)
        name = f"{self.run.run_id}/train/0"
        tagged(options, self.run, name)
        if named:
            options |= {"name": name, "namespace": NAMESPACE}
        actor = remote(TrainerActor, health=True).options(**options)
        handle: ActorHandle = actor.remote(self.config, replace(self.run, lineage=lineage))
        return handle

    async def _rollouter_again(self, go_on: GoOn) -> ActorHandle:
        """Another rollouter, over the replicas that live and replacements of those that do not."""
        await self._mend_replicas()
        handle = self._start_rollouter(named=False)
        await self._abandon()
        judges, scorers = (
            {name: self._replicas[f"reward/{name}"] for name in standing(sources, kind)}
            for sources in [self.config.active_rewards]
            for kind in ("genrm", "disrm")
        )
        try:
            await of_role("rollouter", handle.start.remote(judges, scorers, self._pools))
            await of_role("rollouter", self._begin(handle, go_on))
        except BaseException:
            ray.kill(handle)  # it may have the ledger's lock
            raise
        return handle

    async def _abandon(self) -> None:
        """Frees the seats of what the rollouter that died had asked for."""
        generating = [h for role, found in self._replicas.items() for h in found
                      if self._generates(role)]  # fmt: skip
        asked = [handle.abandon.remote() for handle in generating]
        try:
            async with asyncio.timeout(ALIVE_SECONDS):
                await asyncio.gather(*asked, return_exceptions=True)
        except TimeoutError:  # whoever asks an engine next has a deadline, and replaces it
            log.warning("an engine does not answer")

    def _generates(self, role: str) -> bool:
        name = role.partition("/")[2]
        return not name or self.config.active_rewards[name].kind == "genrm"

    async def _mend_replicas(self) -> None:
        """Replaces replicas that died, or were replaced by the rollouter that died."""
        places = [(role, i) for role, found in self._replicas.items() for i in range(len(found))]
        well = await asyncio.gather(*(alive(self._replicas[role][i]) for role, i in places))
        dead = [place for place, lives in zip(places, well, strict=True) if not lives]
        replacer = Replacer()
        try:
            await asyncio.gather(
                *(
                    replacer.again(
                        self._replicas[role],
                        index,
                        self._pools[role],
                        partial(self._start_replica, role, index),
                    )
                    for role, index in dead
                )
            )
        except RayError as error:
            said = f"a replica did not start beside the rollouter ({type(error).__name__})"
            raise RoleDied("rollouter", said) from error

    def _start_replica(self, role: str, index: int) -> ActorHandle:
        config, run = self.config, self.run
        if role in ("rollout", "validate"):
            kind: Literal["rollout", "validate"] = "rollout" if role == "rollout" else "validate"
            spec = policy_engine(config, run, index, kind)
            handle = start_engine(spec, self._pools[role], run, named=False)
        else:
            name = role.partition("/")[2]
            handle = start_reward_replica(config, run, self._pools, name, index)
        self.handles.append(handle)
        return handle

    def _beside_driver(self, role: str, *, named: bool) -> dict[str, Any]:
        """The ledger lies on the driver's disk, so the rollouter runs on the driver's node."""
        node = ray.get_runtime_context().get_node_id()
        name = {"name": f"{self.run.run_id}/{role}/0", "namespace": NAMESPACE} if named else {}
        return name | {
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            "runtime_env": {"env_vars": process_env(1, gpu=False)},
        }

    async def stop(self) -> None:
        """Asks the rollouter and trainer to finish, then the replicas, and ends every process."""
        handles = [role.handle for role in (self.rollouter, self.trainer) if role is not None]
        last = [] if self.rollouter is None else [self.rollouter.handle.stop.remote()]
        last += [] if self.trainer is None else [self.trainer.handle.close.remote()]
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await asyncio.gather(*last, return_exceptions=True)
        except TimeoutError:
            log.warning("rollouter and trainer did not stop within %.0f s", STOP_SECONDS)
        await end_replicas(self.handles)
        for handle in handles:
            ray.kill(handle)


async def alive(handle: ActorHandle) -> bool:
    """Whether a replica answers."""
    try:
        async with asyncio.timeout(ALIVE_SECONDS):
            await result(handle.health.remote())
    except Exception:  # boundary: whatever it raises, it is not well
        return False
    return True


async def end_replicas(handles: Sequence[ActorHandle]) -> None:
    """Asks replicas to end, and kills them."""
    with contextlib.suppress(TimeoutError):  # vLLM's processes hold shared memory: let them go
        async with asyncio.timeout(REPLICA_STOP_SECONDS):
            await asyncio.gather(*(h.stop.remote() for h in handles), return_exceptions=True)
    for handle in handles:
        ray.kill(handle)


async def started(places: Iterable[Sequence[ActorHandle]]) -> None:
    """Starts replicas, all at once but those that share a place, which start one after another.

    vLLM measures what is free on a shared device, and fails if it changes by others meanwhile.
    """

    async def one_by_one(replicas: Sequence[ActorHandle]) -> None:
        for handle in replicas:
            await result(handle.start.remote())

    await asyncio.gather(*(one_by_one(replicas) for replicas in places))


def leave(pools: dict[str, ResourcePool]) -> None:
    """Gives the devices back and leaves the cluster."""
    remove_pools(pools)
    ray.shutdown()
