"""A judge behind vLLM's own OpenAI-compatible server, started here on loopback and killed here."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from judge_models import Oracle

from offbeat.config import RewardSourceSection
from offbeat.errors import UserError
from offbeat.records import Prompt, Reward, ScoreItem
from offbeat.reward.build import build_source
from offbeat.reward.judge import Weighed
from offbeat.reward.judge_http import HttpBackend
from offbeat.testing.tiny import CHARACTERS, make_tiny_model

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
COMPACT = {"backend": "xgrammar", "disable_any_whitespace": True}
"""JSON without white space: a random model would fill its 40 tokens with it."""
START_SECONDS = 240
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int
    path: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def kill(self) -> None:
        """The whole process group: vLLM's core and workers too."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(20)


def sharpen(path: Path, eos: int) -> None:
    """Makes some tokens much likelier than others, and the end unlikely."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    head = model.lm_head.weight.data
    head *= 2.0 / float(head.std() * model.config.hidden_size**0.5)
    head[eos] = 0
    model.save_pretrained(path)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    path = make_tiny_model(folder / "model", tied=False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path, chat_template=CHAT)
    tokenizer.save_pretrained(path)
    sharpen(path, tokenizer.eos_token_id)
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path),
        "--served-model-name", "tiny-judge", "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16",
        "--generation-config", "vllm",
        "--structured-outputs-config", json.dumps(COMPACT),
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=os.environ | ENVIRONMENT, stdout=log, stderr=log, start_new_session=True
        )
    found = Server(process, port, path)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not healthy(port):
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
            time.sleep(0.5)
        yield found
    finally:
        found.kill()


def healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def section(url: str, **settings: Any) -> RewardSourceSection:
    base = {"kind": "genrm", "base_url": url, "temperature": 1.0, "max_tokens": 40, "retries": 1}
    return RewardSourceSection.model_validate(base | settings)


def items(count: int) -> list[ScoreItem]:
    return [
        ScoreItem(Prompt(i, np.zeros(1, np.int32), "p", f"{i} + 1?"), f"{i + 1}")
        for i in range(count)
    ]


def judged(url: str, count: int = 8, **settings: Any) -> list[Reward]:
    async def main() -> list[Reward]:
        source = build_source("judge", section(url, **settings))
        await source.start()
        try:
            return await asyncio.wait_for(source.score(items(count)), 120)
        finally:
            await source.stop()

    return asyncio.run(main())


def test_json_is_enforced_and_the_model_is_found(server: Server) -> None:
    rewards = judged(server.url, 16, parser="json", structured="on")
    for reward in rewards:
        assert reward.status == "scored", reward
        written = json.loads(reward.raw)
        assert list(written) == ["score"]
        assert 1 <= written["score"] <= 10
    assert len({reward.value for reward in rewards}) > 2


def test_without_the_form_nothing_is_readable(server: Server) -> None:
    rewards = judged(server.url, parser="json", model="tiny-judge")
    assert {(reward.status, reward.cause) for reward in rewards} == {("failed", "unparseable")}
    assert all(reward.raw for reward in rewards)


def test_yes_no_and_numbers_by_vllms_own_field(server: Server) -> None:
    rewards = judged(server.url, 16, parser="yes_no", structured="on")
    assert {reward.raw for reward in rewards} <= {"yes", "no"}
    assert all(reward.value in {0.0, 1.0} for reward in rewards)
    rewards = judged(server.url, parser="number", structured="on", scale=(0, 9.99))
    assert all(reward.value == float(reward.raw) / 9.99 for reward in rewards)


def test_a_text_that_is_too_long_is_named(server: Server) -> None:
    long = ScoreItem(Prompt(0, np.zeros(1, np.int32), "p", "q"), "x" * 2000)

    async def main() -> list[Reward]:
        source = build_source("judge", section(server.url))
        await source.start()
        try:
            return await source.score([long])
        finally:
            await source.stop()

    (reward,) = asyncio.run(main())
    assert (reward.status, reward.cause, reward.value) == ("failed", "too_long", None)


def test_wrong_settings_are_refused_at_start(server: Server) -> None:
    with pytest.raises(UserError, match=r'reward\.judge\.model = "other" .*\(tiny-judge\)'):
        judged(server.url, model="other")
    with pytest.raises(UserError, match=r"reward\.judge\.base_url: .* does not answer"):
        judged(f"http://127.0.0.1:{free_port()}/v1")
    with pytest.raises(UserError, match="reward"):
        judged(server.url.removesuffix("/v1"), model="tiny-judge")


def test_probabilities_are_those_of_plain_passes(server: Server) -> None:
    """Verdicts of one character and of two, of which one goes on to another: the server's model
    by transformers, in the server's chat template."""
    oracle = Oracle(server.path)
    found: list[tuple[str, tuple[str, ...], Weighed]] = []

    def begins(text: str, said: str) -> float:
        ids = oracle.tokenizer(text + said)["input_ids"]
        return oracle.begins(ids[: len(ids) - len(said)], ids[len(ids) - len(said) :])

    def likely(text: str, count: int) -> list[str]:
        signs = [sign for sign in CHARACTERS if sign.isalnum()]
        return sorted(signs, key=lambda sign: -begins(text, sign))[:count]

    async def main() -> None:
        judge = HttpBackend(section(server.url, model="tiny-judge", temperature=0.0), name="judge")
        await judge.start()
        try:
            for number in range(4):
                text = f"Question {number}?"
                shown = f"user: {text}\nassistant: "
                first, second, third = likely(shown, 3)
                more = [first + sign for sign in likely(shown + first, 2)]
                other = third + likely(shown + third, 1)[0]
                verdicts = (first, second, *more, other)
                found.append((shown, verdicts, await judge.weigh(text, verdicts)))
        finally:
            await judge.stop()

    asyncio.run(asyncio.wait_for(main(), 120))
    for shown, verdicts, weighed in found:
        first, *_ = verdicts
        expected = [
            sum(begins(shown, space + verdict) for space in ("", " ", "\n", "  "))
            for verdict in verdicts
        ]
        expected[0] -= sum(
            share for verdict, share in zip(verdicts, expected, strict=True)
            if verdict.startswith(first) and verdict != first
        )  # fmt: skip
        np.testing.assert_allclose(weighed.probabilities, expected, atol=2e-3)
        assert min(expected) > 0.004
        assert weighed.verdict.prompt_tokens > len(shown)
        assert weighed.verdict.completion_tokens > 0


