"""Generation speed: the engine against `model.generate`, one thread, a random 3.4 M-parameter Llama.

    python benchmarks/engine.py [--rounds 5]

(a) 64 requests of 64 tokens each, the case that a static batch likes best: at least 0.9 times
    generate's speed. (b) 256 requests of 8 to 128 tokens through 64 seats, against generate in
    batches of 64 that each run to their longest: at least 1.5 times the useful tokens a second.
The two are interleaved and the medians compared, as other work on the machine makes single
rounds meaningless. Prints a table and a JSON line; exit code 1 if a ratio is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
from transformers import PreTrainedTokenizerFast

from offbeat.records import GenerateRequest, Sampling
from offbeat.rollout.transformers_engine import TransformersEngine

SEATS = 64
FIXED = 64
SHORTEST, LONGEST = 8, 128
REQUESTS = 256
NEEDED = {"fixed": 0.9, "mixed": 1.5}


def write_model(path: str) -> int:
    """A Llama of 3.4 M parameters whose answers never end by themselves; returns its size."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(path)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)
    return sum(weight.numel() for weight in model.parameters())


def make_work(seed: int = 0) -> tuple[list[np.ndarray], list[int]]:
    """Prompts of 8 to 24 tokens and the fixed list of answer lengths."""
    random = np.random.default_rng(seed)
    sizes = random.integers(8, 25, REQUESTS)
    prompts = [random.integers(0, 256, size).astype(np.int32) for size in sizes]
    return prompts, random.integers(SHORTEST, LONGEST + 1, REQUESTS).tolist()


@torch.inference_mode()
def run_generate(model: Any, prompts: list[np.ndarray], lengths: list[int]) -> float:
    """Useful tokens a second of left-padded batches, each run to its longest answer."""
    begun = time.perf_counter()
    for start in range(0, len(prompts), SEATS):
        part = prompts[start : start + SEATS]
        width = max(map(len, part))
        ids = torch.zeros((len(part), width), dtype=torch.long)
        mask = torch.zeros((len(part), width), dtype=torch.long)
        for row, prompt in enumerate(part):
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[row, width - len(prompt) :] = 1
        longest = max(lengths[start : start + SEATS])
        settings = GenerationConfig(
            max_new_tokens=longest, do_sample=True, temperature=1.0, top_k=0, pad_token_id=0
        )
        found = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
        assert found.shape == (len(part), width + longest)
    return sum(lengths) / (time.perf_counter() - begun)


async def run_engine(
    engine: TransformersEngine, prompts: list[np.ndarray], lengths: list[int]
) -> float:
    """Tokens a second of as many single requests, all sent at once."""

    async def one(i: int) -> int:
        request = GenerateRequest(str(i), prompts[i], 1, Sampling(lengths[i]))
        return sum([completion.tokens async for completion in engine.generate(request)])

    begun = time.perf_counter()
    tokens = sum(await asyncio.gather(*(one(i) for i in range(len(prompts)))))
    assert tokens == sum(lengths)
    return tokens / (time.perf_counter() - begun)


async def compare(rounds: int) -> dict[str, dict[str, float]]:
    """Medians of interleaved rounds after one to warm up."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as path:
        size = write_model(path)
        sys.stdout.write(f"{size / 1e6:.2f} M parameters, 1 thread, torch {torch.__version__}\n")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        engine = TransformersEngine(
            str(Path(path)), seats=SEATS, max_context=256, load_manifest=lambda _: {}
        )
        await engine.start()
        prompts, mixed = make_work()
        cases = {"fixed": (prompts[:SEATS], [FIXED] * SEATS), "mixed": (prompts, mixed)}
        speeds: dict[str, dict[str, list[float]]] = {}
        for number in range(rounds + 1):
            for name, (part, lengths) in cases.items():
                pair = {
                    "generate": run_generate(model, part, lengths),
                    "engine": await run_engine(engine, part, lengths),
                }
                if number:
                    for side, speed in pair.items():
                        speeds.setdefault(name, {}).setdefault(side, []).append(speed)
        await engine.stop()
    return {name: _median(sides) for name, sides in speeds.items()}


def _median(sides: dict[str, list[float]]) -> dict[str, float]:
    ratios = [a / b for a, b in zip(sides["engine"], sides["generate"], strict=True)]
    median: Callable[[list[float]], float] = statistics.median
    return {side: median(found) for side, found in sides.items()} | {"ratio": median(ratios)}


def main() -> int:
    """Prints the table; 0 if both ratios are reached."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    results = asyncio.run(compare(parser.parse_args().rounds))
    sys.stdout.write(
        f"{'case':8}{'generate tok/s':>16}{'engine tok/s':>14}{'ratio':>8}{'needed':>8}\n"
    )
    for name, found in results.items():
        sys.stdout.write(
            f"{name:8}{found['generate']:16.0f}{found['engine']:14.0f}{found['ratio']:8.2f}"
            f"{NEEDED[name]:8.1f}\n"
        )
    sys.stdout.write(json.dumps({"benchmark": "engine", "cases": results}) + "\n")
    return 0 if all(found["ratio"] >= NEEDED[name] for name, found in results.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
