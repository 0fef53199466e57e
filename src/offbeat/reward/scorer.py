"""A replica of a discriminative reward model on transformers: texts in, raw logits out.

Invariant: an item's logit does not depend on what it is batched with. Rows are padded on the
right whatever the tokenizer's side, with an explicit mask. Pooling models find a row's last token
by the pad id: it is the model's own `pad_token_id` as saved (so a batch pools as transformers does
for a single row), and where the model has none, an id that no row of the batch contains.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.config import RewardSourceSection
from offbeat.errors import RunFailed, UserError
from offbeat.records import ScoreItem, Span
from offbeat.reward.template import TextTemplate, encode, encode_chat, load_tokenizer

if TYPE_CHECKING:
    import torch

SCORE_TEMPLATE = "{{ question }}\n{{ answer }}"
TOKENS_AT_ONCE = 16_384
LARGEST_LENGTH = 10**9
"""Tokenizers without a limit of their own say a number beyond this one."""

_SPANS_KEPT = 10_000
_log = logging.getLogger(__name__)


class TransformersScorer:
    """Runs `AutoModelForSequenceClassification` with one logit on a thread of its own.

    With `chat` the question is the user's turn and the rendered text (by default the answer) the
    assistant's, in the scorer's chat template; else the rendered text is encoded as it is.
    """

    def __init__(
        self,
        name: str,
        section: RewardSourceSection,
        *,
        replica: int = 0,
        tokenizer: str | Path | None = None,
        device: str | None = None,
    ) -> None:
        """`tokenizer` is a directory, by default the model's. Starts nothing."""
        if section.model is None:
            raise UserError(f"reward.{name}.model is missing; set it to the scorer's directory")
        self._name, self._section, self._replica = name, section, replica
        self._path = section.model
        self._tokenizer_path = tokenizer or section.model
        self._device = device
        self._template = TextTemplate.load(
            section.template,
            "{{ answer }}" if section.chat else SCORE_TEMPLATE,
            f"reward.{name}.template",
        )
        self._thread: ThreadPoolExecutor | None = None
        self._model: Any = None
        self._tokenizer: Any = None
        self._limit = section.max_context
        self._spans: list[Span] = []
        self.cut = 0

    async def start(self) -> None:
        """Loads model and tokenizer; raises `UserError` naming the directory if they don't fit."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"reward-{self._name}")
        await asyncio.get_running_loop().run_in_executor(self._thread, self._load)

    async def logits(self, items: Sequence[ScoreItem]) -> list[float | None]:
        """Raw logit per item; None where the text is over length and the policy is to fail it."""
        if self._thread is None:
            raise RunFailed(f"the scorer of reward.{self._name} is not running")
        run = asyncio.get_running_loop().run_in_executor
        return await run(self._thread, self._score, list(items))

    async def health(self) -> None:
        """Raises if the scorer does not run."""
        if self._thread is None or self._model is None:
            raise RunFailed(f"the scorer of reward.{self._name} is not running")

    async def drain_spans(self) -> list[Span]:
        """Compute spans since the last call."""
        spans, self._spans = self._spans, []
        return spans

    async def stop(self) -> None:
        """Frees the model; a batch that runs is waited for."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.shutdown, cancel_futures=True)
        self._model = self._tokenizer = None

    def _load(self) -> None:
        import torch

        torch.set_num_threads(self._section.threads)
        setting = f"reward.{self._name}.model"
        self._tokenizer = load_tokenizer(self._tokenizer_path, setting, chat=self._section.chat)
        self._tokenizer.truncation_side = "left"
        if self._device in {None, "auto"}:
            self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = load_model(self._path, setting, self._dtype()).to(self._device).eval()
        self._limit = min(self._section.max_context, _positions(self._model.config))
        if self._tokenizer.model_max_length < LARGEST_LENGTH:
            self._limit = min(self._limit, self._tokenizer.model_max_length)

    def _dtype(self) -> torch.dtype:
        import torch

        if self._section.dtype == "auto":
            native = self._device != "cpu" and torch.cuda.is_bf16_supported()
            return torch.bfloat16 if native else torch.float32
        return torch.bfloat16 if self._section.dtype == "bfloat16" else torch.float32

    def _score(self, items: list[ScoreItem]) -> list[float | None]:
        start, cpu = time.time(), time.thread_time()
        rows = [self._ids(item) for item in items]
        logits: list[float | None] = [None] * len(items)
        order = sorted(
            (i for i, row in enumerate(rows) if row is not None), key=lambda i: len(rows[i] or ())
        )
        tokens = 0
        for chunk in self._chunks(order, rows):
            batch = [rows[i] or [] for i in chunk]
            tokens += sum(map(len, batch))
            for i, logit in zip(chunk, self._forward(batch), strict=True):
                logits[i] = logit
        end = time.time()
        used = end - start if self._device != "cpu" else time.thread_time() - cpu
        if len(self._spans) < _SPANS_KEPT:
            role = f"reward/{self._name}"
            self._spans.append(Span(role, self._replica, "score", start, end, used, tokens=tokens))
        return logits

    def _ids(self, item: ScoreItem) -> list[int] | None:
        """Token ids within the limit; None if they are too many and none may be cut."""
        text = self._template.render(item)
        if self._section.chat:
            messages = [
                {"role": "user", "content": item.prompt.question},
                {"role": "assistant", "content": text},
            ]
            ids = encode_chat(self._tokenizer, messages, ask=False)
        else:
            ids = encode(self._tokenizer, text)
        if len(ids) <= self._limit:
            return ids
        if self._section.over_length == "fail":
            return None
        self._note_cut(len(ids))
        if not self._section.chat:
            short = self._tokenizer(text, truncation=True, max_length=self._limit)["input_ids"]
            return list(short)
        head = ids[:1] if ids[0] == self._tokenizer.bos_token_id else []
        return head + ids[len(ids) - self._limit + len(head) :]

    def _note_cut(self, length: int) -> None:
        self.cut += 1
        if self.cut in {1, 10, 100, 1000, 10_000, 100_000}:
            _log.warning(
                "reward.%s: %d texts cut from the front so far, the last one from %d to %d tokens",
                self._name, self.cut, length, self._limit,
            )  # fmt: skip

    def _chunks(self, order: list[int], rows: list[list[int] | None]) -> list[list[int]]:
        """Rows of similar length together, within the seats and a budget of tokens."""
        chunks: list[list[int]] = []
        for i in order:
            width = len(rows[i] or ())
            full = not chunks or len(chunks[-1]) == self._section.seats
            if full or (len(chunks[-1]) + 1) * width > TOKENS_AT_ONCE:
                chunks.append([])
            chunks[-1].append(i)
        return chunks

    def _forward(self, batch: list[list[int]]) -> list[float]:
        """One forward pass of right-padded rows."""
        import torch

        config = self._model.config.get_text_config()
        saved = config.pad_token_id
        pad = saved if saved is not None else _unused(batch)
        width = max(1, *map(len, batch))
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in batch])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in batch])
        config.pad_token_id = pad
        try:
            with torch.inference_mode():
                output = self._model(
                    input_ids=ids.to(self._device), attention_mask=mask.to(self._device)
                )
        finally:
            config.pad_token_id = saved
        logits: list[float] = output.logits[:, 0].float().cpu().tolist()
        return logits


