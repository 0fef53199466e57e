"""Verdicts from an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx

from offbeat.config import RewardSourceSection
from offbeat.errors import UserError
from offbeat.records import Span
from offbeat.reward.chat_answer import Said, read_answer
from offbeat.reward.expected import weighed_verdicts
from offbeat.reward.identity import call_seed, server_fingerprint, source_seed
from offbeat.reward.in_flight import InFlight
from offbeat.reward.judge import Verdict, Weighed
from offbeat.reward.pool import CallFailed, EndpointPool
from offbeat.reward.structure import server_fields
from offbeat.reward.tally import Tally

TOP = 20
"""Log-probs at a place: the most that OpenAI's interface gives."""
PROBE = "Reply with the lowest grade."


class HttpBackend:
    """Verdicts from an OpenAI-compatible server, always by POST `/chat/completions`.

    The rendered text is one user message; the server applies its model's chat template, so the
    setting `chat` has no meaning here. With structured = "on" the verdict's form travels along
    (`structure.server_fields`). Retries are the pool's.
    """

    def __init__(
        self,
        section: RewardSourceSection,
        *,
        name: str = "genrm",
        transport: httpx.AsyncBaseTransport | None = None,
        pause_seconds: float = 0.5,
        seed: int = 0,
    ) -> None:
        """`transport` replaces the network; `pause_seconds` is the first pause before a retry;
        `seed` is the run's, where the section has none."""
        self._section, self._name = section, name
        self._model = section.model
        self._form = server_fields(section)
        self._seed: int | None = source_seed(
            section.seed if section.seed is not None else seed, name
        )
        self._verdicts = InFlight(f"judge/{name}", Verdict.free)
        self._weighed = InFlight(f"judge/{name}", Weighed.free)
        self._goes_on = False
        self._identity = str(section.model)
        self.pool = EndpointPool(name, section, transport=transport, pause_seconds=pause_seconds)

    async def start(self) -> None:
        """Probes the server; raises `UserError` with its address.

        Without the setting `model` the server must have exactly one. A model that it does not
        list, a form for verdicts, and log-probs are tried on one verdict: not all servers list or
        give all they take.
        """
        models = await self.pool.start()
        try:
            self._take_model(models)
            if self._model not in models or self._form:
                await self._try(models)
            if self._section.parser == "expected":
                await self._try_log_probs()
        except BaseException:
            await self.pool.stop()
            raise

    def _take_model(self, models: Sequence[str]) -> None:
        if self._model is None:
            if len(models) != 1:
                listed = ", ".join(models[:10]) or "none that it lists"
                raise UserError(
                    f"reward.{self._name}.model is missing; set it to one of the models of "
                    f"{self.pool.address}: {listed}"
                )
            self._model = models[0]
        said = self.pool.described(self._model)
        addresses = " ".join(sorted(self.pool.addresses))
        self._identity = f"{addresses} {self._model} {server_fingerprint(said)}"
        if said.get("owned_by") == "vllm":
            self._goes_on = True
            # Its CPU build dies of a seeded request whose prompt it computes in parts.
            self._seed = None if self._section.seed is None else self._seed

    async def _try(self, models: Sequence[str]) -> None:
        """Asks for one verdict; `UserError` if the server refuses it for good."""
        try:
            await self.verdict(PROBE)
        except CallFailed as failed:
            if failed.cause != "refused":
                return  # busy, slow or down: what calls are retried for
            key = f"reward.{self._name}"
            if self._model not in models:
                listed = ", ".join(models[:10]) or "none"
                raise UserError(
                    f'{key}.model = "{self._model}" is none of the models that {self.pool.address} '
                    f"lists ({listed}), and it refuses it: {failed.reason}"
                ) from failed
            raise UserError(failed.reason) from failed

    async def _try_log_probs(self) -> None:
        """Asks for probabilities once; `UserError` if the server gives none."""
        try:
            await self.weigh(PROBE, tuple(weighed_verdicts(self._section)))
        except CallFailed as failed:
            if failed.cause not in {"refused", "no_logprobs", "bad_response"}:
                return
            raise UserError(
                f'reward.{self._name}.parser = "expected" needs the log-probs of a server '
                f"(logprobs, top_logprobs = {TOP}), which {self.pool.address} does not give for "
                f"{self._model}: {failed.reason}; set another parser, as number or choice"
            ) from failed

    async def verdict(self, text_prompt: str, *, vote: int = 0, criteria: int = 0) -> Verdict:
        """The judge's words; raises `CallFailed`.

        At temperature 0 equal texts in flight are asked for once.
        """
        if self._section.temperature > 0:
            return await self._judge(text_prompt, vote, criteria)
        key = (text_prompt, criteria)
        return await self._verdicts.get(key, lambda: self._judge(text_prompt, vote, criteria))

    async def weigh(self, text_prompt: str, verdicts: Sequence[str]) -> Weighed:
        """The probability of each of the verdicts as the judge's next words; raises `CallFailed`.

        From the log-probs of the likeliest tokens (`TOP`), at each place of a greedy verdict. What
        that leaves open, as the 1 of a 10 where something else was written, is asked for behind
        those words if the server can go on with a message; else it counts as what it is so far.
        """
        wanted = tuple(verdicts)
        return await self._weighed.get(
            (text_prompt, wanted), lambda: self._weigh(text_prompt, wanted)
        )

    @property
    def special_tokens(self) -> Sequence[str]:
        """None: the server's tokenizer is not known."""
        return ()

    @property
    def identity(self) -> str:
        """The servers' addresses, the model, and what they say of it."""
        return self._identity

    @property
    def down_since(self) -> float | None:
        """Since when no server could be asked."""
        return self.pool.down_since

    def facts(self) -> Mapping[str, float]:
        """The pool's running numbers."""
        return self.pool.facts()

    async def drain_spans(self) -> list[Span]:
        """None: the server computes elsewhere."""
        return []

    async def stop(self) -> None:
        """Ends the verdicts that are under way and closes the client."""
        self._verdicts.stop()
        self._weighed.stop()
        await self.pool.stop()

    async def _judge(self, text: str, vote: int, criteria: int) -> Verdict:
        section = self._section
        begun = time.monotonic()
        body = self._body(text, section.max_tokens, section.temperature)
        if section.temperature > 0 and self._seed is not None:
            body["seed"] = call_seed(self._seed, vote, text)
        if section.stop:
            body["stop"] = list(section.stop)
        form = server_fields(section, criteria)
        try:
            said = await self._ask(body | form)
        except CallFailed as failed:
            if form and failed.cause == "refused":
                reason = (
                    f'reward.{self._name}.structured = "on" sends {", ".join(form)}, which '
                    f'the server may not take; set it to "off": {failed.reason}'
                )
                raise CallFailed("refused", reason, failed.retries) from failed
            raise
        return said.verdict(time.monotonic() - begun)

    async def _weigh(self, text: str, verdicts: tuple[str, ...]) -> Weighed:
        begun = time.monotonic()
        tally = Tally(verdicts)
        body = self._body(text, tally.depth + 2, 0.0) | {"logprobs": True, "top_logprobs": TOP}
        first = await self._ask(body)
        tally.add(first.places())
        said = [first]
        for _ in range(tally.depth + 2 if self._goes_on else 0):
            taken = tally.take()
            if not taken:
                break
            more = await asyncio.gather(*(self._ask(_behind(body, each.text)) for each in taken))
            for each, answer in zip(taken, more, strict=True):
                tally.add(answer.places(), each)
            said += more
        verdict = replace(
            first.verdict(time.monotonic() - begun),
            finish_reason="stop",
            retries=sum(answer.retries for answer in said),
            prompt_tokens=sum(answer.prompt_tokens for answer in said),
            completion_tokens=sum(answer.completion_tokens for answer in said),
        )
        return Weighed(tally.probabilities(), verdict)

    def _body(self, text: str, max_tokens: int, temperature: float) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": temperature,
        }

    async def _ask(self, body: Mapping[str, Any]) -> Said:
        answer, retries = await self.pool.post("/chat/completions", body)
        return read_answer(answer, retries)


def _behind(body: Mapping[str, Any], words: str) -> dict[str, Any]:
    """The same request, to go on behind words that the judge has said (vLLM's fields)."""
    said = {"role": "assistant", "content": words}
    return {
        **body,
        "messages": [*body["messages"], said],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
