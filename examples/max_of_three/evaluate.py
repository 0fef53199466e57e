"""Greedy accuracy of a model directory on the 256 held-out problems.

    python evaluate.py MODEL_DIR        prints {"accuracy": ..., "n": 256, ...}

It stands alone: torch, transformers and the standard library, nothing of Offbeat. All
prompts begin with the same text, so its keys and values are computed once and shared.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

import task
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase


def pick_dtype(name: str) -> torch.dtype:
    """The type to compute in: bfloat16 only where the processor has it."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    fast = torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """How many leading tokens all rows share, leaving each at least one of its own."""
    low, high = min(rows), max(rows)
    same = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return min(same, min(map(len, rows)) - 1)


def expand(prefix: DynamicCache, config: object, rows: int) -> DynamicCache:
    """A fresh cache in which each of some rows holds the shared prefix."""
    cache = DynamicCache(config=config)
    for index, layer in enumerate(prefix.layers):
        keys, values = (x.expand(rows, -1, -1, -1) for x in (layer.keys, layer.values))
        cache.update(keys, values, index)
    return cache


@torch.inference_mode()
def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    temperature: float = 0.0,
    max_tokens: int = task.MAX_TOKENS,
    batch: int = 64,
    seed: int = 0,
) -> list[str]:
    """Continue the prompts up to and with the first newline, greedily or by sampling."""
    ids = tokenizer(list(prompts))["input_ids"]
    shared = common_prefix(ids)
    device = model.device
    prefix = model(torch.tensor([ids[0][:shared]], device=device), use_cache=True).past_key_values
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    texts = [""] * len(ids)
    generator = torch.Generator(device).manual_seed(seed)
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        width = max(len(ids[i]) for i in rows) - shared
        own = torch.zeros(len(rows), width, dtype=torch.long, device=device)
        seen = torch.ones(len(rows), shared + width, dtype=torch.long, device=device)
        for row, i in enumerate(rows):
            tail = ids[i][shared:]
            own[row, width - len(tail) :] = torch.tensor(tail, device=device)
            seen[row, shared : shared + width - len(tail)] = 0
        cache = expand(prefix, model.config, len(rows))
        places = (seen.cumsum(1) - 1).clamp(min=0)[:, shared:]
        made: list[list[int]] = [[] for _ in rows]
        open_rows = set(range(len(rows)))
        for _ in range(max_tokens):
            out = model(
                input_ids=own,
                attention_mask=seen,
                position_ids=places,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logits = out.logits[:, -1].float()
            if temperature > 0:
                chances = torch.softmax(logits / temperature, -1)
                own = torch.multinomial(chances, 1, generator=generator)
            else:
                own = logits.argmax(-1, keepdim=True)
            for row in tuple(open_rows):
                token = int(own[row])
                made[row].append(token)
                if token == tokenizer.eos_token_id or "\n" in tokenizer.decode([token]):
                    open_rows.discard(row)
            if not open_rows:
                break
            seen = torch.cat([seen, seen.new_ones(len(rows), 1)], 1)
            places = places[:, -1:] + 1
        for row, i in enumerate(rows):
            texts[i] = tokenizer.decode(made[row], skip_special_tokens=True)
    return texts


def load(folder: str, dtype: str = "float32") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model directory's model, ready to generate, and its tokenizer."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=pick_dtype(dtype))
    return model.to(device).eval(), AutoTokenizer.from_pretrained(folder)


def main() -> None:
    """Read the command line, complete the held-out problems, print the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a Hugging Face model directory")
    parser.add_argument("--n", type=int, default=task.VALIDATION_ROWS, help="how many problems")
    parser.add_argument(
        "--dtype", default="float32", choices=("auto", "float32", "bfloat16"),
        help="to compute in: that of the run's engines (rollout.dtype) gives the run's number",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=1, help="on a busy machine 1 is fastest")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    began = time.monotonic()
    model, tokenizer = load(args.model, args.dtype)
    problems = task.held_out(args.n)
    texts = complete(model, tokenizer, [task.prompt(t) for t in problems])
    right = sum(task.is_right(c, str(max(t))) for c, t in zip(texts, problems, strict=True))
    seconds = round(time.monotonic() - began, 1)
    result = {"accuracy": right / len(problems), "n": len(problems), "seconds": seconds}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
