"""One sample on its way through vLLM: what is asked for, what came so far, and when it ends.

The end is Offbeat's to see: stop strings are looked for in the sample's own tokens, those that it
was resumed with included, so that both engines stop at the same token. vLLM only counts tokens
and knows the stop ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from offbeat.errors import RunFailed
from offbeat.records import (
    Completion,
    FinishReason,
    GenerateRequest,
    Payload,
    Progress,
    Sampling,
    Structure,
)
from offbeat.rollout.refusals import check_request
from offbeat.rollout.stop_strings import Decode, StopStrings

Spans = Sequence[tuple[str, int]]  # (version, index of its first token), in order


def check(
    request: GenerateRequest, *, context: int, vocabulary: int, eos: int | None, stops: StopStrings
) -> None:
    """Raises `RequestRefused` for what cannot be run, as the engine on transformers does."""
    sampling, stop_ids = request.sampling, _stop_ids(request.sampling, eos)
    check_request(
        request,
        context=context,
        vocabulary=vocabulary,
        ends=lambda ids: _reason_to_end(sampling, ids, stop_ids, stops),
    )


def samples_of(
    request: GenerateRequest, eos: int | None, decode: Decode, stops: StopStrings
) -> list[Sample]:
    """The samples that are still to be made, resumed ones with their tokens so far."""
    resumed: Mapping[int, Payload] = dict(request.resume)
    found = []
    for index in range(request.n):
        if index not in request.done:
            sample = Sample(request, index, eos, decode, stops)
            # A grammar begins at a text's beginning, and what is watched belongs to the first
            # token: such a sample begins anew.
            anew = request.sampling.structure is not None or request.sampling.watch
            if index in resumed and not anew:
                sample.resume(resumed[index])
            found.append(sample)
    return found


class Sample:
    """One running sample. `ids`, `logprobs` and `versions` hold all its tokens so far."""

    def __init__(
        self,
        request: GenerateRequest,
        index: int,
        eos: int | None,
        decode: Decode,
        stops: StopStrings,
    ) -> None:
        self.request = request
        self.index = index
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.reason: FinishReason | None = None
        self.name = ""  # of the request inside vLLM
        self.renewed = False
        self.watched: tuple[float, ...] = ()
        self._decode = decode
        self._stops = stops
        self._stop_ids = _stop_ids(request.sampling, eos)
        self._old_versions: list[int] = []
        self._old = 0  # tokens that it was resumed with
        self._told = 0  # tokens of the last progress

    def resume(self, payload: Payload) -> None:
        """Takes over tokens that were made before; they do not end it (`check`)."""
        self.ids = payload.token_ids.tolist()
        self.logprobs = payload.logprobs.tolist()
        self._old_versions = payload.versions.tolist()
        self._old = self._told = len(self.ids)

    def prompt(self) -> list[int]:
        """The prompt and all tokens so far."""
        return [*np.asarray(self.request.prompt_ids).tolist(), *self.ids]

    def params(self) -> Any:
        """vLLM's sampling parameters: those of the request, and nothing else."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = self.request.sampling
        # Tokens come one by one only where each is looked at.
        every = 1 if sampling.stop else self.request.snapshot_every
        watch = None if self.peeks else list(sampling.watch) or None
        return SamplingParams(
            max_tokens=sampling.max_tokens - len(self.ids),
            temperature=sampling.temperature,
            top_p=1.0,
            top_k=0,
            stop_token_ids=sorted(self._stop_ids),
            # The model's generation_config knows further ends; only the tokenizer's counts.
            ignore_eos=True,
            # Also of the watched tokens, at every position, unless a peek has seen them.
            logprobs=None if watch else 0,
            logprob_token_ids=watch,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if every else RequestOutputKind.FINAL_ONLY,
            stream_interval=every or None,
            structured_outputs=_structured(sampling.structure),
            skip_clone=True,
        )

    @property
    def peeks(self) -> bool:
        """Whether what is watched needs a request of its own, `peek`: vLLM's log-probs are those
        of the distribution that is drawn from, with its temperature and its structure."""
        sampling = self.request.sampling
        bent = sampling.structure is not None or sampling.temperature not in (0.0, 1.0)
        return bool(sampling.watch) and bent

    def peek(self) -> Sample:
        """One greedy token without a structure, for its `watched`."""
        plain = Sampling(1, 0.0, watch=self.request.sampling.watch)
        request = replace(self.request, sampling=plain, snapshot_every=0)
        return Sample(request, self.index, None, self._decode, self._stops)

    def add(self, ids: Sequence[int], logprobs: Any) -> None:
        """Takes new tokens with their log-probs, vLLM's `FlatLogprobs`; sets `reason` at the one
        that ends the sample, and drops later ones."""
        if not ids:
            return
        if self.request.sampling.watch and not self.peeks and not self.ids:
            # Behind the token's own.
            self.watched = tuple(logprobs.logprobs[1 : logprobs.end_indices[0]])
        firsts = [logprobs.logprobs[start] for start in logprobs.start_indices]
        for token, logprob in zip(ids, firsts, strict=True):
            if self.reason is None:
                self._append(int(token), float(logprob))

    @property
    def due(self) -> bool:
        """Whether it is time to tell of its progress."""
        every = self.request.snapshot_every
        return bool(every) and self.reason is None and len(self.ids) - self._told >= every

    def progress(self, spans: Spans) -> Progress:
        """All tokens so far; `spans` are the versions of those since it was given to vLLM."""
        self._told = len(self.ids)
        return Progress(self.request.request_id, self.index, self._told, self._payload(spans))

    def completion(self, spans: Spans, version: int) -> Completion:
        """The finished sample; `version` stands in where it has no token."""
        payload = self._payload(spans)
        return Completion(
            request_id=self.request.request_id,
            index=self.index,
            text=self._decode(self.ids),
            tokens=len(self.ids),
            version_min=min(payload.versions.tolist(), default=version),
            version_max=max(payload.versions.tolist(), default=version),
            finish_reason=self.reason or "aborted",
            ref=payload,
            watched=self.watched,
        )

    @property
    def fresh(self) -> bool:
        """No token has come since it was given to vLLM."""
        return len(self.ids) == self._old

    def _append(self, token: int, logprob: float) -> None:
        if not -1e30 < logprob <= 1e-3:
            raise RunFailed(f"{self.request.request_id}: a token has a log-prob of {logprob}")
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.reason = _reason_to_end(self.request.sampling, self.ids, self._stop_ids, self._stops)

    def _payload(self, spans: Spans) -> Payload:
        versions = np.empty(len(self.ids), np.int32)
        versions[: self._old] = self._old_versions
        if len(self.ids) > self._old and (not spans or spans[0][1] != 0):
            raise RunFailed(f"{self.request.request_id}: vLLM named no version of its tokens")
        for version, start in spans:
            versions[self._old + start :] = int(version)
        return Payload(np.array(self.ids, np.int32), np.array(self.logprobs, np.float32), versions)


def _stop_ids(sampling: Sampling, eos: int | None) -> frozenset[int]:
    return frozenset(sampling.stop_token_ids if eos is None else (*sampling.stop_token_ids, eos))


def _reason_to_end(
    sampling: Sampling, ids: Sequence[int], stop_ids: frozenset[int], stops: StopStrings
) -> FinishReason | None:
    """Why a sample ends with its newest token; None if it goes on."""
    if ids[-1] in stop_ids or stops.check(ids, sampling.stop):
        return "stop"
    return "length" if len(ids) >= sampling.max_tokens else None


def _structured(structure: Structure | None) -> Any:
    if structure is None:
        return None
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(
        json=structure.json_schema,
        regex=structure.regex,
        choice=list(structure.choices) or None,
    )


def first_line(error: BaseException) -> str:
    """What an error says, in one line of at most 300 characters."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
