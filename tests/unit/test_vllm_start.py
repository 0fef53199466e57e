"""What an engine on vLLM does when its start or its load is broken off; vLLM itself is faked."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.rollout import vllm_start
from offbeat.rollout.vllm_engine import VllmEngine


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
