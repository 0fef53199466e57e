"""What each replica is built from: plain values, so that they travel to an actor's process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from offbeat.config import Config, RewardSourceSection
from offbeat.config_base import EngineName
from offbeat.rates import Rate
from offbeat.records import PolicyVersion
from offbeat.reward.identity import source_seed


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """A generating replica: of the policy, or of a judge. `devices`, `memory_share` and
    `engine_args` are for vLLM: tensor-parallel size, share of a GPU's memory, further arguments."""

    model_path: str
    role: str
    replica: int
    seats: int
    max_context: int
    seed: int
    dtype: str
    device: str
    on_update: str
    threads: int
    lineage: int = 0
    tokenizer_path: str | None = None
    logs: Path | None = None
    engine: EngineName = "transformers"
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    memory_share: float = 0.9
    devices: int = 1


@dataclass(frozen=True, slots=True)
class ScorerSpec:
    """A replica of a discriminative reward model."""

    name: str
    replica: int
    section: RewardSourceSection
    device: str
    logs: Path | None = None


@dataclass(frozen=True, slots=True)
class GoOn:
    """Where a run goes on: from a checkpoint (None: from the model, at version 0). `done`: steps of
    a trainer that lives, where only the rollouter starts again. `rates`: with what the steps that
    are recorded already were trained; `launch.resume` reads them from the ledger."""

    version: int
    checkpoint: Path | None
    done: int | None = None
    rates: tuple[Rate, ...] = ()


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What identifies one start of a run; `go_on` None: it begins.

    `directory`: the run's, absolute, where this driver has its lock; its processes carry it.
    """

    run_id: str
    device: str
    publish_folder: Path
    lineage: int = 0
    go_on: GoOn | None = None
    directory: Path | None = None


def policy_engine(
    config: Config, run: RunSpec, replica: int, role: Literal["rollout", "validate"] = "rollout"
) -> EngineSpec:
    """The spec of engine `replica` of the policy: rollout's, or one that only validates, which is
    of the same kind and draws otherwise."""
    rollout = config.rollout
    own = role == "validate"
    devices = (config.validation if own else rollout).devices_per_replica
    return EngineSpec(
        model_path=str(config.model.path),
        role=role,
        replica=replica,
        seats=rollout.seats,
        max_context=rollout.max_context,
        seed=_engine_seed(config, run) + int(own),
        dtype=config.rollout_dtype,
        device=run.device,
        on_update=rollout.on_update,
        threads=rollout.threads,
        lineage=run.lineage,
        logs=log_folder(config),
        tokenizer_path=None if config.model.tokenizer is None else str(config.model.tokenizer),
        engine=rollout.engine,
        engine_args=rollout.engine_args,
        memory_share=rollout.memory_share,
        devices=devices,
    )


def _engine_seed(config: Config, run: RunSpec) -> int:
    """A start that goes on with a run does not draw once more what the first one drew."""
    if run.lineage == 0:
        return config.seed
    return source_seed(config.seed, f"lineage/{run.lineage}")


def judge_engine(
    name: str, section: RewardSourceSection, config: Config, run: RunSpec, replica: int
) -> EngineSpec:
    """The spec of replica `replica` of a judge that stands on its own pool.

    Engines draw by seed and replica; the seed is the source's own, so that two judges of one run
    do not repeat one another, nor the policy.
    """
    return EngineSpec(
        model_path=str(section.model),
        role=f"reward/{name}",
        replica=replica,
        seats=section.seats,
        max_context=section.max_context,
        seed=source_seed(config.seed if section.seed is None else section.seed, name),
        dtype=section.dtype,
        device=run.device,
        on_update="recompute",
        threads=section.threads,
        logs=log_folder(config),
        engine=section.engine,
        engine_args=section.engine_args,
        memory_share=section.memory_share,
        devices=section.devices_per_replica,
    )


def scorer_spec(
    name: str, section: RewardSourceSection, config: Config, run: RunSpec, replica: int
) -> ScorerSpec:
    """The spec of replica `replica` of a scorer."""
    return ScorerSpec(name, replica, section, run.device, log_folder(config))


def log_folder(config: Config) -> Path:
    """Where the run's processes log, one file each."""
    return config.run_dir.resolve() / "logs"


def first_version(run: RunSpec) -> PolicyVersion:
    """The version of the weights that a start begins with."""
    return PolicyVersion(run.lineage, 0)


def validators(config: Config) -> int:
    """How many engines only validate."""
    wanted = config.validation.on == "dedicated" and config.data.validation is not None
    return config.validation.replicas if wanted else 0


def standing(sources: Mapping[str, RewardSourceSection], kind: str) -> dict[str, int]:
    """Sources of `kind` that stand on a pool of their own, with their replicas."""
    return {
        name: section.replicas
        for name, section in sources.items()
        if section.kind == kind and section.base_url is None
    }
