"""What all sections of the configuration share: their base and the types of settings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Dtype = Literal["float32", "bfloat16", "auto"]
EngineName = Literal["transformers", "vllm"]
MemoryShare = Annotated[float, Field(gt=0, le=1)]

NO_DEVICES = "{} = 0 would make a pool of zero devices for {}; set it to 1 or more"
ONE_DEVICE = (
    'devices_per_replica = {} with engine = "transformers", which runs a model on one device; set '
    'it to 1, or engine to "vllm", which splits the model over them'
)
NO_ROOM = (
    "max_tokens = {} leaves no room for the {} in max_context = {}; lower it or raise max_context"
)


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
