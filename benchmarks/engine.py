"""Generation speed: the engine against `model.generate`, one thread, a random 3.4 M Llama.

    python benchmarks/engine.py [--rounds 3]

(a) 64 requests of 64 tokens each, the case that a static batch likes best: at least 0.9 times
    generate's speed. (b) 256 requests of 8 to 128 tokens through 64 seats, against generate in
    batches of 64 that each run to their longest: at least 1.5 times the useful tokens a second.
Rounds are interleaved and medians compared. Speeds are per CPU second of the process (both sides
use one thread), as other work on a shared machine makes wall times of single rounds meaningless;
wall figures stand beside them. Prints a table and a JSON line; exit code 1 if a ratio is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from offbeat.records import GenerateRequest, Sampling
from offbeat.rollout.transformers_engine import TransformersEngine

SEATS = 64
FIXED = 64
SHORTEST, LONGEST = 8, 128
REQUESTS = 256
NEEDED = {"fixed": 0.9, "mixed": 1.5}


class Speed(NamedTuple):
    """Tokens a CPU second and a second."""

    cpu: float
    wall: float


class Clock:
    """Runs from its making on."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def speed(self, tokens: int) -> Speed:
        """Tokens over the time since then."""
        cpu, wall = time.process_time() - self._cpu, time.perf_counter() - self._wall
        return Speed(tokens / cpu, tokens / wall)


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
def run_generate(model: Any, prompts: list[np.ndarray], lengths: list[int]) -> Speed:
    """Useful tokens a second of left-padded batches, each run to its longest answer."""
    begun = Clock()
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
    return begun.speed(sum(lengths))


async def run_engine(
    engine: TransformersEngine, prompts: list[np.ndarray], lengths: list[int]
) -> Speed:
    """Tokens a second of as many single requests, all sent at once."""

    async def one(i: int) -> int:
        request = GenerateRequest(str(i), prompts[i], 1, Sampling(lengths[i]))
        return sum([completion.tokens async for completion in engine.generate(request)])

    begun = Clock()
    tokens = sum(await asyncio.gather(*(one(i) for i in range(len(prompts)))))
    assert tokens == sum(lengths)
    return begun.speed(tokens)


async def compare(rounds: int) -> dict[str, dict[str, float]]:
    """Medians of interleaved rounds after one to warm up."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as path:
        size = write_model(path)
        sys.stdout.write(f"{size / 1e6:.2f} M parameters, 1 thread, torch {torch.__version__}\n")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        engine = TransformersEngine(path, seats=SEATS, max_context=256, load_manifest=lambda _: {})
        await engine.start()
        prompts, mixed = make_work()
        cases = {"fixed": (prompts[:SEATS], [FIXED] * SEATS), "mixed": (prompts, mixed)}
        speeds: dict[str, list[tuple[Speed, Speed]]] = {name: [] for name in cases}
        for number in range(rounds + 1):
            for name, (part, lengths) in cases.items():
                # The first round only warms up, and is short.
                part, lengths = (part, lengths) if number else (part[:8], lengths[:8])
                pair = run_generate(model, part, lengths), await run_engine(engine, part, lengths)
                if number:
                    speeds[name].append(pair)
        await engine.stop()
    return {name: _medians(pairs) for name, pairs in speeds.items()}


def _medians(pairs: list[tuple[Speed, Speed]]) -> dict[str, float]:
    found = {}
    for kind in Speed._fields:
        stock = [getattr(pair[0], kind) for pair in pairs]
        ours = [getattr(pair[1], kind) for pair in pairs]
        found[f"generate_{kind}"] = statistics.median(stock)
        found[f"engine_{kind}"] = statistics.median(ours)
        ratios = [a / b for a, b in zip(ours, stock, strict=True)]
        found[f"ratio_{kind}"] = statistics.median(ratios)
    return found


def main() -> int:
    """Prints the table; 0 if both ratios are reached."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    results = asyncio.run(compare(parser.parse_args().rounds))
    out = sys.stdout.write
    out("tokens a second    generate  engine  ratio  needed\n")
    for name, found in results.items():
        for kind, needed in (("cpu", f"{NEEDED[name]:8.1f}"), ("wall", "")):
            out(f"{name:8}{kind:>7}{found[f'generate_{kind}']:12.0f}")
            out(f"{found[f'engine_{kind}']:8.0f}{found[f'ratio_{kind}']:7.2f}{needed}\n")
    out(json.dumps({"benchmark": "engine", "cases": results}) + "\n")
    return 0 if all(found["ratio_cpu"] >= NEEDED[name] for name, found in results.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
