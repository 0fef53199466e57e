"""A replica of a discriminative reward model on transformers: texts in, raw logits out.

Invariant: an item's logit does not depend on what it is batched with. Rows are padded on the
right whatever the tokenizer's side, with an explicit mask. Pooling models find a row's last token
by the pad id: it is the model's own `pad_token_id` as saved (so a batch pools as transformers does
for a single row), and where the model has none, an id that no row of the batch contains.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.config import RewardSourceSection
from offbeat.errors import RunFailed, UserError
from offbeat.records import ScoreItem, Span
from offbeat.reward.rows import RowEncoder

if TYPE_CHECKING:
    import torch

TOKENS_AT_ONCE = 16_384
SPANS_KEPT = 10_000


class TransformersScorer:
    """Runs `AutoModelForSequenceClassification` with one logit on a thread of its own."""

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
        self._name, self._section, self._replica = name, section, replica
        self._rows = RowEncoder(name, section, tokenizer)
        self._device = device
        self._thread: ThreadPoolExecutor | None = None
        self._model: Any = None
        self._spans: list[Span] = []

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
        self._model = None

    def _load(self) -> None:
        import torch

        torch.set_num_threads(self._section.threads)
        if self._device in {None, "auto"}:
            self._device = "cuda" if torch.cuda.is_available() else "cpu"
        setting, path = f"reward.{self._name}.model", str(self._section.model)
        dtype = compute_dtype(self._section, self._device)
        self._model = load_model(path, setting, dtype).to(self._device).eval()
        self._rows.load(self._model.config)

    def _score(self, items: list[ScoreItem]) -> list[float | None]:
        start, cpu = time.time(), time.thread_time()
        rows = [self._rows.ids(item) for item in items]
        logits: list[float | None] = [None] * len(items)
        order = sorted(
            (i for i, row in enumerate(rows) if row is not None), key=lambda i: len(rows[i] or ())
        )
        tokens = 0
        for chunk in self._chunks(order, rows):
            batch = [rows[i] or [] for i in chunk]
            tokens += sum(map(len, batch))
            for i, logit in zip(chunk, forward(self._model, batch), strict=True):
                logits[i] = logit
        end = time.time()
        used = end - start if self._device != "cpu" else time.thread_time() - cpu
        if len(self._spans) < SPANS_KEPT:
            role = f"reward/{self._name}"
            self._spans.append(Span(role, self._replica, "score", start, end, used, tokens=tokens))
        return logits

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


def forward(model: Any, batch: Sequence[list[int]]) -> list[float]:
    """The logits of right-padded rows in one pass of a loaded model, on the model's device."""
    import torch

    config = model.config.get_text_config()
    saved = config.pad_token_id
    pad = saved if saved is not None else _unused(batch)
    width = max(map(len, batch))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in batch])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in batch])
    config.pad_token_id = pad
    try:
        with torch.inference_mode():
            output = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device))
    finally:
        config.pad_token_id = saved
    logits: list[float] = output.logits[:, 0].float().cpu().tolist()
    return logits


def compute_dtype(section: RewardSourceSection, device: str) -> torch.dtype:
    """The dtype that a scorer computes in on a device, "cpu" or "cuda"."""
    import torch

    if section.dtype == "auto":
        native = device != "cpu" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if native else torch.float32
    return torch.bfloat16 if section.dtype == "bfloat16" else torch.float32


def load_config(path: str, setting: str) -> Any:
    """The model's configuration; `UserError` unless it has one logit."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise _unloadable(path, setting, error) from error
    if config.num_labels != 1:
        raise UserError(
            f"{setting}: the model in {path} has {config.num_labels} labels; a scorer has one "
            "logit (num_labels = 1)"
        )
    return config


def load_model(path: str, setting: str, dtype: torch.dtype) -> Any:
    """The classification model in a directory; `UserError` unless it has one trained logit."""
    from transformers import AutoModelForSequenceClassification

    load_config(path, setting)
    try:
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise _unloadable(path, setting, error) from error
    missing = sorted(loading["missing_keys"])
    if missing:
        raise untrained(path, setting, missing[0])
    return model


def untrained(path: str, setting: str, name: str) -> UserError:
    """The error for a model without weights for its head."""
    return UserError(
        f"{setting}: the model in {path} has no trained weights for {name}; "
        "give a sequence-classification model with one logit"
    )


def _unloadable(path: str, setting: str, error: Exception) -> UserError:
    short = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UserError(f"{setting}: no scorer can be loaded from {path} ({short})")


def _unused(batch: Sequence[list[int]]) -> int:
    """The smallest id that no row contains: padding never looks like text."""
    present = {token for row in batch for token in row}
    return next(i for i in range(len(present) + 1) if i not in present)