def load_model(path: str, setting: str, dtype: torch.dtype) -> Any:
    """The classification model in a directory; `UserError` unless it has one trained logit."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    try:
        config = AutoConfig.from_pretrained(path)
        if config.num_labels != 1:
            raise UserError(
                f"{setting}: the model in {path} has {config.num_labels} labels; a scorer has one "
                "logit (num_labels = 1)"
            )
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, KeyError) as error:
        short = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{setting}: no scorer can be loaded from {path} ({short})") from error
    missing = sorted(loading["missing_keys"])
    if missing:
        raise UserError(
            f"{setting}: the model in {path} has no trained weights for {missing[0]}; "
            "give a sequence-classification model with one logit"
        )
    return model


def _positions(config: Any) -> int:
    """Tokens that the model has positions for; RoBERTa's count from behind the pad id."""
    text = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    if not isinstance(most, int) or most <= 0:
        return LARGEST_LENGTH
    shifted = ("roberta", "camembert", "longformer", "mpnet", "esm", "luke", "ibert", "data2vec")
    offset = text.model_type.startswith(shifted) or "roberta" in text.model_type
    return most - (text.pad_token_id or 0) - 1 if offset else most


def _unused(batch: list[list[int]]) -> int:
    """The smallest id that no row contains: padding never looks like text."""
    present = {token for row in batch for token in row}
    return next(i for i in range(len(present) + 1) if i not in present)
