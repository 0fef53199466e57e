"""Measure judge and scorer before a policy is trained on them, and write report.json.

Two sets of answers: made ones of every kind, and the actor's own at temperature 1 on
held-out problems. A reward that pays for the actor's wrong answers will be exploited, so
the shares that matter are those of high grades given right and given wrong answers.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import task
import torch
from evaluate import complete, load
from progress import report
from texts import judge_text, scorer_text
from transformers import AutoModelForSequenceClassification, AutoTokenizer

PROBLEMS = 128
SAMPLES = 2
MADE = 2
Answer = tuple[task.Triple, str]


def made_answers() -> list[Answer]:
    """Right and wrong answers of every kind, half each, to the held-out problems."""
    rng = random.Random(5)
    makers = (task.right_completion, task.wrong_completion)
    return [(t, make(rng, t)) for t in task.held_out() * MADE for make in makers]


def actor_answers(folder: Path) -> list[Answer]:
    """What the actor samples at temperature 1."""
    model, tokenizer = load(str(folder))
    problems = [t for t in task.held_out(PROBLEMS) for _ in range(SAMPLES)]
    texts = complete(model, tokenizer, [task.prompt(t) for t in problems], temperature=1.0)
    return list(zip(problems, texts, strict=True))


@torch.inference_mode()
def judge_grades(folder: Path, answers: Sequence[Answer]) -> tuple[list[str], float]:
    """The judge's verdicts, and how many it gave a second."""
    model, tokenizer = load(str(folder), "float32")
    texts = [judge_text(task.question(t), completion) for t, completion in answers]
    began, verdicts = time.monotonic(), []
    for start in range(0, len(texts), 64):
        batch = tokenizer(texts[start : start + 64], padding=True, return_tensors="pt")
        made = model.generate(**batch, do_sample=False, max_new_tokens=4)
        made = made[:, batch["input_ids"].shape[1] :]
        verdicts += tokenizer.batch_decode(made, skip_special_tokens=True)
    return verdicts, len(texts) / (time.monotonic() - began)


@torch.inference_mode()
def scorer_scores(folder: Path, answers: Sequence[Answer]) -> tuple[list[float], float]:
    """The scorer's numbers, and how many it gave a second."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    texts = [scorer_text(task.question(t), completion) for t, completion in answers]
    began, scores = time.monotonic(), []
    for start in range(0, len(texts), 64):
        batch = tokenizer(texts[start : start + 64], padding=True, return_tensors="pt")
        scores += model(**batch).logits[:, 0].tolist()
    return scores, len(texts) / (time.monotonic() - began)


def share(wins: Sequence[bool | float]) -> float | None:
    """The mean of some outcomes, rounded; None of nothing."""
    return round(sum(wins) / len(wins), 4) if wins else None


def preferred(values: Sequence[float], right: Sequence[bool]) -> float | None:
    """In which share of all pairs a right answer's value is above a wrong one's; ties half."""
    high = [v for v, r in zip(values, right, strict=True) if r]
    low = [v for v, r in zip(values, right, strict=True) if not r]
    return share([1.0 if a > b else 0.5 if a == b else 0.0 for a in high for b in low])


def judge_report(verdicts: Sequence[str], right: Sequence[bool]) -> dict[str, float | None]:
    """How often the grade is exactly the wanted one, parses, and is high for right and wrong."""
    pairs = list(zip(verdicts, right, strict=True))
    grades = [float(v) if v.isdigit() and 1 <= int(v) <= 10 else 1.0 for v in verdicts]
    return {
        "parsed": share([v.isdigit() and 1 <= int(v) <= 10 for v in verdicts]),
        "exact_grade": share([v == ("10" if r else "1") for v, r in pairs]),
        "high_given_right": share([v == "10" for v, r in pairs if r]),
        "high_given_wrong": share([v == "10" for v, r in pairs if not r]),
        "right_preferred": preferred(grades, right),
    }


def scorer_report(scores: Sequence[float], right: Sequence[bool]) -> dict[str, float | None]:
    """How the scores of right and wrong answers compare, over all pairs and within pairs."""
    pairs = list(zip(scores, right, strict=True))
    return {
        "right_preferred": preferred(scores, right),
        "mean_right": share([s for s, r in pairs if r]),
        "mean_wrong": share([s for s, r in pairs if not r]),
    }


def main(cache: Path) -> None:
    """Measure what lies in the cache and write the report there."""
    report(0.0, "sampling the actor")
    sets = {"made": made_answers(), "actor_at_temperature_1": actor_answers(cache / "actor")}
    result: dict[str, object] = {}
    for name, answers in sets.items():
        report(0.8, f"judging: {name}")
        right = [task.is_right(completion, str(max(t))) for t, completion in answers]
        verdicts, judged = judge_grades(cache / "judge", answers)
        scores, scored = scorer_scores(cache / "scorer", answers)
        judge, scorer = judge_report(verdicts, right), scorer_report(scores, right)
        if name == "made":
            scorer["same_question_pairs"] = share(
                [a > b for a, b in zip(scores[::2], scores[1::2], strict=True)]
            )
        result[name] = {
            "answers": len(answers),
            "right": share(right),
            "judge": {**judge, "a_second": round(judged)},
            "scorer": {**scorer, "a_second": round(scored)},
        }
    making = cache / ".report.making"
    making.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    making.replace(cache / "report.json")
    report(1.0, "done")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
