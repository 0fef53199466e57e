"""Starts a run's roles on a Ray cluster: its own, or the one that RAY_ADDRESS names."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from offbeat.cluster.actors import (
    NAMESPACE,
    RayTrainer,
    TrainerActor,
    remote,
    result,
    start_engine,
)
from offbeat.cluster.plan import PoolPlan, check_memory, plan_pools
from offbeat.cluster.pools import SLOT, ResourcePool, create_pools, process_env, remove_pools
from offbeat.cluster.ray_rewards import by_place, make_judges, make_scorers
from offbeat.cluster.roles import Roles
from offbeat.cluster.rollouter_actor import RayRollouter, RollouterActor
from offbeat.cluster.signals import end_on_sigterm
from offbeat.cluster.specs import RunSpec, policy_engine, validators
from offbeat.config import Config
from offbeat.data import planned_steps
from offbeat.errors import OffbeatError, UserError

log = logging.getLogger(__name__)
OBJECT_STORE_BYTES = 256 << 20  # token arrays only; weights go through files
STOP_SECONDS = 20.0
REPLICA_STOP_SECONDS = 10.0


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
    config: Config, run: RunSpec, say: Callable[[str], None]
) -> AsyncIterator[Roles]:
    """Reserves the pools, starts every actor on its own, and ends them all."""
    address = os.environ.get("RAY_ADDRESS")
    check_memory(config, run.device)
    say(f"joining Ray at {address}" if address else "starting Ray on this machine")
    connect(config, run.device)  # in the main thread: Ray sets signal handlers
    end_on_sigterm()  # Ray has put its own in place
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
        self.rollouter: ActorHandle | None = None
        self.trainer: ActorHandle | None = None
        self.waiting = "the rollouter"

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
        self.rollouter = (
            remote(RollouterActor, health=True)
            .options(max_concurrency=1000, **self._beside_driver("rollouter"))
            .remote(config, run)
        )
        self.trainer = (
            remote(TrainerActor)
            .options(
                name=f"{run.run_id}/train/0",
                namespace=NAMESPACE,
                **pools["train"].options(0, threads=config.train.threads),
            )
            .remote(config, run)
        )
        self.waiting = "engines and reward replicas"
        await started(by_place(pools, replicas))
        self.waiting = "the rollouter's reward loop and prompts"
        total = planned_steps(
            config, await result(self.rollouter.start.remote(judges, scorers, pools))
        )
        self.waiting = "the trainer"
        await result(self.trainer.setup.remote(total))
        ledger = config.run_dir / "ledger.sqlite"
        await result(
            self.rollouter.begin.remote(
                engines,
                pools["rollout"],
                specs,
                total,
                ledger.resolve(),
                replicas.get("validate", []),
                pools.get("validate"),
            )
        )
        return Roles(RayRollouter(self.rollouter), RayTrainer(self.trainer), total)

    def _beside_driver(self, role: str) -> dict[str, Any]:
        """The ledger lies on the driver's disk, so the rollouter runs on the driver's node."""
        node = ray.get_runtime_context().get_node_id()
        return {
            "num_cpus": 0,
            "name": f"{self.run.run_id}/{role}/0",
            "namespace": NAMESPACE,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            "runtime_env": {"env_vars": process_env(1, gpu=False)},
        }

    async def stop(self) -> None:
        """Asks the rollouter and trainer to finish, then the replicas, and ends every process."""
        last = [h.stop.remote() for h in [self.rollouter] if h is not None]
        last += [h.close.remote() for h in [self.trainer] if h is not None]
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await asyncio.gather(*last, return_exceptions=True)
        except TimeoutError:
            log.warning("rollouter and trainer did not stop within %.0f s", STOP_SECONDS)
        await end_replicas(self.handles)
        for handle in [self.rollouter, self.trainer]:
            if handle is not None:
                ray.kill(handle)


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
