"""A replica of a discriminative reward model on vLLM's pooling runner: rows in, raw logits out.

vLLM computes in processes of its own (`AsyncLLM`), not in this one: vLLM keeps its device, its
process groups and its threads in globals, so that a process could not hold several scorers beside
engines and a trainer, as `cluster/local.py` does; and a crash of its kernels ends a process that
is noticed, not the run. It costs an import of vLLM in another process, some 15 s and 1 GB.

Invariant: a row's logits are those of `TransformersScorer`. Rows are encoded by the same code, and
vLLM tokenises nothing. Sequence heads of decoders: vLLM reads the logits at a row's last token,
transformers at its last token that is not the pad id (often the end of sequence); the pads at a
row's end are left out, which in a causal model changes nothing before them. Token heads are read at
the row's last token, whatever it is. `check_rows` lets the source prove the rest at start.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from offbeat.config import RewardSourceSection
from offbeat.errors import RunFailed, UserError, first_of
from offbeat.records import ScoreItem, Span
from offbeat.reward.classifier import compute_dtype, read_config, token_level
from offbeat.reward.logits import Reading
from offbeat.reward.parity import RowCheck
from offbeat.reward.rows import RowEncoder, answers, counts_from_pad
from offbeat.reward.scorer import SPANS_KEPT, TOKENS_AT_ONCE
from offbeat.reward.scorer_check import check_head, check_rows, in_transformers, tolerance
from offbeat.reward.source import Logit

TRANSFORMERS = 'set engine = "transformers"'


class Clock(Protocol):
    """Counts the CPU seconds of `processes` together."""

    processes: Sequence[int]

    def __call__(self) -> float:
        """The seconds so far."""
        ...


class VllmScorer:
    """Runs a model that classifies sequences or tokens in vLLM's processes."""

    def __init__(
        self,
        name: str,
        section: RewardSourceSection,
        *,
        prepare: Callable[[str], Mapping[str, Any]],
        clock: Clock,
        replica: int = 0,
        tokenizer: str | Path | None = None,
        device: str | None = None,
    ) -> None:
        """Starts nothing. `tokenizer` is a directory, by default the model's.

        `prepare(device)` makes the process ready for vLLM and returns the arguments of its engine
        that the device and the user decide; it raises `UserError` where vLLM is missing.
        """
        self._name, self._section, self._replica = name, section, replica
        self._setting, self._path = f"reward.{name}.model", str(section.model)
        self._rows = RowEncoder(name, section, tokenizer)
        self._prepare, self._clock, self._device = prepare, clock, device
        self._thread: ThreadPoolExecutor | None = None
        self._llm: Any = None
        self._reading = Reading()
        self._config: Any = None
        self._token_level = self._pad_moves = self._pools_last = self._asks_again = False
        self._task = "classify"
        self._turn = asyncio.Lock()
        self._numbers = count()
        self._running: set[asyncio.Task[list[float]]] = set()
        self._spans: list[Span] = []

    async def start(self) -> None:
        """Starts vLLM; raises `UserError` for a model it cannot score."""
        if self._thread is not None:
            raise RunFailed(f"the scorer of reward.{self._name} was started before")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"reward-{self._name}")
        loading = asyncio.get_running_loop().run_in_executor(self._thread, self._load)
        try:
            await asyncio.shield(loading)
            await self._know_processes()
        except BaseException:
            # Whoever gave up waiting must find nothing of vLLM's left, started or starting.
            await asyncio.shield(asyncio.create_task(self._give_up(loading)))
            raise

    async def logits(self, items: Sequence[ScoreItem]) -> list[Logit]:
        """What it says to each item, in order."""
        await self.health()
        run = asyncio.get_running_loop().run_in_executor
        rows = await run(self._thread, self._rows.rows, list(items))
        kept = [row.ids for row in rows if row.ids is not None]
        async with self._turn:
            start, cpu = time.time(), self._clock()
            found = await self._ask(kept)
            end = time.time()
            used = end - start if self._device != "cpu" else self._clock() - cpu
        if kept and len(self._spans) < SPANS_KEPT:
            role, tokens = f"reward/{self._name}", sum(map(len, kept))
            self._spans.append(Span(role, self._replica, "score", start, end, used, tokens=tokens))
        return answers(rows, found, self._reading)

    async def check_rows(self, items: Sequence[ScoreItem], *, reference: bool) -> RowCheck:
        """Scores a handful of rows, those of `items` among them, alone and together."""
        await self.health()
        run, value = asyncio.get_running_loop().run_in_executor, self._reading.value
        rows = await run(self._thread, check_rows, self._rows, self._config, list(items))
        ids = [list(row.ids) for row in rows]
        told: tuple[Any, Any] = (None, None)
        if reference:
            told = await run(
                self._thread, in_transformers, self._section, self._setting, ids, value
            )
        try:
            alone = [value((await self._ask([row]))[0]) for row in ids]
            together = map(value, await self._ask(ids))
        except RunFailed as error:
            raise UserError(
                f"{self._setting}: vLLM cannot score with {self._path} ({error}); {TRANSFORMERS}"
            ) from error
        relative = tolerance(self._section, str(self._device))
        return RowCheck(rows, tuple(alone), tuple(together), *told, relative)

    async def health(self) -> None:
        """Raises if vLLM does not run."""
        if self._llm is None:
            raise RunFailed(f"the scorer of reward.{self._name} is not running")
        if self._llm.errored:
            raise RunFailed(f"the scorer of reward.{self._name}: vLLM's core process died")

    async def drain_spans(self) -> list[Span]:
        """Compute spans since the last call."""
        spans, self._spans = self._spans, []
        return spans

    async def stop(self) -> None:
        """Ends vLLM's processes; rows that run fail."""
        llm, self._llm = self._llm, None
        thread, self._thread = self._thread, None
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)
        if thread is not None:
            await asyncio.to_thread(thread.shutdown, cancel_futures=True)

    # ---- start ----

    def _load(self) -> None:
        """Everything that blocks."""
        import torch

        if self._device in {None, "auto"}:
            self._device = "cuda" if torch.cuda.is_available() else "cpu"
        device = str(self._device)
        arguments = dict(self._prepare(device))
        self._config, self._reading = read_config(self._name, self._section)
        self._rows.load(self._config)
        self._pad_moves = counts_from_pad(self._config)
        self._token_level = token_level(self._config)
        torch.set_num_threads(self._section.threads)
        check_head(self._path, self._setting, self._config)
        self._llm = self._launch(device, arguments)

    def _launch(self, device: str, arguments: Mapping[str, Any]) -> Any:
        from vllm.config import PoolerConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        if current_platform.is_cpu() != (device == "cpu"):
            raise UserError(
                f"reward.{self._name}.engine: the vLLM that is installed is not for device "
                f"{device}; install the build for it, or {TRANSFORMERS}"
            )
        own: dict[str, Any] = {
            "model": self._path,
            "runner": "pooling",
            "convert": "classify",
            "dtype": str(compute_dtype(self._section, device)).removeprefix("torch."),
            "max_model_len": self._rows.limit,
            "max_num_seqs": self._section.seats,
            "max_num_batched_tokens": max(TOKENS_AT_ONCE, self._rows.limit),
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "pooler_config": PoolerConfig(use_activation=False),
            "worker_extension_cls": "offbeat.weights.vllm_transfer.Staging",  # has process_id
        }
        try:
            config = AsyncEngineArgs(**(own | dict(arguments))).create_engine_config()
        except (TypeError, ValueError, NotImplementedError) as error:
            raise UserError(
                f"{self._setting}: vLLM refuses {self._path} as a scorer with engine_args = "
                f"{self._section.engine_args} ({_short(error)}); mend them, or {TRANSFORMERS}"
            ) from error
        kind = ", ".join(self._config.architectures or ())
        if self._token_level and config.model_config.using_transformers_backend():
            raise UserError(
                f"{self._setting}: vLLM has no head for tokens for {self._path} ({kind}); "
                f"{TRANSFORMERS}"
            )
        if device == "cpu":
            self._check_heads(config.model_config.get_head_size())
        try:
            return AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        except RuntimeError as error:
            doubt = f", whose head for tokens ({kind}) it may not know" * self._token_level
            raise UserError(
                f"{self._setting}: vLLM does not start with {self._path}{doubt} "
                f"({_short(error)}); what its processes wrote says why; mend that, or "
                f"{TRANSFORMERS}"
            ) from error

    def _check_heads(self, size: int) -> None:
        """Of another size vLLM starts, and its first row ends its process."""
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        known = CPUAttentionBackend.get_supported_head_sizes()
        if size not in known:
            raise UserError(
                f"{self._setting}: the attention heads of {self._path} are {size} wide, vLLM on a "
                f"CPU knows {', '.join(map(str, known))}; {TRANSFORMERS}"
            )

    async def _know_processes(self) -> None:
        """Whose CPU seconds count; and whether the model classifies at all."""
        tasks = await self._llm.get_supported_tasks()
        last = self._llm.model_config.pooler_config.seq_pooling_type == "LAST"
        self._pools_last = last and "classify" in tasks
        self._task = "classify"
        if self._token_level and not self._pools_last:
            self._task = "token_classify"
        if self._task not in tasks:
            raise UserError(
                f"{self._setting}: vLLM runs {self._path} for {', '.join(tasks)} and not as a "
                f"classifier{' of tokens' * self._token_level}; {TRANSFORMERS}"
            )
        self._asks_again = self._pools_last and "token_classify" in tasks
        core = [p.pid for p in self._llm.engine_core.resources.engine_manager.processes]
        workers = await self._llm.collective_rpc("process_id")
        self._clock.processes = sorted({*core, *workers})

    async def _give_up(self, loading: asyncio.Future[Any]) -> None:
        await asyncio.wait([loading])
        await self.stop()

    # ---- scoring ----

    async def _ask(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """All logits of each row; raises `RunFailed` when vLLM's core has died."""
        found = await self._all(rows)
        odd = [i for i, logits in enumerate(found) if not all(map(math.isfinite, logits))]
        if odd and self._asks_again:
            # A row that is no number leaves NaN in its cache block, and 0 * NaN in the unused end
            # of a block is NaN for whoever gets that block next: whose fault was it?
            again = await self._all([rows[i] for i in odd], whole_blocks=True)
            for i, logits in zip(odd, again, strict=True):
                found[i] = logits
            await self._llm.reset_prefix_cache()
        return found

    async def _all(
        self, rows: Sequence[list[int]], *, whole_blocks: bool = False
    ) -> list[list[float]]:
        tasks: list[asyncio.Task[list[float]]] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks += [group.create_task(self._one(row, whole_blocks)) for row in rows]
                self._running |= set(tasks)
        except BaseExceptionGroup as errors:  # boundary: whatever vLLM raises, no row has a logit
            error = first_of(errors)
            raise RunFailed(f"reward.{self._name}: {type(error).__name__}: {error}") from error
        finally:
            self._running -= set(tasks)
        if any(task.cancelled() for task in tasks):  # before it had begun
            raise RunFailed(f"reward.{self._name}: the scorer was stopped")
        return [task.result() for task in tasks]

    async def _one(self, row: list[int], whole_blocks: bool) -> list[float]:
        """The logits of a row. With `whole_blocks` what follows its last token, and changes nothing
        before it, fills the cache's last block, and no other row's blocks are read."""
        from vllm import PoolingParams
        from vllm.inputs.engine import tokens_input

        pad = self._config.get_text_config().pad_token_id
        if self._pad_moves and pad in row:
            # transformers gives the tokens behind a pad other positions
            return [math.nan] * len(self._reading.labels)
        size, task = len(row), self._task
        while self._pools_last and not self._token_level and size > 1 and row[size - 1] == pad:
            size -= 1
        ids = row[:size]
        if whole_blocks:
            block = self._llm.vllm_config.cache_config.block_size
            fill = min(-size % block, self._rows.limit - size)
            ids, task = ids + [ids[-1]] * fill, "token_classify"
        params = PoolingParams(task=task, use_activation=False)
        name = f"{self._name}-{next(self._numbers)}"
        try:
            async for output in self._llm.encode(tokens_input(ids), params, name):
                if output.finished:
                    found = output.outputs.data
                    logits: list[float] = (found[size - 1] if found.ndim == 2 else found).tolist()
                    return logits
        except asyncio.CancelledError:
            if self._llm is not None:
                raise
            raise RunFailed("the scorer was stopped") from None
        raise RunFailed("vLLM ended a row without a word")


def _short(error: BaseException) -> str:
    """vLLM's words on one line, without its list of all that it supports."""
    return " ".join(str(error).partition("Supported architectures")[0].split())[:300]
