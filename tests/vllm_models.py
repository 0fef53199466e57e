"""Tiny models that vLLM runs, their published versions, and an engine on a loop of its own."""

from __future__ import annotations

import asyncio
import json
import sys
import zlib
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent))
from engine_models import make_model, write_version

from offbeat.records import (
    Completion,
    GenerateRequest,
    Manifest,
    Progress,
    Sampling,
)
from offbeat.rollout.vllm_engine import VllmEngine

T = TypeVar("T")


def make_vllm_model(path: Path, kind: str, **more: Any) -> Path:
    """`engine_models.make_model` with heads of 32: vLLM's CPU attention knows no 16. Beside it
    lies a generation_config whose every word must be ignored."""
    sizes: dict[str, Any] = {"hidden_size": 128}
    if kind.startswith("qwen3"):
        sizes["head_dim"] = 32
    make_model(path, kind, **(sizes | more))
    text = {"do_sample": True, "temperature": 0.3, "top_k": 3, "top_p": 0.5}
    text |= {"repetition_penalty": 1.5, "eos_token_id": [0, *range(60, 90)]}
    (path / "generation_config.json").write_text(json.dumps(text))
    return path


def publish(source: Path, root: Path, step: int, seed: int | None = None) -> Manifest:
    """A noisy version of `source` with true checksums."""
    path = root / f"{step}.safetensors"
    manifest = write_version(source, path, step, seed=step if seed is None else seed)
    tensors = load_file(path)
    entries = {
        name: replace(entry, checksum=zlib.crc32(tensors[name].numpy().tobytes()))
        for name, entry in manifest.tensors.items()
    }
    return replace(manifest, tensors=entries)


class Held:
    """An engine that several tests use, on a loop that runs only while one of them waits."""

    def __init__(self, engine: VllmEngine, runner: asyncio.Runner) -> None:
        self.engine = engine
        self._runner = runner

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the engine's loop, for a minute at most."""
        return self._runner.run(asyncio.wait_for(work, 60))


@contextmanager
def hold(*engines: VllmEngine) -> Iterator[list[Held]]:
    """Starts engines, one after another (two at once would fight for the cores); stops them."""
    with asyncio.Runner() as runner:
        try:
            for engine in engines:
                runner.run(engine.start())
            yield [Held(engine, runner) for engine in engines]
        finally:
            for engine in engines:
                runner.run(engine.stop())


async def everything(
    engine: Any, name: str, prompt: Any, n: int, sampling: Sampling, **more: Any
) -> list[Completion | Progress]:
    """All that a request yields."""
    request = GenerateRequest(name, np.array(prompt, np.int32), n, sampling, **more)
    return [item async for item in engine.generate(request)]


async def collect(
    engine: Any, name: str, prompt: Any, n: int, sampling: Sampling, **more: Any
) -> list[Completion]:
    """A request's completions, by index."""
    found = await everything(engine, name, prompt, n, sampling, **more)
    return sorted((c for c in found if isinstance(c, Completion)), key=lambda c: c.index)