def test_a_source_reads_an_expected_grade(server: Server) -> None:
    """The server's log-probs suffice at start. With less than half of the probability on them
    verdicts are not read: so it says of a random model, unless its likeliest words are these."""
    choices = dict.fromkeys(string.ascii_lowercase + string.digits, 0.5)
    for reward in judged(server.url, 6, parser="expected", choices=choices):
        (call,) = reward.transcripts
        mass = float(call.raw.rpartition("mass ")[2].rstrip(")"))
        assert 0.02 < mass < 1
        assert (reward.value, reward.cause) == (
            (0.5, None) if mass >= 0.5 else (None, "unparseable")
        )
        assert call.prompt_tokens > 20


def test_seeds_of_ones_own_repeat(server: Server) -> None:
    first = judged(server.url, 6, seed=3)
    assert [reward.raw for reward in first] == [r.raw for r in judged(server.url, 6, seed=3)]
    assert [reward.raw for reward in first] != [r.raw for r in judged(server.url, 6, seed=4)]


def test_killed_midway_is_a_typed_failure(server: Server) -> None:
    """The last test: the server ends while it judges."""

    async def main() -> list[Reward]:
        source = build_source(
            "judge", section(server.url, max_tokens=200, deadline_seconds=10, patience_seconds=4)
        )
        await source.start()
        try:
            (first,) = await source.score(items(1))
            assert first.raw
            judging = asyncio.create_task(source.score(items(24)))
            await asyncio.sleep(0.15)
            await asyncio.to_thread(server.kill)
            return [*await judging, *await source.score(items(2))]
        finally:
            await source.stop()

    rewards = asyncio.run(asyncio.wait_for(main(), 120))
    causes = [reward.cause for reward in rewards]
    assert causes[-2:] == ["unavailable"] * 2
    assert causes.count("unavailable") > 2, causes
    for reward in rewards:
        assert (reward.value is None) == (reward.status == "failed")
        assert reward.cause in {None, "unavailable", "unparseable", "out_of_range"}
