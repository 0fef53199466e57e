"""What all sections of the configuration share: their base and the types of settings."""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Dtype = Literal["float32", "bfloat16", "auto"]
EngineName = Literal["transformers", "vllm"]
MemoryShare = Annotated[float, Field(gt=0, le=1)]

RUN_NAME = r"^[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*$"
"""Of a run: the folder's name, so not "." or "..", which are others."""

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

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`steps = true` is no 1: it is read as a word, which numbers refuse."""
        assert info.field_name is not None
        return _worded(value, cls.model_fields[info.field_name].annotation)


def _worded(value: Any, kind: Any) -> Any:
    """The value with the truths in it as words, where `kind` takes numbers and no truths."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if isinstance(value, bool):
        return (
            str(value).lower()
            if any(map(_number, kinds)) and not {bool, str, Any} & {*kinds}
            else value
        )
    inner = [get_args(one) for one in kinds if get_origin(one) in (list, tuple, dict)]
    if not inner:
        return value
    if isinstance(value, list | tuple):
        return [_worded(one, inner[0][0]) for one in value]
    if isinstance(value, dict):
        return {key: _worded(one, inner[0][-1]) for key, one in value.items()}
    return value


def _number(kind: Any) -> bool:
    return (get_args(kind)[0] if get_origin(kind) is Annotated else kind) in (int, float)
