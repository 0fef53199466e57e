"""The settings of validation."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from offbeat.config_base import EngineName, Positive, Seconds, Section

On = Literal["rollout", "dedicated", "train"]
"""Who answers a validation."""


class ValidateSection(Section):
    """Validation on held-out prompts, with an exact checker and the run's reward sources."""

    on: On = Field(
        "rollout",
        description="who answers: the rollout engines beside rollout; engines on a pool of their "
        "own; the trainer between two steps, on its devices and with its weights",
    )
    samples: Positive = Field(
        1, description="answers to one prompt; with more than 1 pass@k is told (arXiv 2107.03374)"
    )
    temperature: Annotated[float, Field(ge=0, le=2)] = Field(0.0, description="0: greedy")
    rewards: bool = Field(True, description="score the answers with the reward sources, too")
    replicas: Positive = Field(1, description='engines of on = "dedicated"')
    devices_per_replica: Positive = Field(
        1, description='devices of one engine of on = "dedicated"'
    )
    every: Annotated[int, Field(ge=0)] = Field(0, description="steps between; 0: only the ends")
    function: str | None = Field(
        None,
        description="exact checker, file.py:name, called as a reward function is; its mean is the "
        "metric `accuracy`",
    )
    limit: Positive | None = Field(None, description="use only the first held-out prompts")
    deadline_seconds: Seconds = Field(
        900,
        description="of one validation; rewards that are not there by then count as failed, "
        "answers that are not checked are unscored",
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples = {self.samples} with temperature = 0 would be one and the same answer "
                f"{self.samples} times; set temperature above 0, for example to 1.0, or samples "
                "to 1"
            )
        return self


def check_validation(section: ValidateSection, *, engine: EngineName, single_device: bool) -> None:
    """Raises `ValueError` for what does not go with the rest of the run; `engine` is rollout's."""
    if section.on != "dedicated":
        return
    if single_device:
        raise ValueError(
            'validate.on = "dedicated" wants a device of its own, and with cluster.single_device = '
            'true there is one for all; set it to "rollout", or to "train", where the trainer '
            "answers between its steps"
        )
    if engine == "transformers" and section.devices_per_replica > 1:
        raise ValueError(
            f"validate.devices_per_replica = {section.devices_per_replica} with rollout.engine = "
            '"transformers", which runs a model on one device; set it to 1, or rollout.engine to '
            '"vllm", which splits the model over them'
        )
