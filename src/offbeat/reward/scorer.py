"""A replica of a discriminative reward model on transformers: texts in, logits out.

Invariant: an item's logits do not depend on what it is batched with. Rows are padded on the right
whatever the tokenizer's side, with an explicit mask. Models that classify sequences find a row's
last token by the pad id: it is the model's own `pad_token_id` as saved (so a batch pools as
transformers does for a single row), and where the model has none, an id that no row of the batch
contains. `check_rows` lets the source prove it at start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from offbeat.config import RewardSourceSection
from offbeat.errors import RunFailed
from offbeat.records import ScoreItem, Span
from offbeat.reward.classifier import compute_dtype, forward, load_model, read_config
from offbeat.reward.logits import Reading
from offbeat.reward.parity import RowCheck
from offbeat.reward.rows import RowEncoder, answers
from offbeat.reward.scorer_check import check_rows, in_transformers, is_large, tolerance
from offbeat.reward.source import Logit

TOKENS_AT_ONCE = 16_384
SPANS_KEPT = 10_000


class TransformersScorer:
    """Runs a model that classifies sequences or tokens on a thread of its own."""

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
        self._reading = Reading()
        self._device = device
        self._thread: ThreadPoolExecutor | None = None
        self._model: Any = None
        self._spans: list[Span] = []

    async def start(self) -> None:
        """Loads model and tokenizer; raises `UserError` naming the directory if they don't fit."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"reward-{self._name}")
        await asyncio.get_running_loop().run_in_executor(self._thread, self._load)

    async def logits(self, items: Sequence[ScoreItem]) -> list[Logit]:
        """What it says to each item, in order."""
        await self.health()
        run = asyncio.get_running_loop().run_in_executor
        return await run(self._thread, self._score, list(items))

    async def check_rows(self, items: Sequence[ScoreItem], *, reference: bool) -> RowCheck:
        """Scores a handful of rows, those of `items` among them, alone and together."""
        await self.health()
        run = asyncio.get_running_loop().run_in_executor
        return await run(self._thread, self._check, list(items), reference)

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
        config, self._reading = read_config(self._name, self._section)
        self._rows.load(config)
        dtype = compute_dtype(self._section, self._device)
        self._model = load_model(path, setting, dtype).to(self._device).eval()

    def _score(self, items: list[ScoreItem]) -> list[Logit]:
        start, cpu = time.time(), time.thread_time()
        rows = self._rows.rows(items)
        kept = [row.ids for row in rows if row.ids is not None]
        logits = answers(rows, self._forward(kept), self._reading)
        end = time.time()
        used = end - start if self._device != "cpu" else time.thread_time() - cpu
        if len(self._spans) < SPANS_KEPT:
            role, tokens = f"reward/{self._name}", sum(map(len, kept))
            self._spans.append(Span(role, self._replica, "score", start, end, used, tokens=tokens))
        return logits

    def _forward(self, rows: list[list[int]]) -> list[list[float]]:
        """All logits of rows, in their order, computed in padded batches."""
        logits: list[list[float]] = [[] for _ in rows]
        for chunk in self._chunks(rows):
            batch = forward(self._model, [rows[i] for i in chunk])
            for i, found in zip(chunk, batch, strict=True):
                logits[i] = found
        return logits

    def _chunks(self, rows: list[list[int]]) -> list[list[int]]:
        """Rows of similar length together, within the seats and a budget of tokens."""
        chunks: list[list[int]] = []
        for i in sorted(range(len(rows)), key=lambda i: len(rows[i])):
            full = not chunks or len(chunks[-1]) == self._section.seats
            if full or (len(chunks[-1]) + 1) * len(rows[i]) > TOKENS_AT_ONCE:
                chunks.append([])
            chunks[-1].append(i)
        return chunks

    def _check(self, items: list[ScoreItem], reference: bool) -> RowCheck:
        device, value = str(self._device), self._reading.value
        rows = check_rows(self._rows, self._model.config, items)
        ids = [list(row.ids) for row in rows]
        alone = tuple(value(self._forward([row])[0]) for row in ids)
        told: tuple[Any, Any] = (None, None)
        if reference:
            exact = device == "cpu" and str(self._model.dtype) == "torch.float32"
            loaded = self._model if exact or is_large(str(self._section.model)) else None
            setting = f"reward.{self._name}.model"
            told = in_transformers(self._section, setting, ids, value, loaded=loaded)
        together = tuple(map(value, self._forward(ids)))
        return RowCheck(rows, alone, together, *told, tolerance(self._section, device))
