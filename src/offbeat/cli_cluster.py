"""The part of `check` about devices: the map, here or on a cluster that is only assumed.

Needs neither torch nor Ray nor vLLM nor a GPU: the map of eight nodes can be had on a laptop.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from offbeat.cluster.plan import (
    Kind,
    Placement,
    available_devices,
    check_fits,
    check_memory,
    check_packs,
    cuda_devices,
    device_kind,
    plan_pools,
    reserved,
    resource_map,
)
from offbeat.cluster.specs import validators
from offbeat.config import SINGLE_DEVICE_SHARE, Config, RewardSourceSection, RolloutSection
from offbeat.errors import UserError

Say = Callable[[str], None]

PROBE_SECONDS = 5.0
"""How long a server may take to answer."""
MOST = 10_000
"""Nodes, or devices of a node, that can be assumed."""
TAKE_TURNS = """\
single device: the roles take turns. A step's samples are generated first, and the reward models
score those that are done on the same device meanwhile; then the trainer works; then the engine
loads the new weights. Rollout and training never overlap, so a step takes the sum of its parts,
and the memory must hold all models at once: for trying things out."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """A cluster that is not there: nodes, and devices of each."""

    nodes: int
    per_node: int


def parse_assumed(text: str) -> Assumed:
    """`3` is one node of three devices, `2x8` two nodes of eight. Raises `UserError`."""
    found = re.fullmatch(r"(?:([0-9]{1,5})[xX\u00d7])?([0-9]{1,5})", text.strip())
    nodes, per_node = (int(found[1] or 1), int(found[2])) if found else (0, 0)
    if not (1 <= nodes <= MOST and 1 <= per_node <= MOST):
        raise UserError(
            f"--assume {text!r} must be a number of devices, as 3, or nodes x devices of each, as "
            f"2x8, with numbers from 1 to {MOST}"
        )
    return Assumed(nodes, per_node)


def check_devices(config: Config, say: Say, assumed: Assumed | None = None) -> None:
    """Says the map; raises `UserError` where the pools cannot be had."""
    if assumed is not None:
        _check_assumed(config, say, assumed)
        return
    kind = device_kind(config)
    plans = plan_pools(config)
    check_memory(config, kind)
    say("\n" + resource_map(plans, kind, config))
    _check_single_device(config, kind, say)
    if config.cluster.backend == "local":
        if kind == "cuda" and not cuda_devices():
            raise UserError("cluster.device = cuda, and no NVIDIA GPU is seen here; set it to cpu")
        if kind == "cuda":
            _check_local_memory(config)
        say("backend local: all of them run in this one process and alternate on its devices")
        return
    address = os.environ.get("RAY_ADDRESS")
    if address:
        _check_address(address)
        say(f"RAY_ADDRESS is set: that the pools fit is seen when {address} is joined")
        return
    available = available_devices(config, kind)
    check_fits(plans, available, kind)
    check_packs(plans, [available], kind)
    needed = sum(plan.devices for plan in reserved(plans))
    say(f"{needed} of {available} {'slots' if kind == 'cpu' else 'GPUs'}")


def _check_assumed(config: Config, say: Say, assumed: Assumed) -> None:
    if config.cluster.backend == "local":
        raise UserError(
            'cluster.backend = "local" runs everything in one process, and --assume lays pools out '
            'on a cluster; set --cluster.backend "ray"'
        )
    kind: Kind = "cpu" if config.cluster.device == "cpu" else "cuda"
    noun = "slot" if kind == "cpu" else "GPU"
    plans = plan_pools(config)
    check_memory(config, kind)
    placement = check_packs(plans, [assumed.per_node] * assumed.nodes, kind)
    say(
        f"\nassuming {assumed.nodes} node{'s' if assumed.nodes > 1 else ''} of {assumed.per_node} "
        f"{noun}{'s' if assumed.per_node > 1 else ''}:\n"
        + resource_map(plans, kind, config, placement)
    )
    needed = sum(plan.devices for plan in reserved(plans))
    say(f"{needed} of {assumed.nodes * assumed.per_node} {noun}s")
    _check_single_device(config, kind, say)
    _check_nodes(config, placement, say)


def _check_single_device(config: Config, kind: Kind, say: Say) -> None:
    if not config.cluster.single_device:
        return
    if kind == "cuda" and config.weights.transport == "broadcast":
        raise UserError(
            'weights.transport = "broadcast" needs a GPU for each member, because NCCL admits a '
            'GPU once, and cluster.single_device has one; set it to "folder" or "ipc"'
        )
    say(TAKE_TURNS)


def _check_local_memory(config: Config) -> None:
    """In one process everything computes on the first GPU, the trainer too."""
    engines = [
        (key, section.memory_share, section.replicas + validators(config) * (key == "rollout"))
        for key, section, _ in _models(config)
        if section.engine == "vllm"
    ]
    if sum(share * number for _, share, number in engines) > SINGLE_DEVICE_SHARE + 1e-9:
        named = " + ".join(f"{key}.memory_share {share:g} x {n}" for key, share, n in engines)
        raise UserError(
            'cluster.backend = "local" puts every model on the first GPU, and '
            f"{named} come to more than {SINGLE_DEVICE_SHARE:g} of its memory, so that the trainer "
            'has too little; lower them, or set cluster.backend to "ray"'
        )


def _check_nodes(config: Config, placement: Placement, say: Say) -> None:
    """What must be the same on several nodes, and whether weights get from one to another."""
    used = {spot.node for spots in placement.values() for spot in spots}
    if len(used) < 2:
        return
    weights = config.weights
    (trainer,) = (spot.node for spot in placement["train"])
    policy = [*placement["rollout"], *placement.get("validate", ())]
    away = sorted({spot.node for spot in policy} - {trainer})
    shared = ["the models' directories", f"runs_dir ({config.runs_dir})"]
    if weights.transport == "folder" and away:
        if weights.folder is None:
            nodes = ", ".join(f"node{node}" for node in away)
            raise UserError(
                'weights.transport = "folder" publishes into the memory of the trainer\'s node '
                f"(node{trainer}), where engines on {nodes} cannot read it; set weights.folder to "
                "a directory on a file system that all nodes share, or weights.transport to "
                '"broadcast"'
            )
        shared.append(f"weights.folder ({weights.folder})")
    say(f"on several nodes, every one must see under the same path: {', '.join(shared)}")


def _check_address(address: str) -> None:
    """Refuses host:port where nothing listens, which Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"RAY_ADDRESS = {address!r} does not answer ({error}); start the cluster, correct the "
            "address, or unset it to start Ray here"
        ) from None


