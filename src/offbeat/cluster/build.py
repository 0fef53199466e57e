"""Builds real roles from their specs, in whatever process they are to live."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from offbeat.cluster.specs import EngineSpec, GoOn, RunSpec, ScorerSpec, first_version
from offbeat.config import Config
from offbeat.data import PromptSet, load_prompts, load_tokenizer
from offbeat.errors import UserError
from offbeat.faults import point
from offbeat.rates import META_KEY, Rate, pack_rates
from offbeat.records import Completion, GenerateRequest, PolicyVersion, Prompt, ScoreItem
from offbeat.reward.anchor_files import Anchor, anchors_of
from offbeat.reward.anchors import Anchors
from offbeat.reward.build import build_source
from offbeat.reward.loop import RewardLoop
from offbeat.reward.source import Scorer
from offbeat.rollout.books import Books, Restored
from offbeat.rollout.checker import Checker
from offbeat.rollout.dedicated import DedicatedEngines
from offbeat.rollout.engine import Engine
from offbeat.rollout.lives import Fetch, here
from offbeat.rollout.rollouter import Rollouter
from offbeat.rollout.validation import Validator
from offbeat.store import Store
from offbeat.track.transcripts import TranscriptWriter

if TYPE_CHECKING:
    from offbeat.train.trainer import Trainer

EXAMPLES = 3
"""Rows of the run's data on which scorers are checked, beside texts of their own."""


def make_engine(spec: EngineSpec) -> Engine:
    """An engine that is not started yet."""
    common: dict[str, Any] = {
        "tokenizer_path": spec.tokenizer_path,
        "role": spec.role,
        "replica": spec.replica,
        "seats": spec.seats,
        "max_context": spec.max_context,
        "seed": spec.seed,
        "dtype": spec.dtype,
        "device": spec.device,
        "on_update": spec.on_update,
        "threads": spec.threads,
        "version": PolicyVersion(spec.lineage, 0),
    }
    if spec.engine == "vllm":
        from offbeat.rollout.vllm_engine import VllmEngine

        return VllmEngine(
            spec.model_path,
            devices=spec.devices,
            memory_share=spec.memory_share,
            engine_args=spec.engine_args,
            **common,
        )
    from offbeat.rollout.transformers_engine import TransformersEngine
    from offbeat.weights.transport import load_manifest

    return TransformersEngine(spec.model_path, load_manifest=load_manifest, **common)


def make_scorer(spec: ScorerSpec) -> Scorer:
    """A scorer replica that is not started yet."""
    if spec.section.engine == "vllm":
        return _vllm_scorer(spec)
    from offbeat.reward.scorer import TransformersScorer

    return TransformersScorer(spec.name, spec.section, replica=spec.replica, device=spec.device)


def _vllm_scorer(spec: ScorerSpec) -> Scorer:
    """It shares with the engines that generate how vLLM's processes are set up and measured."""
    from offbeat.reward.vllm_scorer import VllmScorer
    from offbeat.rollout import vllm_args
    from offbeat.rollout.vllm_spans import ProcessClock

    section = spec.section

    def prepare(device: str) -> dict[str, Any]:
        vllm_args.require_vllm()
        vllm_args.check_engine_args(f"reward.{spec.name}.engine_args", section.engine_args)
        vllm_args.set_environment(device, section.threads)
        devices, share = section.devices_per_replica, section.memory_share
        return vllm_args.device_args(device, devices, share) | section.engine_args

    return VllmScorer(
        spec.name,
        section,
        prepare=prepare,
        clock=ProcessClock(),
        replica=spec.replica,
        device=spec.device,
    )


def make_trainer(config: Config, run: RunSpec, total_steps: int) -> Trainer:
    """The trainer of one rank, not set up yet."""
    from offbeat.train.trainer import Trainer

    return Trainer(
        config,
        total_steps=total_steps,
        lineage=run.lineage,
        publish_folder=run.publish_folder,
        run_id=run.run_id,
        rates=() if run.go_on is None else run.go_on.rates,
    )


def answer(
    trainer: Trainer, requests: Sequence[GenerateRequest]
) -> tuple[PolicyVersion, list[Completion]]:
    """Held-out answers by the trainer itself; blocks."""
    from offbeat.rollout.trainer_engine import answer

    return answer(trainer, requests)


@dataclass(frozen=True, slots=True)
class Standing:
    """Started replicas of the sources that stand on pools of their own, by source.

    The two functions end a replica (source, index) for good and return another on its devices,
    started; when they fail or are cancelled, they leave nothing there.
    """

    engines: Mapping[str, Sequence[Engine]]
    scorers: Mapping[str, Sequence[Scorer]]
    replace_engine: Callable[[str, int], Awaitable[Engine]]
    replace_scorer: Callable[[str, int], Awaitable[Scorer]]


async def make_rewards(
    config: Config,
    standing: Standing,
    transcripts: TranscriptWriter | None = None,
    examples: Sequence[ScoreItem] = (),
) -> RewardLoop:
    """The reward loop over all active sources; replicas come from each source's own pool.

    Scorers are checked on `examples` before they score.
    """
    sources = {
        name: build_source(
            name,
            section,
            base=config.base_dir,
            engines=standing.engines.get(name),
            scorers=standing.scorers.get(name),
            replace_engine=partial(standing.replace_engine, name),
            replace_scorer=partial(standing.replace_scorer, name),
            start_deadline_seconds=config.cluster.start_deadline_seconds,
            max_restarts=config.cluster.max_restarts,
            cache_path=config.runs_dir / "verdicts.sqlite",
            seed=config.seed,
            examples=examples,
        )
        for name, section in config.active_rewards.items()
    }
    return await RewardLoop.create(
        sources,
        config.active_rewards,
        column=config.data.reward_column,
        known=tuple(config.reward),
        transcripts=transcripts,
    )


