"""What an engine on vLLM does when its start or its load is broken off; vLLM itself is faked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from offbeat.errors import RunFailed
from offbeat.records import GenerateRequest, Manifest, PolicyVersion, Sampling, TensorEntry
from offbeat.rollout import vllm_start
from offbeat.rollout.stop_strings import StopStrings
from offbeat.rollout.vllm_engine import VllmEngine
from offbeat.rollout.vllm_start import Started, tensor_shapes


def engine() -> VllmEngine:
    return VllmEngine("model", max_context=32)


@pytest.mark.parametrize("ends", ["up", "failed"])
def test_a_start_that_nobody_waits_for_leaves_no_vllm(
    monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """It cannot be broken off on its thread: whoever cancels it goes on when all is gone again."""
    stopped: list[float] = []
    over: list[bool] = []

    def start(**settings: Any) -> Any:
        time.sleep(0.2)
        over.append(True)
        if ends == "failed":
            raise OSError("no such model")
        return SimpleNamespace(llm=SimpleNamespace(shutdown=stopped.append))

    monkeypatch.setattr(vllm_start, "start_vllm", start)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await engine().start()
        assert over
        assert len(stopped) == (ends == "up")

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_what_the_trainer_publishes_fits_files_that_are_named_otherwise(
    tmp_path: Path, kind: str
) -> None:
    """Llama 2's files hold a buffer that no model has; GPT-2's are those of the base model."""
    tensors = {"layers.0.q.weight": torch.ones(3, 2), "norm.weight": torch.ones(2)}
    if kind == "llama":
        stored = {f"model.{name}": tensor for name, tensor in tensors.items()}
        stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    else:
        stored = tensors | {"layers.0.attn.bias": torch.ones(1, 1, 8, 8)}
    save_file(stored, tmp_path / "model.safetensors")
    started = Started(None, 32, 100, None, lambda ids: "", tensor_shapes(tmp_path))

    def published(named: Mapping[str, torch.Tensor]) -> Manifest:
        shapes = {f"model.{name}": tuple(tensor.shape) for name, tensor in named.items()}
        entries = {name: TensorEntry("float32", shape, 0) for name, shape in shapes.items()}
        return Manifest(PolicyVersion(0, 1), "full", "there", entries)

    started.check(published(tensors))
    with pytest.raises(RunFailed, match=r"lacks .*norm\.weight"):
        started.check(published({"layers.0.q.weight": torch.ones(3, 2)}))
    with pytest.raises(RunFailed, match="shape"):
        started.check(published(tensors | {"norm.weight": torch.ones(3)}))


class Silent:
    """An `AsyncLLM` that takes requests, gives nothing, and fails to put new weights in."""

    errored = False
    output_handler = None

    async def generate(self, prompt: Any, params: Any, name: str) -> AsyncGenerator[Any]:
        await asyncio.Event().wait()
        yield

    async def collective_rpc(self, method: str, args: Any = ()) -> list[str]:
        return [""]

    async def pause_generation(self, **how: Any) -> None:
        pass

    start_weight_update = pause_generation

    async def update_weights(self, request: Any) -> None:
        raise RuntimeError("version 0.1 lacks lm_head.weight")

    def shutdown(self, timeout: float) -> None:
        self.errored = True


@pytest.mark.vllm
@pytest.mark.parametrize("how", ["a load that fails on its way in", "a stop after the core died"])
def test_the_engines_end_is_told_to_whoever_waits_for_a_sample(how: str) -> None:
    pytest.importorskip("vllm")
    held, llm = engine(), Silent()
    shapes: dict[str, tuple[int, ...]] = {}
    held._started = Started(llm, 32, 100, None, lambda ids: "", shapes)
    held._stops = StopStrings(lambda ids: "")
    request = GenerateRequest("r", np.ones(4, np.int32), 2, Sampling(8))

    async def main() -> None:
        async def ask() -> list[Any]:
            return [item async for item in held.generate(request)]

        waiting = asyncio.create_task(ask())
        await asyncio.sleep(0.05)
        assert (await held.health()).running == 2
        if "load" in how:
            manifest = Manifest(PolicyVersion(0, 1), "full", "", {})
            with pytest.raises(RunFailed, match=r"failed to load version 0\.1: version 0\.1 lacks"):
                await held.load(manifest)
            says = r"failed to load version 0\.1"
        else:
            llm.errored = True
            await held.stop()
            says = "not running"
        with pytest.raises(RunFailed, match=says):
            async with asyncio.timeout(2):
                await waiting

    asyncio.run(main())
