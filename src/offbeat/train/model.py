"""The trained model: an ordinary Hugging Face directory, and log-probabilities of micro-batches.

Weights are float32; under autocast the compute type is `model.dtype`. The vocabulary is large,
so logits exist only for the places that predict a completion token, some rows at a time.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from offbeat.errors import UserError
from offbeat.train.batching import Index, MicroBatch, Trajectory, ancestor_mask, plan

LOGITS_AT_ONCE = 1 << 26
"""Elements of one block of logits (256 MiB in float32); blocks beyond the first are recomputed in
the backward pass, so that only one exists at a time."""

_UNKNOWN_HEADS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class PolicyModel:
    """A causal language model that says how likely the sampled tokens are.

    Dropout is off, so that log-probs are those of the engines. `prefix_sharing` is checked once
    against plain rows: an architecture that ignores a 4D mask is refused, never trained wrongly.
    """

    def __init__(self, path: Path, *, device: torch.device, dtype: str, temperature: float) -> None:
        transformers_logging.disable_progress_bar()
        try:
            self.module: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
            )
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(f"model.path {path} does not load: {error}") from error
        self.module.to(device)
        self.module.eval()
        for name in _UNKNOWN_HEADS:
            if getattr(self.module.config, name, None) not in (None, 1.0):
                raise UserError(f"model.path {path}: `{name}` in its config.json is not supported")
        self.device = device
        self.hidden_size = int(self.module.config.get_text_config().hidden_size)
        self.temperature = temperature
        self.compute_dtype = resolve_dtype(dtype, device)

    def logprobs(self, micro: MicroBatch, dtype: torch.dtype | None = None) -> Tensor:
        """(T,) float32 natural log-probs of the micro-batch's tokens, at the rollout temperature.

        `dtype` overrides the compute type. The head computes in float32 whatever that is: logits
        rounded to bfloat16 are the larger part of the difference to an engine (arXiv 2506.13585).
        """
        with self._autocast(dtype or self.compute_dtype):
            hidden = self._hidden(micro)
        rows = hidden.reshape(-1, hidden.shape[-1])[self._on_device(micro.rows)]
        return token_logprobs(
            self.module.get_output_embeddings(),
            rows.float(),
            micro.token_rows,
            self._on_device(micro.targets),
            self.temperature,
        )

    def check_prefix_sharing(self, max_context: int) -> None:
        """Refuses prefix sharing where it gives other log-probs than plain rows."""
        window = getattr(self.module.config, "sliding_window", None)
        kinds = getattr(self.module.config, "layer_types", None) or ()
        slides = "sliding_attention" in kinds or (not kinds and window is not None)
        if slides and window is not None and max_context > window:
            raise UserError(
                f"the model attends to a sliding window of {window} tokens, less than "
                f"rollout.max_context {max_context}: set train.prefix_sharing = false"
            )
        vocabulary = self.module.config.get_text_config().vocab_size
        ids = np.arange(1, 9, dtype=np.int32) % vocabulary
        pair = [Trajectory(ids[:4], ids[4:7]), Trajectory(ids[:3], ids[5:8])]
        values = []
        for sharing in (False, True):
            (micro,) = plan(pair, tokens_per_micro_batch=64, prefix_sharing=sharing)
            order = torch.argsort(self._on_device(micro.source))
            with torch.no_grad():
                values.append(self.logprobs(micro, torch.float32)[order])
        worst = float((values[0] - values[1]).abs().max())
        if not worst < 1e-3:
            raise UserError(
                f"this architecture ({self.module.config.model_type}) computes shared prefixes "
                f"wrongly (log-probs off by {worst:.2g}): set train.prefix_sharing = false"
            )

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Named weights, each once, and `tied`: names that share another's storage."""
        stored: dict[str, Tensor] = {}
        tied: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            owner = first.setdefault(id(tensor), name)
            if owner == name:
                stored[name] = tensor.detach()
            else:
                tied[name] = owner
        return stored, tied

    def parameters(self) -> list[nn.Parameter]:
        """All trained parameters, each once."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def _hidden(self, micro: MicroBatch) -> Tensor:
        """(B, W, hidden) last hidden states."""
        ids = self._on_device(micro.input_ids)
        if micro.ends is None:
            return _last_hidden(self.module.base_model(input_ids=ids, use_cache=False))
        mask = torch.from_numpy(ancestor_mask(micro.ends)).to(self.device)[None, None]
        output = self.module.base_model(
            input_ids=ids,
            position_ids=self._on_device(micro.position_ids),
            attention_mask=mask,
            use_cache=False,
        )
        return _last_hidden(output)

    def _on_device(self, array: Index) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _autocast(self, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
        if dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)


def token_logprobs(
    head: Any, hidden: Tensor, token_rows: Index, targets: Tensor, temperature: float
) -> Tensor:
    """(T,) log-probs of `targets` (T,), token t predicted by `hidden[token_rows[t]]`, (R, hidden).

    `token_rows` ascends, so that a block of rows predicts a stretch of tokens.
    """
    vocabulary = int(head.weight.shape[0])
    block = max(1, LOGITS_AT_ONCE // vocabulary)
    places = torch.from_numpy(token_rows).to(targets.device)
    if len(hidden) <= block:
        return _block_logprobs(head, hidden, places, targets, temperature)
    found = []
    for first in range(0, len(hidden), block):
        a, b = np.searchsorted(token_rows, [first, first + block])
        part = hidden[first : first + block]
        args = (head, part, places[a:b] - first, targets[a:b], temperature)
        found.append(checkpoint(_block_logprobs, *args, use_reentrant=False))
    return torch.cat(found)


def _block_logprobs(
    head: nn.Module, hidden: Tensor, places: Tensor, targets: Tensor, temperature: float
) -> Tensor:
    logits = head(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    chosen: Tensor = logits[places, targets]
    return chosen - torch.logsumexp(logits, dim=-1)[places]


def _last_hidden(output: Any) -> Tensor:
    hidden: Tensor = output.last_hidden_state
    return hidden


def resolve_device(kind: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The trainer's device; "auto" is the GPU where there is one."""
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError('cluster.device is "cuda" and torch sees no CUDA device')
    return torch.device("cuda" if kind != "cpu" and torch.cuda.is_available() else "cpu")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The compute type; "auto" is bfloat16 where the device computes it natively, else float32."""
    if name != "auto":
        return torch.bfloat16 if name == "bfloat16" else torch.float32
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported()
    else:
        native = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.bfloat16 if native else torch.float32
