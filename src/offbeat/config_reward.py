"""The settings of one reward source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from offbeat.config_base import (
    NO_DEVICES,
    NO_ROOM,
    ONE_DEVICE,
    Dtype,
    EngineName,
    MemoryShare,
    Positive,
    Seconds,
    Section,
)


class RewardSourceSection(Section):
    """One named reward source."""

    kind: Literal["function", "genrm", "disrm"] = Field(description="what it is")
    engine: EngineName = Field(
        "transformers", description="what runs the model; vllm: see docs/engines.md"
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="further arguments of vLLM's engine, by their names there"
    )
    memory_share: MemoryShare = Field(0.9, description="share of a GPU's memory that vLLM takes")
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
    structured: Literal["auto", "on", "off"] = Field(
        "auto",
        description="the engine enforces the verdict's form. auto: vLLM for json and "
        "yes_no; on: also numbers, and servers that take OpenAI's response_format",
    )
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
        if self.has_pool and self.engine == "transformers":
            if self.devices_per_replica > 1:
                raise ValueError(ONE_DEVICE.format(self.devices_per_replica))
            if self.kind == "genrm" and self.structured == "on":
                raise ValueError(
                    'structured = "on" with engine = "transformers", which enforces no form; set '
                    'engine to "vllm", or structured to "auto"'
                )
        if self.kind == "genrm" and self.max_tokens >= self.max_context:
            raise ValueError(NO_ROOM.format(self.max_tokens, "template", self.max_context))
        if self.scale[0] >= self.scale[1]:
            raise ValueError(f"scale = {list(self.scale)} must be lowest, then highest grade")
        return self
