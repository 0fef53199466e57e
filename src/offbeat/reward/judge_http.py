"""Verdicts from an OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from offbeat.config import RewardSourceSection
from offbeat.errors import UserError
from offbeat.records import Span
from offbeat.reward.judge import Verdict, Weighed
from offbeat.reward.pool import CallFailed, EndpointPool
from offbeat.reward.structure import server_fields


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
    ) -> None:
        """`transport` replaces the network; `pause_seconds` is the first pause before a retry."""
        self._section, self._name = section, name
        self._model = section.model
        self._form = server_fields(section)
        self.pool = EndpointPool(name, section, transport=transport, pause_seconds=pause_seconds)

    async def start(self) -> None:
        """Probes the server; raises `UserError` with its address.

        Without the setting `model` the server must have exactly one. A model that it does not
        list, and a form for verdicts, are tried on one verdict: not all servers list all they take.
        """
        models = await self.pool.start()
        if self._model is None:
            if len(models) != 1:
                listed = ", ".join(models[:10]) or "none that it lists"
                await self.pool.stop()
                raise UserError(
                    f"reward.{self._name}.model is missing; set it to one of the models of "
                    f"{self.pool.address}: {listed}"
                )
            self._model = models[0]
        if self._model not in models or self._form:
            try:
                await self._try(models)
            except BaseException:
                await self.pool.stop()
                raise

    async def _try(self, models: Sequence[str]) -> None:
        """Asks for one verdict; `UserError` if the server refuses it for good."""
        try:
            await self.verdict("Reply with the lowest grade.")
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

    async def verdict(self, text_prompt: str, *, vote: int = 0, criteria: int = 0) -> Verdict:
        """The judge's words; raises `CallFailed`."""
        section = self._section
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": text_prompt}],
            "max_tokens": section.max_tokens,
            "temperature": section.temperature,
        }
        if section.stop:
            body["stop"] = list(section.stop)
        body |= self._form
        try:
            answer, retries = await self.pool.post("/chat/completions", body)
        except CallFailed as failed:
            if self._form and failed.cause == "refused":
                reason = (
                    f'reward.{self._name}.structured = "on" sends {", ".join(self._form)}, which '
                    f'the server may not take; set it to "off": {failed.reason}'
                )
                raise CallFailed("refused", reason, failed.retries) from failed
            raise
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"]
            reason = choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise CallFailed("bad_response", "no choices[0].message.content", retries) from error
        if text is not None and not isinstance(text, str):
            raise CallFailed("bad_response", "the message's content is not a text", retries)
        return Verdict(text or "", "length" if reason == "length" else "stop", retries)

    @property
    def special_tokens(self) -> Sequence[str]:
        """The judge's special tokens as text."""
        return ()

    @property
    def identity(self) -> str:
        """The model."""
        return str(self._section.model)

    @property
    def down_since(self) -> float | None:
        """Since when there is nobody to ask."""
        return None

    def facts(self) -> Mapping[str, float]:
        """Running numbers for metrics."""
        return {}

    async def weigh(self, text_prompt: str, verdicts: Sequence[str]) -> Weighed:
        """The probability of each of the verdicts."""
        raise NotImplementedError

    async def drain_spans(self) -> list[Span]:
        """None: the server computes elsewhere."""
        return []

    async def stop(self) -> None:
        """Closes the client."""
        await self.pool.stop()
