"""The nouns that travel between roles: frozen, slotted dataclasses of arrays and plain values.

Token arrays (`Payload`) go from engines to the trainer's ranks by reference and never through
the rollouter's loop; what the rollouter handles is a `Completion` note with a `ref` to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
Messages = tuple[Mapping[str, str], ...]
FinishReason = Literal["stop", "length", "aborted"]
ManifestKind = Literal["full", "broadcast", "ipc"]


@dataclass(frozen=True, slots=True, order=True)
class PolicyVersion:
    """Identity of weights: the trainer's lineage (one a start) and the step that made them."""

    lineage: int
    step: int

    def __str__(self) -> str:
        return f"{self.lineage}.{self.step}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of data at one place of the seeded order.

    `ordinal` never repeats: epoch x rows + place. `question` is the text that templates of reward
    models show (the row's `question` column, else the prompt's text or its last user message).
    """

    ordinal: int
    token_ids: IntArray
    text: str
    question: str
    messages: Messages | None = None
    reference: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Structure:
    """The form that a completion must have: exactly one of the three is set.

    Engines that cannot enforce it generate freely; whoever reads the text checks it all the same.
    """

    json_schema: str | None = None
    regex: str | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Only settings that keep the distribution's support are possible.

    `temperature` 0 is greedy. `stop` strings end a sample (they stay in its text and tokens);
    `stop_token_ids` likewise. `logprobs` recorded are those of the distribution sampled from
    (temperature applied); for greedy ones, of the temperature-1 distribution.
    `watch` are token ids whose log-probs at the first position come with the completion, of the
    temperature-1 distribution without any structure.
    """

    max_tokens: int
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    structure: Structure | None = None
    watch: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt and `n` completions of it, numbered 0 to n - 1; the prompt is prefilled once.

    A request that was interrupted goes on: samples in `done` are not generated again, and those
    in `resume` (index, their `Payload` so far or a reference to it) continue from their tokens.
    With `snapshot_every` > 0 the engine yields a `Progress` of a running sample about every so
    many tokens, from which it can be resumed elsewhere.
    """

    request_id: str
    prompt_ids: IntArray
    n: int
    sampling: Sampling
    done: frozenset[int] = frozenset()
    resume: tuple[tuple[int, Any], ...] = ()
    snapshot_every: int = 0


@dataclass(frozen=True, slots=True)
class Payload:
    """The token arrays of one completion, aligned, shape (T,): ids, behaviour log-probs, versions.

    `versions` holds the `PolicyVersion.step` whose weights made each token.
    """

    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray


@dataclass(frozen=True, slots=True)
class Completion:
    """What the rollouter knows of a finished sample. `ref` is a `Payload` or a reference to it.

    `watched` are the log-probs of the request's `Sampling.watch`, aligned with it.
    """

    request_id: str
    index: int
    text: str
    tokens: int
    version_min: int
    version_max: int
    finish_reason: FinishReason
    ref: Any
    watched: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """A running sample's tokens so far: `ref` is their `Payload` or a reference to it."""

    request_id: str
    index: int
    tokens: int
    ref: Any


@dataclass(frozen=True, slots=True)
class Transcript:
    """One call of a judge: what it read, what it said, and what that was read as.

    `value` is on the source's 0 to 1, None where the verdict failed by `cause`. `seconds` from
    asking to the answer; `cached`: it came from the verdict cache, and cost no tokens. Of a
    comparison `other` is the index of the other sample and `first` says whether the sample itself
    was shown first; both samples have the call, and its tokens are with the one shown first.
    """

    prompt: str
    raw: str
    value: float | None = None
    cause: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    cached: bool = False
    other: int | None = None
    first: bool = True


@dataclass(frozen=True, slots=True)
class Reward:
    """A typed outcome of one source for one sample. A failure is never a number.

    `status` "scored": `value` is finite. "abstained": the source has no opinion. "failed": `cause`
    is a short snake_case word (timeout, unparseable, out_of_range, non_finite, too_long, ...).
    `spread` is the standard deviation of several votes. `transcripts` are the judge's calls; the
    reward loop writes them to the run's transcripts and hands rewards on without them.
    """

    source: str
    status: Literal["scored", "abstained", "failed"]
    value: float | None = None
    cause: str | None = None
    reason: str = ""
    raw: str = ""
    retries: int = 0
    token_index: int | None = None
    spread: float | None = None
    transcripts: tuple[Transcript, ...] = ()

    @classmethod
    def scored(cls, source: str, value: float, **more: Any) -> Reward:
        """A finite value; a non-finite one becomes failed(non_finite)."""
        if not math.isfinite(value):
            return cls(source, "failed", cause="non_finite", **more)
        return cls(source, "scored", value=float(value), **more)

    @classmethod
    def abstained(cls, source: str, **more: Any) -> Reward:
        """The source has no opinion on this sample."""
        return cls(source, "abstained", **more)

    @classmethod
    def failed(cls, source: str, cause: str, **more: Any) -> Reward:
        """The source could not score; `cause` says why."""
        return cls(source, "failed", cause=cause, **more)


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """What a reward source sees of one sample: text only, never policy token ids (D2).

    `tokens` counts those of the completion, `index` is the sample's in its group. A `draw` above
    0 is asked for anew, beside whatever was said of the same text before: no verdict of the
    cache, and other seeds for every draw.
    """

    prompt: Prompt
    completion: str
    finish_reason: FinishReason = "stop"
    tokens: int = 0
    index: int = 0
    draw: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory with its rewards.

    `total` is the combined reward, None if the sample was dropped. `parts` are the values that
    each source of role "add" brings to it, after gates and normalisation and before weights;
    sources without a value are absent. `vetoed`: a veto left nothing of it.
    """

    completion: Completion
    rewards: Mapping[str, Reward]
    total: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    vetoed: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt, its samples, attempt and deadline: the unit of ledger, advantage and training."""

    prompt: Prompt
    attempt: int
    deadline: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one trainer step consumes. Asking again for the same step gives the same batch."""

    step: int
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch in which a role computes. Times are seconds of `time.time()`; `cpu` is the CPU
    seconds used in it (on a GPU its wall time): waiting for a core is not computing."""

    role: str
    replica: int
    kind: str
    start: float
    end: float
    cpu: float
    version: int = -1
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a manifest: dtype name, shape, checksum of its bytes (crc32 in a file of kind
    "full", else `weights.packed.fingerprint`)."""

    dtype: str
    shape: tuple[int, ...]
    checksum: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Says what a published version consists of and where it lies.

    `path` is a safetensors file (kind "full"), the address where the trainer hands the tensors
    out ("broadcast"), or the handles of its device memory ("ipc").
    `base` is the version that a partial manifest builds on (None for kind "full").
    `tied` maps a tensor name that is not stored to the stored one it shares (tied embeddings).
    """

    version: PolicyVersion
    kind: ManifestKind
    path: str
    tensors: Mapping[str, TensorEntry]
    base: PolicyVersion | None = None
    tied: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """An engine's own word on itself."""

    version: PolicyVersion
    running: int
    waiting: int
    seats: int
