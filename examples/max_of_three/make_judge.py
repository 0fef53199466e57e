"""Make the judge (GenRM): a small Llama from scratch that writes a grade and stops.

It reads `judge.jinja` and generates `10` for exactly the right answer and `1` for all
else. There is no half-credit: a policy collects whatever a judge pays for, and a wrong
number that is paid for is a wrong number that is learned.

The tokenizer knows bytes, the template's words and the numbers 10 to 99, so it reads
any answer. Besides the grade, training asks for the largest number at the question's
closing bracket: the model learns to find it first and then to compare.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import task
import torch
from progress import report
from texts import judge_text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HIGH, LOW = "10", "1"
STEPS = 600
QUESTIONS = 32
ANSWERS = 4
LEARNING_RATE = 2e-3
WORDS = (
    "Grade", "Ġthe", "Ġanswer", "max", "Ġ(", "unfinished",
)  # fmt: skip


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose merges are written down, not trained."""
    vocabulary = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    for word in [*map(str, range(10, 100)), *WORDS]:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    model = models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        model_max_length=512,
        padding_side="left",
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of about a million parameters with random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    numbers = torch.arange(100.0)
    waves = [numbers.sub(49.5).div(100)]
    for length in (10, 20, 40, 80, 160):
        waves += [f(numbers * (2 * torch.pi / length)) for f in (torch.sin, torch.cos)]
    size = torch.stack(waves, 1)
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        ids = torch.tensor([tokenizer.encode(str(n))[0] for n in range(100)])
        table[ids, : size.shape[1]] = size * 0.1
        model.lm_head.weight.copy_(table)
    return model


@dataclass
class Batch:
    """Questions with several answers each: an answer sees its question and itself."""

    inputs: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor


def pack(
    tokenizer: PreTrainedTokenizerFast, problems: list[task.Triple], rng: random.Random
) -> Batch:
    """Write each question once and its answers behind it, each as if it stood alone."""
    id_of, answers, grades = tokenizer.get_vocab(), [], []
    for triple in problems:
        right = [True] * rng.choice((1, 2)) + [False] * ANSWERS
        for is_right in rng.sample(right[:ANSWERS], ANSWERS):
            make = task.right_completion if is_right else task.wrong_completion
            answers.append(judge_text(task.question(triple), make(rng, triple)))
            grades.append(id_of[HIGH if is_right else LOW])
    ids = tokenizer(answers)["input_ids"]
    rows = []
    for row, triple in enumerate(problems):
        first = row * ANSWERS
        head = ids[first].index(id_of[")"]) + 2
        tokens = ids[first][:head]
        labels = [-100] * head
        labels[head - 2] = id_of[str(max(triple))]
        positions, parts = list(range(head)), [0] * head
        for part in range(ANSWERS):
            tail = [*ids[first + part][head:], grades[first + part]]
            tokens += tail
            labels += [-100] * (len(tail) - 2) + [grades[first + part], tokenizer.eos_token_id]
            positions += range(head, head + len(tail))
            parts += [part + 1] * len(tail)
        rows.append((tokens, labels, positions, parts))
    pads = (tokenizer.pad_token_id, -100, 0, -1)
    inputs, wanted, places, parts_of = (
        pad_sequence([torch.tensor(row[i]) for row in rows], True, pads[i]) for i in range(4)
    )
    same = parts_of[:, :, None] == parts_of[:, None, :]
    mask = (same | (parts_of == 0)[:, None, :]).tril()
    return Batch(inputs, wanted, places, mask[:, None])


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int) -> None:
    """Fit the labels with AdamW and a rate that falls to zero."""
    rng = random.Random(7)
    without = {*task.held_out(), *task.WORKED}
    stream = (t for t in task.triples(7, close=0.3) if t not in without)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps + 1, pct_start=0.1, div_factor=10
    )
    model.train()
    for step in range(1, steps + 1):
        batch = pack(tokenizer, list(islice(stream, QUESTIONS)), rng)
        hidden = model.model(
            input_ids=batch.inputs,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
        wanted = batch.labels != -100
        loss = torch.nn.functional.cross_entropy(
            model.lm_head(hidden[wanted]), batch.labels[wanted]
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == steps:
            report(step / steps, f"step {step}/{steps}, loss {loss.item():.3f}")


def main(out: Path, steps: int = STEPS) -> None:
    """Train a judge and save it with its tokenizer in a directory."""
    torch.manual_seed(7)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    train(model, tokenizer, steps)
    model.generation_config.do_sample = False
    model.generation_config.max_new_tokens = 4
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    began = time.monotonic()
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    report(1.0, f"done in {time.monotonic() - began:.0f} s")
