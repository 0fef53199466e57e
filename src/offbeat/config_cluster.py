"""Settings of [weights] and [cluster]: how versions travel, and where roles run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from offbeat.config_base import Positive, Seconds, Section


class WeightsSection(Section):
    """Weight sync."""

    folder: Path | None = Field(
        None, description="where versions lie; default /dev/shm if it has room, else the run"
    )
    deadline_seconds: Seconds = Field(120, description="for an engine to load and acknowledge")
    transport: Literal["folder", "broadcast", "ipc"] = Field(
        "folder",
        description="how versions travel: files that engines map, a process group "
        "(NCCL between GPUs, gloo between CPUs), or the memory of a shared GPU",
    )
    loads_at_once: Positive | None = Field(
        None, description="engines that load at the same time; default: half of them"
    )


class ClusterSection(Section):
    """Where roles run."""

    backend: Literal["ray", "local"] = Field(
        "ray", description="ray: actors on a cluster; local: everything in one process"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="kind of devices")
    single_device: bool = Field(
        False,
        description="all roles on one device, for trying things out: they alternate, so "
        "train.max_staleness must be 0",
    )
    slots: Positive = Field(
        8, description="offbeat_slot resources of a CPU cluster that Offbeat starts itself"
    )
    placement_deadline_seconds: Seconds = Field(60, description="to get the placement groups")
    start_deadline_seconds: Seconds = Field(600, description="to start all roles")
    max_restarts: Annotated[int, Field(ge=0)] = Field(
        3, description="restarts of trainer and rollouter in one start, and of each engine"
    )
    heartbeat_seconds: Seconds = Field(
        60, description="a rollouter or trainer process that is silent for so long has died"
    )
    grace_seconds: Seconds = Field(
        120, description="after Ctrl-C or SIGTERM: to end the step and save; a second one ends now"
    )
