"""From a sample to the row of token ids that a scorer reads, the same for all kinds of scorers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from offbeat.config import RewardSourceSection
from offbeat.errors import UserError
from offbeat.records import ScoreItem
from offbeat.reward.template import (
    TemplateFailed,
    TextTemplate,
    encode,
    encode_chat,
    load_tokenizer,
)

SCORE_TEMPLATE = "{{ question }}\n{{ answer }}"
LARGEST_LENGTH = 10**9
"""Tokenizers without a limit of their own say a number beyond this one."""

_log = logging.getLogger(__name__)


class RowEncoder:
    """Renders and encodes one scorer's texts; used by one thread at a time.

    With `chat` the question is the user's turn and the rendered text (by default the answer) the
    assistant's, in the scorer's chat template; else the rendered text is encoded as it is.
    """

    def __init__(
        self, name: str, section: RewardSourceSection, tokenizer: str | Path | None = None
    ) -> None:
        """`tokenizer` is a directory, by default the model's. Loads only the template."""
        if section.model is None:
            raise UserError(f"reward.{name}.model is missing; set it to the scorer's directory")
        self._name, self._section = name, section
        self._path = tokenizer or section.model
        self._template = TextTemplate.load(
            section.template,
            "{{ answer }}" if section.chat else SCORE_TEMPLATE,
            f"reward.{name}.template",
        )
        self.tokenizer: Any = None
        self.limit = section.max_context
        self.cut = 0

    def load(self, config: Any) -> None:
        """Loads the tokenizer; a row's limit is max_context, or the model's or tokenizer's own."""
        setting = f"reward.{self._name}.model"
        self.tokenizer = load_tokenizer(self._path, setting, chat=self._section.chat)
        self.tokenizer.truncation_side = "left"
        own = self.tokenizer.model_max_length
        most = own if own < LARGEST_LENGTH else LARGEST_LENGTH
        self.limit = min(self._section.max_context, _positions(config), most)

    def ids(self, item: ScoreItem) -> list[int] | None:
        """Token ids within the limit; None if they are too many and none may be cut.

        Raises `TemplateFailed` where the text cannot be rendered or has no tokens.
        """
        text = self._template.render(item)
        if self._section.chat:
            messages = [
                {"role": "user", "content": item.prompt.question},
                {"role": "assistant", "content": text},
            ]
            ids = encode_chat(self.tokenizer, messages, ask=False)
        else:
            ids = encode(self.tokenizer, text)
        if not ids:
            raise TemplateFailed("the text has no tokens")
        if len(ids) <= self.limit:
            return ids
        if self._section.over_length == "fail":
            return None
        self._note_cut(len(ids))
        if not self._section.chat:
            short = self.tokenizer(text, truncation=True, max_length=self.limit)["input_ids"]
            return list(short)
        head = ids[:1] if ids[0] == self.tokenizer.bos_token_id else []
        return head + ids[len(ids) - self.limit + len(head) :]

    def _note_cut(self, length: int) -> None:
        self.cut += 1
        if self.cut in {1, 10, 100, 1000, 10_000, 100_000}:
            _log.warning(
                "reward.%s: %d texts cut from the front so far, the last one from %d to %d tokens",
                self._name, self.cut, length, self.limit,
            )  # fmt: skip


def counts_from_pad(config: Any) -> bool:
    """Whether the model counts positions from behind the pad id, as RoBERTa does."""
    kind: str = config.get_text_config().model_type
    shifted = ("roberta", "camembert", "longformer", "mpnet", "esm", "luke", "ibert", "data2vec")
    return kind.startswith(shifted) or "roberta" in kind


def _positions(config: Any) -> int:
    """Tokens that the model has positions for."""
    text = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    if not isinstance(most, int) or most <= 0:
        return LARGEST_LENGTH
    return most - (text.pad_token_id or 0) - 1 if counts_from_pad(config) else most
