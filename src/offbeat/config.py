"""Every setting: type, unit, default, bounds and what it is for; derived values as properties.

Importable without torch and Ray. Unknown keys are refused with the nearest valid name, by
`load_config`, which also resolves relative paths against the configuration file's folder.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Dtype = Literal["float32", "bfloat16", "auto"]

NO_DEVICES = "{} = 0 would make a pool of zero devices for {}; set it to 1 or more"
NO_ROOM = (
    "max_tokens = {} leaves no room for the {} in max_context = {}; lower it or raise max_context"
)
SOURCE_NAME = re.compile(r"[A-Za-z0-9_-]+")


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys refused.

    A validator's message begins with the setting's name inside the section; `load_config` puts the
    file and the section's name before it.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        populate_by_name=True,
        allow_inf_nan=False,
    )


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
    epochs: Positive = Field(1, description="passes over the training prompts at most")
    shuffle: bool = Field(True, description="seeded order a pass; false: the file's order")
    limit: Positive | None = Field(None, description="use only the first rows")
    on_overlong: Literal["fail", "skip"] = Field(
        "fail", description="a prompt that leaves no room for max_tokens: stop, or skip that row"
    )


class RolloutSection(Section):
    """Engines that generate, and what they sample."""

    engine: Literal["transformers"] = Field("transformers", description="which engine generates")
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
    dtype: Dtype = Field("float32", description="engine's compute type; auto as in [model]")
    on_update: Literal["recompute", "keep_kv"] = Field(
        "recompute",
        description="running samples' KV cache at a weight update: recompute under the new "
        "weights (exact log-probs) or keep (faster, stale cache)",
    )
    threads: Positive = Field(1, description="CPU threads of one engine process")
    max_attempts: Positive = Field(3, description="tries of one group before it is discarded")
    deadline_seconds: Seconds = Field(600, description="of one group's generation")

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


class WeightsSection(Section):
    """Weight sync."""

    folder: Path | None = Field(
        None, description="where versions lie; default /dev/shm if it has room, else the run"
    )
    deadline_seconds: Seconds = Field(120, description="for an engine to load and acknowledge")


class RewardSourceSection(Section):
    """One named reward source."""

    kind: Literal["function", "genrm", "disrm"] = Field(description="what it is")
    weight: float = Field(1.0, description="in the sum of sources")
    placement: Literal["pool", "colocate"] = Field(
        "pool", description="only pool: a reward model stands on devices of its own"
    )
    on_failure: Literal["retry_then_drop_sample", "drop_group", "abstain"] = Field(
        "retry_then_drop_sample", description="what a failed score does to its sample"
    )
    retries: Annotated[int, Field(ge=0, le=20)] = Field(2, description="of a failed call")
    deadline_seconds: Seconds = Field(60, description="of one call")
    concurrency: Positive = Field(64, description="calls in flight at most")
    # function
    function: str | None = Field(None, description="file.py:name or package.module:name")
    workers: Positive = Field(1, description="processes that run the function")
    # genrm and disrm
    model: str | None = Field(None, description="model directory; with base_url the model's name")
    replicas: Positive = Field(1, description="of the model")
    devices_per_replica: Annotated[int, Field(ge=0)] = Field(1, description="of one replica")
    template: Path | None = Field(
        None, description="Jinja file with question, answer, reference and columns"
    )
    chat: bool = Field(False, description="put the rendered text into the model's chat template")
    dtype: Dtype = Field("float32", description="compute type of the replica")
    threads: Positive = Field(1, description="CPU threads of a replica")
    seats: Positive = Field(64, description="sequences at once (genrm) or rows a batch (disrm)")
    max_context: Positive = Field(1024, description="tokens of template and verdict together")
    # genrm
    base_url: str | None = Field(None, description="OpenAI-compatible server, e.g. http://host/v1")
    api_key_env: str | None = Field(None, description="environment variable that holds its key")
    parser: Literal["number", "yes_no", "json"] = Field("number", description="of the verdict")
    scale: tuple[float, float] = Field((1.0, 10.0), description="lowest and highest grade")
    max_tokens: Positive = Field(16, description="of a verdict")
    temperature: Annotated[float, Field(ge=0, le=2)] = Field(0.0, description="of the judge")
    stop: tuple[str, ...] = Field((), description="strings that end a verdict")
    # disrm
    over_length: Literal["cut_front", "fail"] = Field(
        "fail", description="a text that is too long: cut its front, or failed(too_long)"
    )

    @property
    def has_pool(self) -> bool:
        """Whether a model of this source stands on devices of this run."""
        return self.kind == "disrm" or (self.kind == "genrm" and self.base_url is None)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.placement == "colocate":
            raise ValueError(
                'placement = "colocate" is refused because rollout never pauses in asynchronous '
                "training, so a reward model that shares its devices would never get a turn; set "
                'placement = "pool" and give it devices of its own'
            )
        if self.kind == "function":
            if self.function is None:
                raise ValueError('function is missing; set function = "file.py:name"')
            return self
        if self.kind == "genrm" and self.model is None and self.base_url is None:
            raise ValueError(
                "model and base_url are both missing; set model to a model directory, or base_url "
                "to an OpenAI-compatible server"
            )
        if self.kind == "disrm" and self.model is None:
            raise ValueError("model is missing; set it to a model directory")
        if self.has_pool and self.devices_per_replica == 0:
            raise ValueError(NO_DEVICES.format("devices_per_replica", "this reward source"))
        if self.kind == "genrm" and self.max_tokens >= self.max_context:
            raise ValueError(NO_ROOM.format(self.max_tokens, "template", self.max_context))
        if self.scale[0] >= self.scale[1]:
            raise ValueError(f"scale = {list(self.scale)} must be lowest, then highest grade")
        return self


class ValidateSection(Section):
    """Greedy validation on held-out prompts, by the rollout engines or engines of its own."""

    every: Annotated[int, Field(ge=0)] = Field(0, description="steps between; 0: only the ends")
    function: str | None = Field(
        None, description="exact checker, file.py:name; its mean is the metric `accuracy`"
    )
    limit: Positive | None = Field(None, description="use only the first held-out prompts")
    deadline_seconds: Seconds = Field(900, description="of one validation")


class ClusterSection(Section):
    """Where roles run."""

    backend: Literal["ray", "local"] = Field(
        "ray", description="ray: actors on a cluster; local: everything in one process"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="kind of devices")
    slots: Positive = Field(
        8, description="offbeat_slot resources of a CPU cluster that Offbeat starts itself"
    )
    placement_deadline_seconds: Seconds = Field(60, description="to get the placement groups")
    start_deadline_seconds: Seconds = Field(600, description="to start all roles")


class Config(Section):
    """A whole run."""

    run: str = Field(pattern=r"^[A-Za-z0-9._-]+$", description="name; the folder under runs_dir")
    base_dir: Path = Field(
        Path("."), description="where package.module:name is looked up; default: the file's folder"
    )
    runs_dir: Path = Field(Path("runs"), description="where run directories lie")
    seed: int = Field(0, description="of order, engines and everything random")
    model: ModelSection
    data: DataSection
    rollout: RolloutSection = RolloutSection.model_validate({})
    train: TrainSection = TrainSection.model_validate({})
    weights: WeightsSection = WeightsSection.model_validate({})
    use_rewards: tuple[str, ...] | None = Field(
        None, description="names of the reward sources to use; default: all that are configured"
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
        if not any(source.weight for source in self.active_rewards.values()):
            raise ValueError(
                "use_rewards leaves no reward source with a weight other than 0, so there would be "
                "nothing to learn; give one of " + ", ".join(self.reward) + " a weight"
            )
        return self

    @property
    def active_rewards(self) -> dict[str, RewardSourceSection]:
        """The reward sources that this run uses, by name, in the configuration's order."""
        chosen = self.use_rewards
        return {n: s for n, s in self.reward.items() if chosen is None or n in chosen}

    @property
    def run_dir(self) -> Path:
        """The run's directory."""
        return self.runs_dir / self.run

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
