"""The answers of a fake judge: chat completions with usage, log-probs and several choices."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Mapping
from typing import Any

LONG_TEXT = 20_000  # characters; the tokens of longer texts are only estimated
END = "<|end|>"
"""The token that ends a text, where another text of the distribution goes on."""


def tokens_of(text: str) -> list[str]:
    """A text as the fake judge's tokens: words, numbers and signs, with the space before them."""
    return re.findall(r"\s?\w+|\s?[^\w\s]|\s", text)


def choose(distribution: Mapping[str, float], body: Mapping[str, Any], index: int) -> str:
    """A text of the distribution: the likeliest at temperature 0, else drawn by the seed.

    Equal requests with equal seeds draw the same; without a seed each draw is another.
    """
    if not body.get("temperature", 1.0):
        return max(distribution, key=lambda text: distribution[text])
    seed = body.get("seed")
    said = json.dumps(body.get("messages"))
    dice = random.Random() if seed is None else random.Random(f"{seed}/{index}/{said}")
    texts = list(distribution)
    return dice.choices(texts, [distribution[text] for text in texts])[0]


def completion(
    model: str,
    body: Mapping[str, Any],
    distribution: Mapping[str, float],
    finish_reason: str = "stop",
) -> bytes:
    """A chat completion for a request; the verdicts come from the distribution over texts.

    It has `n` choices, `usage` (a token of the prompt is four characters), and, as asked,
    `logprobs` with up to `top_logprobs` alternatives a token.
    """
    choices, spent = [], 0
    for index in range(int(body.get("n") or 1)):
        text = choose(distribution, body, index)
        spent += len(tokens_of(text)) if len(text) < LONG_TEXT else len(text) // 4
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": text},
            "finish_reason": finish_reason,
        }
        if body.get("logprobs"):
            top = int(body.get("top_logprobs") or 0)
            choice["logprobs"] = {"content": log_probs(text, distribution, top)}
        choices.append(choice)
    characters = sum(len(str(message.get("content") or "")) for message in body["messages"])
    prompt = max(1, characters // 4)
    return json.dumps(
        {
            "object": "chat.completion",
            "model": model,
            "choices": choices,
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": spent,
                "total_tokens": prompt + spent,
            },
        }
    ).encode()


def log_probs(text: str, distribution: Mapping[str, float], top: int) -> list[dict[str, Any]]:
    """For each token of `text` its log-prob and the `top` likeliest ones in its place.

    A token's probability is that of all texts that go on with it, among those that began alike;
    at the first token they sum to the distribution's sum, which may be less than 1.
    """
    known = {tuple(tokens_of(other)): share for other, share in distribution.items()}
    said = tuple(tokens_of(text))
    content = []
    for place, token in enumerate(said):
        following: dict[str, float] = {}
        for other, share in known.items():
            if other[:place] == said[:place]:
                here = other[place] if place < len(other) else END
                following[here] = following.get(here, 0.0) + share
        whole = sum(following.values()) if place else 1.0
        shares = {here: share / whole for here, share in following.items() if share > 0}
        ranked = sorted(shares.items(), key=lambda pair: -pair[1])[:top]
        chosen = _token(token, shares.get(token, 1.0))
        content.append(chosen | {"top_logprobs": [_token(*pair) for pair in ranked]})
    return content


def _token(text: str, share: float) -> dict[str, Any]:
    return {"token": text, "logprob": math.log(share), "bytes": list(text.encode())}