def check_engines(config: Config, say: Say, *, assumed: bool = False) -> None:
    """What each model's engine must be able to do; raises `UserError`.

    vLLM is looked for, never imported. On an assumed cluster it may be missing here.
    """
    from offbeat.rollout.vllm_args import INSTALL, check_engine_args

    installed = find_spec("vllm") is not None
    for key, section, model in _models(config):
        named = f"{key}.engine_args"
        if section.engine != "vllm":
            if section.engine_args:
                say(f'note: {named} is for engine = "vllm" and does nothing with {key}.engine')
            continue
        _check_heads(f"{key}.devices_per_replica", section.devices_per_replica, model)
        if installed:
            check_engine_args(named, section.engine_args)
        elif assumed:
            more = f"; {named} is not checked" if section.engine_args else ""
            say(f'note: {key}.engine = "vllm", and vLLM is not installed on this machine{more}')
        else:
            raise UserError(
                f'{key}.engine = "vllm", and vLLM is not installed; {INSTALL}, or set it to '
                '"transformers"'
            )
    if validators(config) and config.rollout.engine == "vllm":
        own = config.validation.devices_per_replica
        _check_heads("validate.devices_per_replica", own, config.model.path)


def _models(config: Config) -> Iterator[tuple[str, RolloutSection | RewardSourceSection, Path]]:
    """Every model that the run stands up for generating or scoring: section, its name, folder."""
    yield "rollout", config.rollout, config.model.path
    for name, source in config.active_rewards.items():
        if source.has_pool:
            yield f"reward.{name}", source, Path(source.model or "")


def _check_heads(setting: str, devices: int, model: Path) -> None:
    """vLLM gives each device of a replica the same number of attention heads."""
    try:
        described = json.loads((model / "config.json").read_text(encoding="utf-8"))
        inner = described.get("text_config") or {}
        heads = described.get("num_attention_heads", inner.get("num_attention_heads"))
    except (OSError, ValueError, AttributeError):
        return  # not here, or what `check_weights` and the tokenizer say more of
    if devices > 1 and isinstance(heads, int) and heads % devices:
        good = [n for n in range(1, heads + 1) if heads % n == 0]
        raise UserError(
            f"{setting} = {devices} does not divide the {heads} attention heads of {model}; set it "
            f"to one of {', '.join(map(str, good))}"
        )
