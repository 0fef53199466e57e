"""What an OpenAI-compatible server answers: words, what they cost, and log-probs (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.reward.judge import Verdict
from offbeat.reward.pool import CallFailed
from offbeat.reward.tally import Place


@dataclass(frozen=True, slots=True)
class Said:
    """One answer."""

    text: str
    finish_reason: str
    retries: int
    prompt_tokens: int
    completion_tokens: int
    logprobs: Any

    def verdict(self, seconds: float) -> Verdict:
        """The same as a verdict that took so long."""
        return Verdict(
            self.text,
            self.finish_reason,
            self.retries,
            self.prompt_tokens,
            self.completion_tokens,
            seconds,
        )

    def places(self) -> list[Place]:
        """What was written place by place, with the probabilities of what could have been.

        Raises `CallFailed`: `no_logprobs` where the server gave none, `bad_response`.
        """
        try:
            content = None if self.logprobs is None else self.logprobs["content"]
            if content is None or (self.text and not content):
                raise CallFailed("no_logprobs", "the server gave no log-probs", self.retries)
            places: list[Place] = [
                (str(each["token"]), _likely(each["top_logprobs"])) for each in content
            ]
            if places and not places[0][1]:
                raise CallFailed("no_logprobs", "the server gave no top_logprobs", self.retries)
            return places
        except (KeyError, TypeError, ValueError) as error:
            reason = "log-probs of another form than OpenAI's"
            raise CallFailed("bad_response", reason, self.retries) from error


def read_answer(answer: Any, retries: int) -> Said:
    """Raises `CallFailed` (`bad_response`) for what is no chat completion."""
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"]
        reason, logprobs = choice.get("finish_reason"), choice.get("logprobs")
        usage = answer.get("usage")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CallFailed("bad_response", "no choices[0].message.content", retries) from error
    if text is not None and not isinstance(text, str):
        raise CallFailed("bad_response", "the message's content is not a text", retries)
    return Said(
        text or "",
        "length" if reason == "length" else "stop",
        retries,
        _count(usage, "prompt_tokens"),
        _count(usage, "completion_tokens"),
        logprobs,
    )


def _count(usage: Any, name: str) -> int:
    """Tokens by the server's own count; 0 where it keeps none."""
    found = usage.get(name) if isinstance(usage, Mapping) else None
    return found if isinstance(found, int) and found > 0 else 0


def _likely(top: Any) -> dict[str, float]:
    """Tokens that read alike are one piece. A piece without a log-prob has none to give."""
    found: dict[str, float] = {}
    for each in top:
        piece, logprob = str(each["token"]), float(each["logprob"])
        if not math.isnan(logprob):
            found[piece] = found.get(piece, 0.0) + math.exp(min(logprob, 0.0))
    return found
