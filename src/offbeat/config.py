"""Every setting: type, unit, default, bounds and what it is for; derived values as properties.

Importable without torch and Ray. Unknown keys are refused with the nearest valid name, by
`load_config`, which also resolves relative paths against the configuration file's folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from offbeat.config_base import (
    NO_DEVICES,
    NO_ROOM,
    ONE_DEVICE,
    RUN_NAME,
    Dtype,
    EngineName,
    MemoryShare,
    Positive,
    Seconds,
    Section,
)
from offbeat.config_cluster import ClusterSection, WeightsSection
from offbeat.config_reward import SOURCE_NAME, RewardSourceSection, check_shared_pools
from offbeat.config_validate import ValidateSection, check_validation

__all__ = [
    "ClusterSection",
    "Config",
    "DataSection",
    "Dtype",
    "ModelSection",
    "RewardSourceSection",
    "RolloutSection",
    "Section",
    "TrainSection",
    "ValidateSection",
    "WeightsSection",
]

SINGLE_DEVICE_SHARE = 0.8
"""Of a single device's memory: what vLLM's engines may take of it together."""


class ModelSection(Section):
    """The policy: an ordinary Hugging Face directory."""

    path: Path = Field(description="directory of the model that is trained (the actor)")
    tokenizer: Path | None = Field(None, description="its tokenizer; default: the model's")
    dtype: Dtype = Field(
        "auto",
        description="trainer's compute type under autocast; weights stay float32. "
        "auto: bfloat16 where the device computes it natively, else float32",
    )


class DataSection(Section):
    """Prompts: JSONL, parquet or a Hugging Face data set directory saved to disk."""

    train: Path = Field(description="training prompts")
    validation: Path | None = Field(None, description="held-out prompts; none: no validation")
    prompt_column: str = Field("prompt", description="text, or a list of {role, content} messages")
    reference_column: str = Field("reference", description="reference answer; may be absent")
    question_column: str = Field(
        "question", description="what templates show as question; default the prompt itself"
    )
    reward_column: str = Field(
        "reward", description="names of the reward sources of that row, a text or a list"
    )
    source_column: str = Field(
        "data_source", description="by whose values validation is told apart; may be absent"
    )
    epochs: Positive = Field(1, description="passes over the training prompts at most")
    shuffle: bool = Field(True, description="seeded order a pass; false: the file's order")
    limit: Positive | None = Field(None, description="use only the first rows")
    on_overlong: Literal["fail", "skip"] = Field(
        "fail", description="a prompt that leaves no room for max_tokens: stop, or skip that row"
    )


class RolloutSection(Section):
    """Engines that generate, and what they sample."""

    engine: EngineName = Field(
        "transformers", description="which engine generates; vllm: see docs/engines.md"
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="further arguments of vLLM's engine, by their names there"
    )
    memory_share: MemoryShare = Field(
        0.9, description="share of a GPU's memory that vLLM takes for weights and KV cache"
    )
    replicas: Positive = Field(1, description="engines")
    devices_per_replica: Annotated[int, Field(ge=0)] = Field(1, description="devices of one engine")
    group_size: Positive = Field(8, description="samples of one prompt (n)")
    max_tokens: Positive = Field(64, description="tokens of one completion at most")
    max_context: Positive = Field(2048, description="tokens of prompt and completion at most")
    temperature: Annotated[float, Field(gt=0, le=2)] = Field(1.0, description="of sampling")
    top_p: float = Field(1.0, description="only 1.0: truncation changes the distribution's support")
    top_k: int = Field(0, description="only 0: truncation changes the distribution's support")
    stop: tuple[str, ...] = Field((), description="strings that end a sample")
    seats: Positive = Field(64, description="sequences that one engine decodes at once")
    dtype: Dtype = Field(
        "auto",
        description="engine's compute type; auto: the trainer's (dtype of [model]), so that both "
        "compute the same policy",
    )
    on_update: Literal["recompute", "keep_kv"] = Field(
        "recompute",
        description="running samples' KV cache at a weight update: recompute under the new "
        "weights (exact log-probs) or keep (faster, stale cache)",
    )
    threads: Positive = Field(1, description="CPU threads of one engine process")
    max_attempts: Positive = Field(3, description="tries of one group before it is discarded")
    deadline_seconds: Seconds = Field(600, description="of one group's generation")
    snapshot_tokens: Annotated[int, Field(ge=0)] = Field(
        64, description="tokens of a sample lost at most when its engine dies; 0: begin it anew"
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for name, value, whole in (("top_p", self.top_p, 1.0), ("top_k", self.top_k, 0)):
            if value != whole:
                raise ValueError(
                    f"{name} = {value} is refused because it changes the support of the sampling "
                    "distribution, so that behaviour log-probs and the trainer's would not be "
                    f"comparable; set {name} = {whole} and shape sampling with temperature"
                )
        if self.devices_per_replica == 0:
            raise ValueError(NO_DEVICES.format("devices_per_replica", "rollout"))
        if self.engine == "transformers" and self.devices_per_replica > 1:
            raise ValueError(ONE_DEVICE.format(self.devices_per_replica))
        if self.max_tokens >= self.max_context:
            raise ValueError(NO_ROOM.format(self.max_tokens, "prompt", self.max_context))
        return self


class TrainSection(Section):
    """The trainer: algorithm, batch, staleness and optimiser."""

    devices: Annotated[int, Field(ge=0)] = Field(1, description="devices of the trainer")
    algorithm: Literal["grpo", "dr_grpo", "rloo"] = Field("grpo", description="advantages")
    groups_per_step: Positive = Field(8, description="groups that one step consumes")
    max_staleness: Annotated[int, Field(ge=0)] = Field(
        2, description="trainer step minus oldest token version, at most; 0: synchronous"
    )
    steps: Positive | None = Field(None, description="steps at most; default: the data's length")
    learning_rate: Annotated[float, Field(gt=0)] = Field(5e-6, description="AdamW's peak rate")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(5, description="linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after it")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="AdamW's")
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(1.0, description="gradient clipping")
    clip_low: Annotated[float, Field(gt=0, lt=1)] = Field(0.2, description="ratio below 1 at most")
    clip_high: Annotated[float, Field(gt=0)] = Field(0.2, description="ratio above 1 at most")
    advantage_eps: Annotated[float, Field(gt=0)] = Field(1e-4, description="added to the deviation")
    min_scored: Positive = Field(2, description="samples with a reward that a group needs")
    tokens_per_micro_batch: Positive = Field(4096, description="token budget of a micro-batch")
    prefix_sharing: bool = Field(
        True, description="compute tokens that samples have in common once (exact gradient)"
    )
    on_no_signal: Literal["train", "skip"] = Field(
        "skip", description="groups whose advantages are all 0: computed all the same, or not"
    )
    max_no_signal_steps: Positive = Field(
        50, description="steps on end without any signal after which the run ends, non-zero"
    )
    max_bad_steps: Positive = Field(
        3, description="steps on end with a non-finite loss or gradient after which the run ends"
    )
    checkpoint_every: Positive = Field(50, description="steps")
    keep_checkpoints: Positive = Field(2, description="newest ones kept; the first and last stay")
    keep_every: Annotated[int, Field(ge=0)] = Field(
        0, description="checkpoints of steps that this divides stay, too; 0: none"
    )
    keep_batches: bool = Field(
        False, description="keep what every step was trained on, for `offbeat replay`"
    )
    straggler_patience_seconds: Seconds = Field(
        300, description="wait for a straggler that blocks a step; then it is discarded by name"
    )
    batch_deadline_seconds: Seconds = Field(1800, description="wait for a batch at most")
    deadline_seconds: Seconds = Field(
        3600, description="of one call of the trainer: a step, a publication, a checkpoint"
    )
    threads: Positive = Field(1, description="CPU threads of the trainer process")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.devices == 0:
            raise ValueError(NO_DEVICES.format("devices", "train"))
        if self.devices > 1:
            raise ValueError("devices > 1: the trainer is one process on one device; set it to 1")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {list(self.betas)} must both be at least 0 and below 1")
        return self


class Config(Section):
    """A whole run."""

    run: str = Field(pattern=RUN_NAME, description="name; the folder under runs_dir")
    base_dir: Path = Field(
        Path("."), description="where package.module:name is looked up; default: the file's folder"
    )
    runs_dir: Path = Field(Path("runs"), description="where run directories lie")
    ledger_dir: Path | None = Field(
        None,
        description="folder on a local disk of the driver's node for the ledger, where runs_dir is "
        "on a network file system; default: the run's directory",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="of order, engines and everything random")
    model: ModelSection
    data: DataSection
    rollout: RolloutSection = RolloutSection.model_validate({})
    train: TrainSection = TrainSection.model_validate({})
    weights: WeightsSection = WeightsSection.model_validate({})
    use_rewards: tuple[str, ...] | None = Field(
        None, description="names of the reward sources to use; default: all that are configured"
    )
    combine: Literal["sum", "gdpo"] = Field(
        "sum",
        description="of the sources: a weighted sum, or each normalised within the group first "
        "(arXiv 2601.05242)",
    )
    reward: dict[str, RewardSourceSection] = Field(
        default_factory=dict, description="the reward sources by name"
    )
    validation: ValidateSection = Field(
        default=ValidateSection.model_validate({}), alias="validate"
    )
    cluster: ClusterSection = ClusterSection.model_validate({})

    @model_validator(mode="after")
    def _possible(self) -> Self:
        n, algorithm = self.rollout.group_size, self.train.algorithm
        if n == 1:
            raise ValueError(
                f"rollout.group_size = 1 gives {algorithm} nothing to compare a sample with, so "
                "every advantage would be 0; set it to 2 or more"
            )
        if self.train.min_scored > n:
            raise ValueError(
                f"train.min_scored = {self.train.min_scored} is more than rollout.group_size = {n},"
                f" so every group would be discarded; set it to at most {n}"
            )
        return self

    @model_validator(mode="after")
    def _rewarded(self) -> Self:
        if not self.reward:
            raise ValueError(
                "reward has no source; add a section [reward.NAME] with kind = "
                '"function", "genrm" or "disrm"'
            )
        for name in self.reward:
            if not SOURCE_NAME.fullmatch(name):
                raise ValueError(f'reward."{name}" may consist of letters, digits, _ and - only')
        for name in self.use_rewards or ():
            if name not in self.reward:
                raise ValueError(
                    f'use_rewards names "{name}", which is no reward source; there are '
                    + ", ".join(self.reward)
                )
        if not any(s.weight for s in self.active_rewards.values() if s.role == "add"):
            raise ValueError(
                'use_rewards leaves no reward source of role "add" with a weight other than 0, so '
                "there would be nothing to learn; give one of " + ", ".join(self.reward) + " a "
                "weight"
            )
        if self.combine == "gdpo" and self.train.algorithm != "grpo":
            raise ValueError(
                'combine = "gdpo" normalises each source itself, so train.algorithm = '
                f'"{self.train.algorithm}" would have no meaning; set that to "grpo", or combine '
                'to "sum"'
            )
        check_shared_pools(self.reward, self.active_rewards, self.cluster.single_device)
        single = self.cluster.single_device
        check_validation(self.validation, engine=self.rollout.engine, single_device=single)
        return self

    @model_validator(mode="after")
    def _one_device(self) -> Self:
        """What a single device can hold, and what only it can do."""
        if not self.cluster.single_device:
            if self.weights.transport == "ipc":
                raise ValueError(
                    'weights.transport = "ipc" hands weights over in the memory of one GPU, which '
                    "trainer and engines share only with cluster.single_device = true; set it to "
                    '"folder" or "broadcast"'
                )
            return self
        if self.train.max_staleness > 0:
            raise ValueError(
                f"train.max_staleness = {self.train.max_staleness} lets rollout run beside the "
                "trainer, and with cluster.single_device = true both have one device, on which "
                "they take turns; set it to 0"
            )
        models = {"rollout": self.rollout} | {
            f"reward.{name}": s for name, s in self.active_rewards.items() if s.has_pool
        }
        for key, section in models.items():
            for setting in ("replicas", "devices_per_replica"):
                if (number := getattr(section, setting)) != 1:
                    raise ValueError(
                        f"{key}.{setting} = {number} does not fit cluster.single_device = true, "
                        "where every role is one process on the one device; set it to 1"
                    )
        shares = {k: s.memory_share for k, s in models.items() if s.engine == "vllm"}
        if sum(shares.values()) > SINGLE_DEVICE_SHARE + 1e-9:
            named = " + ".join(f"{key}.memory_share {share:g}" for key, share in shares.items())
            raise ValueError(
                f"cluster.single_device = true leaves the trainer no memory on the device: {named} "
                f"is more than {SINGLE_DEVICE_SHARE:g}; lower that, for example to "
                f"{SINGLE_DEVICE_SHARE * 0.75 / len(shares):.2g}{' each' * (len(shares) > 1)}"
            )
        return self

    @property
    def active_rewards(self) -> dict[str, RewardSourceSection]:
        """The reward sources that this run uses, by name, in the configuration's order."""
        chosen = self.use_rewards
        return {n: s for n, s in self.reward.items() if chosen is None or n in chosen}

    @property
    def gdpo_weights(self) -> dict[str, float] | None:
        """With combine = "gdpo" the weights of the sources that add; else None."""
        if self.combine != "gdpo":
            return None
        return {n: s.weight for n, s in self.active_rewards.items() if s.role == "add"}

    @property
    def reward_patience(self) -> float:
        """The longest patience with a reward source that is down, in seconds."""
        return max((s.patience_seconds for s in self.active_rewards.values()), default=0.0)

    @property
    def rollout_dtype(self) -> Dtype:
        """The engines' compute type: that of the trainer, unless it is set."""
        return self.model.dtype if self.rollout.dtype == "auto" else self.rollout.dtype

    @property
    def run_dir(self) -> Path:
        """The run's directory."""
        return self.runs_dir / self.run

    @property
    def ledger_path(self) -> Path:
        """The run's durable ledger."""
        if self.ledger_dir is None:
            return self.run_dir / "ledger.sqlite"
        return self.ledger_dir / self.run / "ledger.sqlite"

    @property
    def max_live_groups(self) -> int:
        """Live groups at most: (max_staleness + 1) x groups_per_step."""
        return (self.train.max_staleness + 1) * self.train.groups_per_step

    @property
    def samples_per_step(self) -> int:
        """Samples that one step consumes."""
        return self.train.groups_per_step * self.rollout.group_size

    @property
    def tokens_per_step(self) -> int:
        """Completion tokens of one step at most."""
        return self.samples_per_step * self.rollout.max_tokens
