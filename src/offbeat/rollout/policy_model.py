"""A transformers causal LM as a generating engine uses it: forward passes over seats, sampling,
and new weights copied in place.

Everything here runs on the engine's stepping thread; nothing here knows requests.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from offbeat.errors import RunFailed, UserError
from offbeat.records import Manifest
from offbeat.rollout.kv import ATTENTION, SeatCache, Segment, seat_attention
from offbeat.rollout.refusals import check_architecture
from offbeat.train.model import resolve_dtype

# from_pretrained sets process-wide defaults while it runs: one model at a time.
_LOADING = threading.Lock()

AttentionInterface.register(ATTENTION, seat_attention)


class PolicyModel:
    """The model, its tokenizer and the seats' keys and values."""

    def __init__(
        self,
        model_path: str,
        *,
        tokenizer_path: str | None,
        dtype: str,
        device: torch.device,
        seats: int,
        max_context: int,
        seed: int,
        replica: int,
        module: Any = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        """Loads what `model_path` holds, or takes a `module` of that kind, on `device` already.

        With `autocast` the weights stay as they are, and `dtype` is of no account. In less than
        float32 the decoder computes as the trainer's does under autocast, and the head in float32:
        the same rounding on both sides is most of their agreement.
        """
        if module is None:
            wanted = resolve_dtype(dtype, device)
            autocast = None if wanted == torch.float32 else wanted
        model, self.tokenizer = _load(model_path, tokenizer_path, module)
        if module is None and autocast is not None:
            _round_layers(model, autocast)
        check_architecture(model_path, model.config)
        self.model = model.eval().requires_grad_(False).to(device)
        self._autocast = autocast
        self.device = device
        config = model.config
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self._groups = heads // kv_heads
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.context = min(max_context, int(config.max_position_embeddings))
        self.cache = SeatCache(
            config.num_hidden_layers,
            kv_heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            seats=seats,
            columns=self.context,
            dtype=self.compute_dtype,
            device=device,
        )
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        # A 4D mask is passed through as it is: transformers then builds none.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=device)
        # On the CPU also for CUDA: the same draws on every device.
        state = np.random.SeedSequence([seed, replica]).generate_state(1, np.uint64)
        self._generator = torch.Generator().manual_seed(int(state[0]) >> 1)
        self._check_forward(model_path)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type in which the decoder computes, and keys and values are kept."""
        return self._autocast or torch.float32

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end-of-sequence token."""
        found = self.tokenizer.eos_token_id
        return None if found is None else int(found)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens, nothing tidied up."""
        text = self.tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def forward(
        self, pending: list[int], lengths: list[int], segments: Sequence[Segment], *, logits: bool
    ) -> tuple[torch.Tensor | None, tuple[int, ...]]:
        """One flat pass; next-token logits of the seats' pending tokens, then of the items.

        Returns the logits and which items the rows after the pending tokens belong to.
        """
        plan = self.cache.plan(pending, lengths, segments, self._groups)
        with self._cast():
            hidden = self._decoder(
                input_ids=plan.inputs,
                position_ids=plan.positions,
                attention_mask=self._no_mask,
                use_cache=False,
                seat_cache=self.cache,
                seat_plan=plan,
            ).last_hidden_state[0]
        if not logits or not (pending or plan.items):
            return None, plan.items
        if plan.logits_at is not None:
            hidden = hidden.index_select(0, plan.logits_at)
        return self._head(hidden if self._autocast is None else hidden.float()), plan.items

    def draw(
        self, logits: torch.Tensor, temperatures: list[float], counts: list[int]
    ) -> tuple[list[int], list[float]]:
        """Draws `counts[i]` tokens from row i; returns tokens and log-probs, row after row.

        Temperature 0 takes the likeliest token; its log-prob is that of the temperature-1
        distribution. Else the log-prob is that of the distribution drawn from.
        """
        scores = logits.float()
        heat = np.array(temperatures)
        if ((heat != 1.0) & (heat != 0.0)).any():
            divisor = torch.from_numpy(np.where(heat == 0.0, 1.0, heat)).to(scores)
            scores = scores / divisor[:, None]
        probabilities = torch.softmax(scores, -1)
        rows, width = len(counts), max(counts)
        found = None
        if (heat != 0.0).any():
            # Inversion: one uniform a token, 10 times cheaper than torch.multinomial, and in
            # float64 as float32 sums would lose rare tokens.
            sums = probabilities.cumsum(-1, dtype=torch.float64)
            uniform = torch.rand((rows, width), dtype=torch.float64, generator=self._generator)
            found = torch.searchsorted(
                sums, uniform.to(self.device) * sums[:, -1:] * (1 - 1e-15), right=True
            ).clamp_(max=sums.shape[1] - 1)
        if (heat == 0.0).any():
            best = scores.argmax(-1, keepdim=True).expand(rows, width)
            if found is None:
                found = best
            else:
                greedy = torch.from_numpy(heat == 0.0).to(self.device)[:, None]
                found = torch.where(greedy, best, found)
        assert found is not None
        logprobs = probabilities.gather(1, found).log().double()
        ids, values = torch.stack((found.double(), logprobs)).cpu().numpy()
        kept = np.arange(width) < np.array(counts)[:, None]
        return ids[kept].astype(np.int64).tolist(), values[kept].tolist()

    def check(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuses weights that are not this model's, before any is touched."""
        for name, target in self.model.state_dict().items():
            source = tensors.get(manifest.tied.get(name, name))
            if source is None:
                raise RunFailed(f"version {manifest.version} in {manifest.path} lacks {name}")
            if source.shape != target.shape:
                raise RunFailed(
                    f"version {manifest.version}: {name} has shape {tuple(source.shape)}, "
                    f"the engine's {tuple(target.shape)}"
                )

    @torch.no_grad()
    def copy_weights(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies weights in place, so that tied tensors stay tied."""
        self.check(manifest, tensors)
        written: set[int] = set()
        for name, target in self.model.state_dict().items():
            if target.data_ptr() not in written:
                written.add(target.data_ptr())
                target.copy_(tensors[manifest.tied.get(name, name)])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _cast(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)

    def _check_forward(self, model_path: str) -> None:
        """Compares the seats' path with the stock model's, once: unknown models fail here."""
        size = min(6, self.context)
        tokens = np.arange(size, dtype=np.int64) % self.vocabulary
        with self._cast():
            stock = self.model(torch.from_numpy(tokens)[None].to(self.device), use_cache=False)
        self.model.set_attn_implementation(ATTENTION)
        probe = [Segment(tokens[:-1], 0, (0,))] if size > 1 else []
        pending, lengths = [int(tokens[-1])], [size - 1]
        if probe:
            self.forward([], [], probe, logits=False)
        ours, _ = self.forward(pending, lengths, [], logits=True)
        assert ours is not None
        expected = stock.logits[0, -1].float()
        tolerance = 0.01 if self.compute_dtype == torch.float32 else 0.3
        error = float((ours[0].float() - expected).abs().max())
        if not error <= tolerance * float(expected.std()) + 1e-6:
            raise UserError(
                f"{model_path}: this model's logits differ by {error:.3g} when its attention goes "
                "through the engine's seats; use a Llama-like model or another engine"
            )


def _round_layers(model: Any, dtype: torch.dtype) -> None:
    """Keeps linear layers in the type that autocast would round them to in each pass."""
    for layer in model.get_decoder().modules():
        if isinstance(layer, torch.nn.Linear):
            layer.to(dtype)


def _load(model_path: str, tokenizer_path: str | None, module: Any) -> tuple[Any, Any]:
    """The model in float32, unless it is given, and the tokenizer."""
    try:
        with _LOADING:
            transformers_logging.disable_progress_bar()
            if module is None:
                module = AutoModelForCausalLM.from_pretrained(
                    model_path, dtype=torch.float32, attn_implementation="sdpa"
                )
            return module, AutoTokenizer.from_pretrained(tokenizer_path or model_path)
    except (OSError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{model_path}: no causal LM with a tokenizer could be loaded: {reason}"
        ) from error
