"""The settings of one reward source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit, urlunsplit

from pydantic import BeforeValidator, Field, model_validator

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
    Share,
)
from offbeat.config_verdicts import check_verdicts

Parser = Literal["number", "last_number", "json", "yes_no", "choice", "rubric", "expected"]
READY_TEMPLATES = ("grade", "grade_reference", "correct", "rubric", "pairwise")
"""Templates that Offbeat brings along, by name."""
SOURCE_NAME = re.compile(r"[A-Za-z0-9_-]+")


def _name_or_number(label: Any) -> Any:
    return str(label) if isinstance(label, int) and not isinstance(label, bool) else label


def without_user(url: str) -> str:
    """An address that may be shown."""
    try:
        parts = urlsplit(url.rstrip("/"))
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    except ValueError:
        return "(no address)"


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
    weight: float = Field(1.0, description="in the combination of sources")
    role: Literal["add", "multiply", "veto"] = Field(
        "add",
        description="add: a weighted part of the total; multiply: its value times the total of "
        "the others; veto: below veto_below the others count nothing (docs/rewards.md)",
    )
    veto_below: float = Field(0.5, description="a veto's value under which the rest counts nothing")
    when: dict[str, Any] = Field(
        default_factory=dict,
        description='rows that it scores, by column: {task = "math"} or {task = ["a", "b"]}; '
        "default all. A row's own list of sources (data.reward_column) goes before it",
    )
    placement: Literal["pool", "colocate"] = Field(
        "pool", description="only pool: a reward model stands on devices of its own"
    )
    on_failure: Literal["retry_then_drop_sample", "drop_group", "abstain"] = Field(
        "retry_then_drop_sample", description="what a failed score does to its sample"
    )
    retries: Annotated[int, Field(ge=0, le=20)] = Field(2, description="of a failed call")
    deadline_seconds: Seconds = Field(60, description="of one call")
    concurrency: Positive = Field(
        64, description="calls in flight at most; of an external judge, to each server"
    )
    max_failed_share: Share = Field(
        0.5, description="of its last 64 scores; with more failures no group is admitted"
    )
    patience_seconds: Seconds = Field(
        600,
        description="that a run waits for a source that is down or over max_failed_share; "
        "then it ends, non-zero",
    )
    anchors: Path | None = Field(
        None, description="JSONL of answers with known grades that are judged again and again"
    )
    anchors_every: Positive = Field(10, description="steps between two looks at the anchors")
    # function
    function: str | None = Field(None, description="file.py:name or package.module:name")
    workers: Positive = Field(1, description="processes that run the function")
    style: Literal["offbeat", "trl", "verl"] = Field(
        "offbeat",
        description="how it is called: (prompts, completions, **columns); TRL's reward_funcs; "
        "verl's compute_score(data_source, solution_str, ground_truth, extra_info)",
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="further keyword arguments of the function"
    )
    # genrm and disrm
    model: str | None = Field(None, description="model directory; with base_url the model's name")
    replicas: Positive = Field(1, description="of the model")
    devices_per_replica: Annotated[int, Field(ge=0)] = Field(1, description="of one replica")
    pool: str | None = Field(
        None,
        description="name of a pool that it shares with the reward sources that name it, too: "
        "replica i of each lies on the pool's device i",
    )
    device_share: Annotated[float, Field(ge=0.01, le=1)] = Field(
        1.0, description="with pool: the part of one device that each of its replicas has"
    )
    template: Path | None = Field(
        None,
        description="Jinja file with question, answer, reference, rubric and columns, or one of "
        "the ready ones by name: grade, grade_reference, correct, rubric, pairwise",
    )
    chat: bool = Field(False, description="put the rendered text into the model's chat template")
    dtype: Dtype = Field("float32", description="compute type of the replica")
    threads: Positive = Field(1, description="CPU threads of a replica")
    seats: Positive = Field(64, description="sequences at once (genrm) or rows a batch (disrm)")
    max_context: Positive = Field(1024, description="tokens of template and verdict together")
    # genrm
    base_url: str | tuple[str, ...] | None = Field(
        None,
        description="OpenAI-compatible server or servers, e.g. http://host/v1: calls go to the "
        "least busy one that is up",
    )
    api_key_env: str | None = Field(None, description="environment variable that holds its key")
    requests_per_minute: Positive | None = Field(
        None, description="to one server at most, over all sources that ask it"
    )
    tokens_per_minute: Positive | None = Field(
        None, description="to and from one server at most, over all sources that ask it"
    )
    parser: Parser = Field("number", description="of the verdict: docs/rewards.md")
    choices: dict[str, float] = Field(
        default_factory=dict,
        description="verdicts of parser choice or expected with their values, e.g. {A = 1, B = 0}",
    )
    rubric: tuple[str, ...] = Field(
        (), description="criteria that are graded one by one; a row's column rubric goes before it"
    )
    votes: Positive = Field(1, description="verdicts on one sample (temperature above 0)")
    vote: Literal["mean", "median", "majority"] = Field("mean", description="of several votes")
    pairwise: Literal["circular", "all"] | None = Field(
        None,
        description="compare a group's samples, in both orders: each with its neighbour, or every "
        "pair; the score is the share of comparisons won",
    )
    cache: bool = Field(
        True, description="keep verdicts of temperature 0 on disk (RUNS_DIR/verdicts.sqlite)"
    )
    seed: int | None = Field(
        None, ge=0, lt=2**63, description="of its sampling; default: the run's"
    )
    scale: tuple[float, float] = Field((1.0, 10.0), description="lowest and highest grade")
    max_tokens: Positive = Field(16, description="of a verdict")
    structured: Literal["auto", "on", "off"] = Field(
        "auto",
        description="the engine enforces the verdict's form. auto: vLLM for json, rubric, yes_no, "
        "choice and pairwise; on: also numbers, and servers that take OpenAI's response_format",
    )
    temperature: Annotated[float, Field(ge=0, le=2)] = Field(0.0, description="of the judge")
    stop: tuple[str, ...] = Field((), description="strings that end a verdict")
    # disrm
    over_length: Literal["cut_front", "fail"] = Field(
        "fail", description="a text that is too long: cut its front, or failed(too_long)"
    )
    label: Annotated[str | None, BeforeValidator(_name_or_number)] = Field(
        None, description="whose logit is the reward, of a model with several: name or number"
    )
    label_values: dict[str, float] = Field(
        default_factory=dict,
        description="values of the labels: the reward is the expected value under the softmax",
    )
    normalize: Literal["none", "affine", "running"] = Field(
        "none",
        description="of the scores: affine as set; running: minus mean, by deviation so far",
    )
    affine: tuple[float, float] = Field((1.0, 0.0), description="factor and term of affine")

    @property
    def base_urls(self) -> tuple[str, ...]:
        """The servers of an external judge; empty for all else."""
        found = self.base_url
        return () if found is None else (found,) if isinstance(found, str) else found

    @property
    def shown_servers(self) -> tuple[str, ...]:
        """The servers as they may be shown: without a user's name and password."""
        return tuple(map(without_user, self.base_urls))

    @property
    def grouped(self) -> bool:
        """Whether it sees a group's samples together, when all have ended."""
        return self.kind == "genrm" and self.pairwise is not None

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

    @model_validator(mode="after")
    def _placeable(self) -> Self:
        """What a source of a shared pool is, and only one of them."""
        if self.pool is None:
            if self.device_share < 1:
                raise ValueError(
                    f"device_share = {self.device_share:g} would leave the rest of its device "
                    'idle, because no other source is there; name a pool = "..." that it shares, '
                    "or leave device_share out"
                )
            return self
        if not SOURCE_NAME.fullmatch(self.pool):
            raise ValueError(f'pool = "{self.pool}" may consist of letters, digits, _ and - only')
        if not self.has_pool:
            what = "a function" if self.kind == "function" else "an external judge"
            raise ValueError(
                f'pool = "{self.pool}" is for a model on devices of this run, and {what} has none; '
                "leave it out"
            )
        if self.devices_per_replica != 1:
            raise ValueError(
                f'devices_per_replica = {self.devices_per_replica} with pool = "{self.pool}", '
                "where a replica has a share of one device; set it to 1, or leave pool out"
            )
        return self

    @model_validator(mode="after")
    def _readable(self) -> Self:
        """What a judge's verdicts are read as, and what a scorer's logits are."""
        if self.kind == "genrm":
            check_verdicts(self)
        elif str(self.template) in READY_TEMPLATES:
            raise ValueError(
                f'template = "{self.template}" is for a judge; give a {self.kind} a Jinja file of '
                "its own, or leave it out"
            )
        chosen = "label_values" if self.label_values else "label"
        if self.kind != "disrm" and (self.label is not None or self.label_values):
            raise ValueError(
                f'{chosen} is set for kind = "{self.kind}"; only a scorer (kind = "disrm") has '
                "labels: leave it out"
            )
        if self.label is not None and self.label_values:
            raise ValueError(
                "label_values and label are both set; the reward is either one label's logit or "
                "the expected value: leave one out"
            )
        return self

    @model_validator(mode="after")
    def _scaled(self) -> Self:
        """What `normalize` makes of the scores."""
        if self.normalize != "affine":
            if self.affine != (1.0, 0.0):
                raise ValueError(
                    f"affine = {list(self.affine)} has no effect with normalize = "
                    f'"{self.normalize}"; set normalize = "affine", or leave affine out'
                )
        elif "affine" not in self.model_fields_set:
            raise ValueError(
                'affine is missing; normalize = "affine" needs affine = [factor, term]'
            )
        elif self.affine[0] == 0:
            raise ValueError(
                f"affine = {list(self.affine)} would make all scores the same; give a factor "
                "that is not 0"
            )
        return self