class RolloutSide:
    """The rollouter and all that lives in its process: prompts, reward loop, store, validation."""

    def __init__(self, config: Config, run: RunSpec) -> None:
        self.config = config
        self.run_spec = run
        self._prompts: PromptSet | None = None
        self._held_out: list[Prompt] = []
        self._rewards: RewardLoop | None = None
        self._anchors: Mapping[str, Sequence[Anchor]] = {}
        self._checker: Checker | None = None
        self._store: Store | None = None
        self._opening: asyncio.Task[tuple[Books, Restored | None]] | None = None
        self.core: Rollouter | None = None

    async def start(self, standing: Standing) -> int:
        """Reads prompts and starts the reward loop; returns how many ordinals there are."""
        transcripts, sections = TranscriptWriter(self.config.run_dir), self.config.active_rewards
        self._anchors = await asyncio.to_thread(anchors_of, sections)
        prompts, self._held_out = await asyncio.to_thread(self._read)
        self._prompts = prompts
        examples = [ScoreItem(p, p.reference or p.question) for p in prompts.prompts[:EXAMPLES]]
        self._rewards = await make_rewards(self.config, standing, transcripts, examples)
        if self._held_out and self.config.validation.function is not None:
            self._checker = Checker(self.config.validation.function, self.config.base_dir)
            await self._checker.start()
        return prompts.total

    def _read(self) -> tuple[PromptSet, list[Prompt]]:
        tokenizer = load_tokenizer(self.config)
        held_out: list[Prompt] = []
        if self.config.data.validation is not None:
            held_out = list(load_prompts(self.config, tokenizer, "validation"))
        return load_prompts(self.config, tokenizer, "train"), held_out

    def dedicated(
        self, engines: Sequence[Engine], replace: Callable[[int], Awaitable[Engine]]
    ) -> DedicatedEngines | None:
        """The started engines that only validate; None where there are none."""
        if not engines:
            return None
        return DedicatedEngines(self.config, engines, first_version(self.run_spec), replace)

    async def build(
        self,
        engines: Sequence[Engine],
        total_steps: int,
        replace: Callable[[int], Awaitable[Engine]],
        dedicated: DedicatedEngines | None = None,
        fetch: Fetch = here,
        go_on: GoOn | None = None,
    ) -> Rollouter:
        """The rollouter over started engines; `dedicated` are those that only validate.

        With `go_on` it stands where the ledger says.
        """
        if self._prompts is None or self._rewards is None:
            raise RuntimeError("build comes after start")
        opening = asyncio.to_thread(self._open_books, self._prompts, go_on, total_steps)
        self._opening = asyncio.create_task(opening)
        books, restored = await asyncio.shield(self._opening)
        validator = None
        if self._held_out:
            validator = Validator(
                self.config,
                self._held_out,
                checker=self._checker,
                rewards=self._rewards,
                dedicated=dedicated,
            )
        self.core = Rollouter(
            self.config,
            prompts=self._prompts,
            engines=engines,
            rewards=self._rewards,
            books=books,
            version=first_version(self.run_spec),
            total_steps=total_steps,
            replace=replace,
            validator=validator,
            anchors=await asyncio.to_thread(self._watch, books, self._rewards, go_on),
            fetch=fetch,
            restored=restored,
        )
        return self.core

    def _open_books(
        self, prompts: PromptSet, go_on: GoOn | None, total_steps: int
    ) -> tuple[Books, Restored | None]:
        """The ledger, which another process of this run may hold until it has ended."""
        wait = self.config.cluster.heartbeat_seconds
        self._store = store = Store(self.config.ledger_path, wait)
        books = Books(store, self.config.train, prompts.prompt)
        fingerprint = str(prompts.fingerprint())
        rates = () if go_on is None else go_on.rates
        rates += (Rate(None, self.config.train.learning_rate, total_steps),)
        if go_on is None:
            store.put_meta(META_KEY, pack_rates(rates))
            store.put_meta("lineage", str(self.run_spec.lineage))
            store.put_meta("data", fingerprint).result()
            return books, None
        known = store.meta().get("data", fingerprint)
        if known != fingerprint:
            raise UserError(
                f"data.train {self.config.data.train} or its tokenizer has changed since the run "
                "began, and its order is part of the run; put it back, or begin another run"
            )
        if go_on.done is None:
            store.put_meta(META_KEY, pack_rates(rates))
            store.put_meta("lineage", str(self.run_spec.lineage)).result()
        restored = books.restore(go_on.version, go_on.done)
        point("rollout.restored")
        return books, restored

    def _watch(self, books: Books, rewards: RewardLoop, go_on: GoOn | None) -> Anchors:
        """The anchors, as the run's ledger knows them."""
        step = 0
        if go_on is not None:
            step = go_on.version if go_on.done is None else go_on.done
        return Anchors(
            rewards.sources,
            self.config.active_rewards,
            self._anchors,
            step=step,
            kept=books.store.meta(),
            keep=books.store.put_meta,
        )

    async def close(self) -> None:
        """Ends the reward loop and commits the ledger, also when a source does not end."""
        if self._opening is not None:  # a thread is not broken off: its lock would stay
            await asyncio.wait([self._opening])
        async with contextlib.AsyncExitStack() as last:
            if self._store is not None:
                last.push_async_callback(asyncio.to_thread, self._store.close)
            if self._rewards is not None:
                last.push_async_callback(self._rewards.stop)
            if self._checker is not None:
                last.push_async_callback(self._checker.stop)
