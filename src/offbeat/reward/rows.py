"""From a sample to the row of token ids that a scorer reads, the same for all kinds of scorers.

A row begins with exactly one BOS where the tokenizer or the chat template has one, and ends as the
model was trained: with the EOS that its tokenizer puts behind every text, or as its chat template
ends a conversation. An answer cannot speak to the tokenizer: special tokens spelled out in it are
broken up, so that it ends no turn and moves no pooling.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offbeat.config import RewardSourceSection
from offbeat.errors import UserError
from offbeat.records import ScoreItem
from offbeat.reward.logits import Reading
from offbeat.reward.source import Logit
from offbeat.reward.template import (
    TemplateFailed,
    TextTemplate,
    encode,
    encode_chat,
    load_tokenizer,
)
from offbeat.texts import writable

SCORE_TEMPLATE = "{{ question }}\n{{ answer }}"
LARGEST_LENGTH = 10**9
"""Tokenizers without a limit of their own say a number beyond this one."""
PASSES = 8

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Row:
    """What is read of a text: ids within the limit, None if the text is too long and none may be
    cut, or cannot be rendered, as `wrong` says. `tokens` counts those of the whole text."""

    ids: list[int] | None
    tokens: int
    wrong: str = ""


def answers(
    rows: Sequence[Row], logits: Sequence[Sequence[float]], reading: Reading
) -> list[Logit]:
    """What a scorer says to each row, from the logits of those that have ids, in order."""
    found = iter(logits)
    said: list[Logit] = []
    for row in rows:
        if row.ids is None:
            said.append(Logit(None, tokens=row.tokens, wrong=row.wrong))
        else:
            one = next(found)
            said.append(Logit(reading.value(one), reading.raw(one), row.tokens, len(row.ids)))
    return said


class RowEncoder:
    """Renders and encodes one scorer's texts; used by one thread at a time.

    With `chat` the row is the prompt's conversation with the rendered text (by default the answer)
    as the assistant's turn, in the scorer's own chat template; a prompt that is a text is the
    user's turn. Else the rendered text is encoded as it is.
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
        self._special = re.compile(r"(?!)")
        self.tokenizer: Any = None
        self.limit = section.max_context
        self.cut = 0

    def load(self, config: Any) -> None:
        """Loads the tokenizer; a row's limit is max_context, or the model's or tokenizer's own."""
        setting = f"reward.{self._name}.model"
        self.tokenizer = load_tokenizer(self._path, setting, chat=self._section.chat)
        self.tokenizer.truncation_side = "left"
        self._special = _special_tokens(self.tokenizer)
        own = self.tokenizer.model_max_length
        most = own if own < LARGEST_LENGTH else LARGEST_LENGTH
        self.tokenizer.model_max_length = LARGEST_LENGTH  # it would warn of what is handled here
        self.limit = min(self._section.max_context, _positions(config), most)
        added = len(self.tokenizer("")["input_ids"])
        if self.limit <= added:
            raise UserError(
                f"reward.{self._name}.max_context: {self.limit} tokens leave no room for a text "
                f"beside the {added} that the tokenizer in {self._path} adds; make it larger"
            )

    def rows(self, items: Sequence[ScoreItem]) -> list[Row]:
        """The rows of samples, in order; those that cannot be rendered say so."""
        found = []
        for item in items:
            try:
                found.append(self.row(item))
            except TemplateFailed as failed:
                found.append(Row(None, 0, str(failed)))
        return found

    def row(self, item: ScoreItem) -> Row:
        """The row of a sample; raises `TemplateFailed` where the text cannot be rendered or has no
        tokens."""
        text = self.text(item)
        ids = self.encode(item, text)
        if not ids:
            raise TemplateFailed("the text has no tokens")
        if len(ids) <= self.limit:
            return Row(ids, len(ids))
        if self._section.over_length == "fail":
            return Row(None, len(ids))
        self._note_cut(len(ids))
        return Row(self._cut(ids, text), len(ids))

    def text(self, item: ScoreItem) -> str:
        """The rendered template."""
        shown = replace(item, completion=self._harmless(item.completion))
        return writable(self._template.render(shown))

    def encode(self, item: ScoreItem, text: str) -> list[int]:
        """All ids of a rendered text, in its conversation where there is one."""
        if not self._section.chat:
            return encode(self.tokenizer, text)
        turns = [*_conversation(item), {"role": "assistant", "content": text}]
        return encode_chat(self.tokenizer, turns, ask=False)

    def _cut(self, ids: list[int], text: str) -> list[int]:
        """The end of a row that is too long, behind its beginning of sequence."""
        if self._section.chat:
            short = ids[len(ids) - self.limit :]
        else:  # as the tokenizer cuts, which keeps what it puts around every text
            cut = self.tokenizer(text, truncation=True, max_length=self.limit)
            short = list(cut["input_ids"])
        if ids[0] == self.tokenizer.bos_token_id:
            short[0] = ids[0]  # a template may have written it
        return short

    def _harmless(self, answer: str) -> str:
        """The answer with a space within each special token that it spells out."""
        for _ in range(PASSES):  # what is left of two that overlap may be one
            harmless = self._special.sub(lambda match: f"{match[0][0]} {match[0][1:]}", answer)
            if harmless == answer:
                break
            answer = harmless
        return answer

    def _note_cut(self, length: int) -> None:
        self.cut += 1
        if self.cut in {1, 10, 100, 1000, 10_000, 100_000}:
            _log.warning(
                "reward.%s: %d texts cut from the front so far, the last one from %d to %d tokens",
                self._name, self.cut, length, self.limit,
            )  # fmt: skip


def _conversation(item: ScoreItem) -> Sequence[Mapping[str, str]]:
    """The turns before the answer; the last of the user's shows the question."""
    question = writable(item.prompt.question)
    turns = [
        {key: writable(value) for key, value in turn.items()} for turn in item.prompt.messages or ()
    ]
    asked = [turn for turn in turns if turn.get("role") == "user"]
    if asked:
        asked[-1]["content"] = question
    return turns or [{"role": "user", "content": question}]


def _special_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Finds the tokens that mean something to the tokenizer beyond their text, if spelled out."""
    added = tokenizer.added_tokens_decoder.values()
    tokens = {*tokenizer.all_special_tokens, *(str(t) for t in added if t.special)}
    # A single character is left alone: a space beside it would change nothing.
    tokens = {token for token in tokens if len(token) > 1}
    if not tokens:
        return re.compile(r"(?!)")
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))


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
