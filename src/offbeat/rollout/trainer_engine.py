"""Held-out answers by the trainer's own weights, on its device, between two of its steps.

The engine is a stepper over a twin of the trained module: no weight is copied, none is changed, and
the keys and values are freed when the answers are there. It computes as the trainer does, in its
compute type and with its head in float32. Draws come from a generator of their own, so training
goes on as if nobody had asked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from offbeat.config import Config
from offbeat.errors import DeadlinePassed, RequestRefused
from offbeat.records import Completion, GenerateRequest, PolicyVersion, Progress
from offbeat.rollout.policy_model import PolicyModel
from offbeat.rollout.refusals import check_request
from offbeat.rollout.spans import SpanLog
from offbeat.rollout.stepper import Stepper, jobs_of
from offbeat.rollout.transformers_engine import PREFILL_BUDGET
from offbeat.train.trainer import Trainer

log = logging.getLogger(__name__)
REPLICA = 1 << 20
"""Seeds the draws beside those of any rollout engine."""
KV_SHARE = 0.5
"""Of a GPU's free memory: what keys and values may take."""


def answer(
    trainer: Trainer, requests: Sequence[GenerateRequest]
) -> tuple[PolicyVersion, list[Completion]]:
    """The trainer's version and its completions of the requests, by request, then by index.

    Requests that do not fit the context have none. Blocks; nothing else may use the trainer
    meanwhile. Raises `DeadlinePassed` after `validate.deadline_seconds`.
    """
    with trainer.lent() as module, torch.inference_mode():
        found = _run(_stepper(trainer, module, requests), requests, trainer.config)
    if trainer.model.device.type == "cuda":
        torch.cuda.empty_cache()  # keys and values are gone; others may live on this GPU
    return trainer.version, found


def _stepper(trainer: Trainer, module: Any, requests: Sequence[GenerateRequest]) -> Stepper:
    """An engine over the module, as large as the requests need it."""
    config, device, dtype = trainer.config, trainer.model.device, trainer.model.compute_dtype
    longest = max((len(r.prompt_ids) + r.sampling.max_tokens for r in requests), default=1)
    columns = min(config.rollout.max_context, longest)
    seats = min(config.rollout.seats, max(1, sum(request.n for request in requests)))
    if device.type == "cuda":
        seats = seats_that_fit(seats, columns * _kv_bytes(module.config, dtype), _free(device))
    tokenizer = config.model.tokenizer
    model = PolicyModel(
        str(config.model.path),
        tokenizer_path=None if tokenizer is None else str(tokenizer),
        dtype="float32",
        device=device,
        seats=seats,
        max_context=columns,
        seed=config.seed,
        replica=REPLICA,
        module=module,
        autocast=None if dtype == torch.float32 else dtype,
    )
    return Stepper(
        model,
        seats=seats,
        version=trainer.version,
        on_update="recompute",
        prefill_budget=PREFILL_BUDGET[device.type],
        spans=SpanLog("train", 0, wall_is_cpu=device.type == "cuda"),
    )


def _run(stepper: Stepper, requests: Sequence[GenerateRequest], config: Config) -> list[Completion]:
    found: dict[tuple[str, int], Completion] = {}

    def deliver(item: Completion | Progress | BaseException) -> None:
        if isinstance(item, Completion):  # a step that fails raises here, in the same thread
            found[item.request_id, item.index] = replace(item, ref=None)

    asked = [request for request in requests if _fits(stepper, request)]
    for request in asked:
        stepper.submit(jobs_of(request, deliver))
    seconds = config.validation.deadline_seconds
    until = time.monotonic() + seconds
    while not stepper.idle:
        stepper.step()
        if time.monotonic() >= until:
            raise DeadlinePassed(
                f"the trainer answered {len(found)} of {sum(r.n for r in asked)} held-out "
                f"completions within validate.deadline_seconds = {seconds:g}"
            )
    return [found[request.request_id, index] for request in asked for index in range(request.n)]


def _fits(stepper: Stepper, request: GenerateRequest) -> bool:
    sampling, model = request.sampling, stepper.model
    stop_ids = stepper.stop_ids(sampling)
    try:
        check_request(
            request,
            context=model.context,
            vocabulary=model.vocabulary,
            ends=lambda ids: stepper.reason_to_end(sampling, ids, stop_ids),
        )
    except RequestRefused as refused:
        log.warning("not validated: %s", refused)
        return False
    return True


def _kv_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * config.num_hidden_layers * kv_heads * dim * dtype.itemsize)


def seats_that_fit(wanted: int, bytes_per_seat: int, free: int) -> int:
    """How many sequences to decode at once with so many bytes free; one at least."""
    return max(1, min(wanted, int(KV_SHARE * free) // bytes_per_seat))


def _free(device: torch.device) -> int:
    """Bytes of a GPU that are free, or held by this process's allocator for nothing."""
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free) + int(kept)
