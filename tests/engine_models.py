"""Tiny random models with a byte tokenizer, and the oracle: a plain forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama import LlamaConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config

from offbeat.records import Completion, Manifest, PolicyVersion, TensorEntry

KINDS = ("llama", "llama-tied", "qwen2", "qwen3-tied")
EOS = 0


def make_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Bytes and a few merged pairs, so that one text has several encodings."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("c", "d"), ("ab", "cd")]
    words = ["</s>", *letters, *("".join(pair) for pair in merges)]
    bpe = models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges)
    core = Tokenizer(bpe)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    tokenizer.save_pretrained(path)
    return tokenizer


def make_model(path: Path, kind: str = "llama", seed: int = 0, **more: Any) -> Path:
    """A random model directory whose distributions are neither flat nor certain."""
    make_tokenizer(path)
    family, _, tied = kind.partition("-")
    config_class = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[family]
    sizes = dict(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=bool(tied),
        eos_token_id=EOS,
    )
    if family == "qwen3":
        sizes["head_dim"] = 16
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_class(**(sizes | more)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.mul_(6.0 if "embed" not in name and "head" not in name else 10.0)
            elif "norm" in name:
                weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(path)
    return path


def write_version(source: Path, path: Path, step: int, seed: int, scale: float = 0.3) -> Manifest:
    """Weights of `source` with noise, published as a file and a manifest."""
    model = AutoModelForCausalLM.from_pretrained(source)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(noise * scale * weight.std().nan_to_num(0.1))
    tensors = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    tied = {}
    if model.config.tie_word_embeddings:
        tied = {"lm_head.weight": "model.embed_tokens.weight"}
    save_file(tensors, path)
    entries = {name: TensorEntry("float32", tuple(w.shape), 0) for name, w in tensors.items()}
    return Manifest(PolicyVersion(0, step), "full", str(path), entries, tied=tied)


def read_version(manifest: Manifest) -> Mapping[str, torch.Tensor]:
    """What weights/sync.py does, without checksums."""
    return load_file(manifest.path)


def load_oracle(source: Path, manifest: Manifest | None = None) -> Any:
    """The stock model, with a version's weights if one is given."""
    model = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
    if manifest is not None:
        model.load_state_dict(load_file(manifest.path), strict=False)
    return model


@torch.no_grad()
def teacher_forced(model: Any, prompt: Any, tokens: Any, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs (T, V) of the distributions before each of `tokens`."""
    ids = torch.tensor([[*map(int, prompt), *map(int, tokens)]])
    logits = model(ids, use_cache=False).logits[0].float()
    return torch.log_softmax(logits[len(prompt) - 1 : -1] / (temperature or 1.0), -1)


def check_completion(
    model: Any, prompt: Any, completion: Completion, temperature: float, atol: float = 1e-4
) -> None:
    """Recorded log-probs equal a plain pass's; greedy tokens are its likeliest ones."""
    payload = completion.ref
    assert len(payload.token_ids) == len(payload.logprobs) == completion.tokens
    expected = teacher_forced(model, prompt, payload.token_ids, temperature)
    ids = torch.from_numpy(payload.token_ids.astype(np.int64))
    chosen = expected.gather(1, ids[:, None])[:, 0]
    np.testing.assert_allclose(payload.logprobs, chosen.numpy(), atol=atol, rtol=0)
    if temperature == 0:
        assert (expected.max(-1).values - chosen < 1e-4).all()
