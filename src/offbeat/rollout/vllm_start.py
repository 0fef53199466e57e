"""Starts vLLM: from an engine's settings to its processes, and what the engine must know of them.

That blocks for as long as vLLM takes (15-60 s), so it runs on a thread.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from offbeat.errors import RunFailed, UserError
from offbeat.records import Manifest, TensorEntry
from offbeat.rollout.vllm_args import (
    INSTALL,
    PLUGIN,
    check_engine_args,
    device_args,
    engine_seed,
    require_vllm,
    set_environment,
)
from offbeat.rollout.vllm_spans import StepLogger, StepMeter
from offbeat.train.model import resolve_dtype
from offbeat.weights.packed import dtype_name

# Buffers that old files hold; neither transformers nor vLLM reads them.
NOT_READ = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
# vLLM's workers on the CPU do not end by themselves; there is nothing to save in them.
STOP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Started:
    """A running vLLM. `shapes` are those of the tensors in the model's directory, if known."""

    llm: Any
    context: int
    vocabulary: int
    eos: int | None
    decode: Callable[[Sequence[int]], str]
    shapes: Mapping[str, tuple[int, ...]]

    def check(self, manifest: Manifest) -> None:
        """Refuses weights that are not this model's, before any is touched."""
        for name, shape in self.shapes.items():
            entry = _entry(manifest, name)
            if entry is None:
                raise RunFailed(f"version {manifest.version} in {manifest.path} lacks {name}")
            if tuple(entry.shape) != shape:
                raise RunFailed(
                    f"version {manifest.version}: {name} has shape {tuple(entry.shape)}, "
                    f"the engine's {shape}"
                )


async def start_on_thread(**settings: Any) -> Started:
    """`start_vllm` beside the loop. Whoever gives up waiting finds nothing of vLLM's left, neither
    started nor starting: another may take its devices."""
    starting = asyncio.ensure_future(asyncio.to_thread(start_vllm, **settings))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.shield(asyncio.create_task(_give_up(starting)))
        raise


async def _give_up(starting: asyncio.Future[Started]) -> None:
    await asyncio.wait([starting])
    if not starting.cancelled() and starting.exception() is None:
        await asyncio.to_thread(starting.result().llm.shutdown, STOP_SECONDS)


def start_vllm(
    *,
    meter: StepMeter,
    model_path: str,
    tokenizer_path: str | None,
    role: str,
    replica: int,
    seats: int,
    max_context: int,
    seed: int,
    dtype: str,
    device: str,
    threads: int,
    devices: int,
    memory_share: float,
    engine_args: Mapping[str, Any],
) -> Started:
    """Raises `UserError` for what the user can mend: no vLLM, a model or an argument refused."""
    setting = f"{role.replace('/', '.')}.engine_args"
    require_vllm()
    check_engine_args(setting, engine_args)
    set_environment(device, threads)
    config, tokenizer = _read(model_path, tokenizer_path or model_path)
    if device == "cpu":
        _check_heads(model_path, config)
    context = min(max_context, int(config.max_position_embeddings))
    arguments: dict[str, Any] = {
        "model": model_path,
        "tokenizer": tokenizer_path or model_path,
        "dtype": dtype_name(resolve_dtype(dtype, torch.device(device))),
        "seed": engine_seed(seed, role, replica),
        "max_model_len": context,
        "max_num_seqs": seats,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "weight_transfer_config": {"backend": PLUGIN},
        # A weak judge would fill its verdict with the white space that JSON allows between words.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        "worker_extension_cls": "offbeat.weights.vllm_transfer.Staging",
        # Only our own logger of steps runs, and prints nothing.
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **device_args(device, devices, memory_share),
    }
    llm = _launch(arguments, engine_args, device, setting, meter)
    # generation_config = "vllm" ignores the file's sampling, but not its further stop ids, which
    # would be masked out of structured answers.
    llm.input_processor.generation_config_fields = {}
    end = tokenizer.eos_token_id
    return Started(
        llm=llm,
        context=context,
        vocabulary=int(config.vocab_size),
        eos=None if end is None else int(end),
        decode=partial(_decode, tokenizer),
        shapes=tensor_shapes(Path(model_path)),
    )


def tensor_shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights in a model directory's safetensors files."""
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__" and not name.endswith(NOT_READ):
                found[name] = tuple(entry["shape"])
    return found


def _entry(manifest: Manifest, name: str) -> TensorEntry | None:
    """What is published for a file's tensor, whose name may lack the base model's, as GPT-2's."""
    if (entry := manifest.tensors.get(manifest.tied.get(name, name))) is not None:
        return entry
    longer = [entry for full, entry in manifest.tensors.items() if full.endswith(f".{name}")]
    return longer[0] if len(longer) == 1 else None


def _read(model_path: str, tokenizer_path: str) -> tuple[Any, Any]:
    try:
        config = AutoConfig.from_pretrained(model_path)
        return config.get_text_config(), AutoTokenizer.from_pretrained(tokenizer_path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{model_path}: no causal LM with a tokenizer could be loaded: {_short(error)}"
        ) from error


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Text without special tokens, nothing tidied up."""
    text = tokenizer.decode(
        list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return str(text)


def _check_heads(model_path: str, config: Any) -> None:
    """vLLM's CPU attention crashes at the first token with heads of other sizes."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    known = CPUAttentionBackend.get_supported_head_sizes()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size not in known:
        raise UserError(
            f"{model_path}: vLLM on a CPU computes heads of {known} dimensions and this model's "
            f'have {size}; set engine = "transformers"'
        )


def _launch(
    arguments: dict[str, Any],
    engine_args: Mapping[str, Any],
    device: str,
    setting: str,
    meter: StepMeter,
) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    if current_platform.is_cpu() != (device == "cpu"):
        raise UserError(f"the vLLM that is installed is not for device {device}; {INSTALL}")
    try:
        config = AsyncEngineArgs(**(arguments | dict(engine_args))).create_engine_config()
    except (TypeError, ValueError, NotImplementedError) as error:
        raise UserError(
            f"vLLM refuses {arguments['model']} with {setting} = {dict(engine_args)}: "
            f"{_short(error)}"
        ) from error
    try:
        return AsyncLLM.from_vllm_config(
            config,
            stat_loggers=[lambda config, index=0: StepLogger(meter)],
            disable_log_stats=True,
        )
    except RuntimeError as error:
        raise RunFailed(
            f"vLLM did not start with {arguments['model']}: {_short(error)} Its processes' "
            "messages say why; VLLM_LOGGING_LEVEL=INFO shows more"
        ) from error


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