def check_shared_pools(
    every: Mapping[str, RewardSourceSection],
    active: Mapping[str, RewardSourceSection],
    single_device: bool,
) -> None:
    """Refuses shared pools that cannot be; `every` source counts for their names, `active` ones
    for their devices. Raises `ValueError` that begins with a setting's full name."""
    pools: dict[str, dict[str, float]] = {}
    for name, source in active.items():
        pool = source.pool
        if pool is None:
            continue
        if pool in every:
            raise ValueError(
                f'reward.{name}.pool = "{pool}" is the name of a reward source, whose own pool is '
                f"called reward/{pool}; choose a name that no source has"
            )
        if single_device:
            raise ValueError(
                f'reward.{name}.pool = "{pool}" does not fit cluster.single_device = true, where '
                "every role has a share of the one device; leave one of the two out"
            )
        pools.setdefault(pool, {})[f"reward.{name}.device_share"] = source.device_share
    for pool, shares in pools.items():
        alone = sum(source.pool == pool for source in every.values()) == 1
        for key, share in shares.items():
            if alone and share < 1:
                others = {source.pool for source in every.values()} - {None, pool}
                raise ValueError(
                    f"{key} = {share:g} would leave the rest of its device idle, because no other "
                    f'source has pool = "{pool}"; name one that another has'
                    + (f" ({', '.join(sorted(filter(None, others)))})" if others else "")
                    + ", or leave pool and device_share out"
                )
        # Replica 0 of every source lies on the pool's first device, so it is the fullest.
        if sum(shares.values()) > 1 + 1e-9:
            named = " + ".join(f"{key} = {share:g}" for key, share in shares.items())
            raise ValueError(
                f"{named} come to {sum(shares.values()):g} of the first device of pool "
                f'"{pool}", which is more than all of it; lower them, or give one of the sources '
                "a pool of its own"
            )
