"""Writes train.jsonl and validation.jsonl for the configurations of this folder.

    python examples/gpu/make_data.py                       problems made from a seed
    python examples/gpu/make_data.py --gsm8k DIR           GSM8K's own train.jsonl and test.jsonl

A row has `prompt` (a chat of one user turn), `question` (what the judge is shown), `reference` (the
final number) and `solution` (the worked steps). Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from problems import problems  # noqa: E402
from rewards import MARK, final_number  # noqa: E402

INSTRUCTION = "Reason step by step. End with a line #### and the final number."
Row = dict[str, Any]


def row(question: str, solution: str) -> Row:
    """A row from a question and GSM8K's form of an answer; ValueError without a final number."""
    number = final_number(solution) if MARK in solution else None
    if number is None:
        raise ValueError(f'has no "{MARK} number" in its answer')
    content = f"{question}\n{INSTRUCTION}"
    return {
        "prompt": [{"role": "user", "content": content}],
        "question": question,
        "reference": str(number) if number.denominator == 1 else repr(float(number)),
        "solution": solution,
    }


def generated(seed: int, train: int, validation: int) -> tuple[list[Row], list[Row]]:
    """Rows of both splits; no question is in both."""
    made = [row(p.question, p.steps) for p in islice(problems(seed), train + validation)]
    return made[:train], made[train:]


def gsm8k(path: Path) -> Iterator[Row]:
    """The rows of one of GSM8K's files: a question and an answer a line."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                read = json.loads(line)
                yield row(read["question"].strip(), read["answer"])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                said = f"has no {error}" if isinstance(error, KeyError) else str(error)
                raise SystemExit(f"{path} line {number}: {said}") from None


def write(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{path}: {len(rows)} rows\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gsm8k", type=Path, help="folder with GSM8K's train.jsonl, test.jsonl")
    parser.add_argument("--out", type=Path, default=HERE / "data", help="folder to write to")
    parser.add_argument("--train", type=int, default=4000, help="training rows to make")
    parser.add_argument("--validation", type=int, default=256, help="held-out rows to make")
    parser.add_argument("--seed", type=int, default=0, help="of the problems that are made")
    options = parser.parse_args(arguments)
    if options.gsm8k is None:
        train, held_out = generated(options.seed, options.train, options.validation)
    else:
        files = [options.gsm8k / name for name in ("train.jsonl", "test.jsonl")]
        for file in files:
            if not file.is_file():
                raise SystemExit(f"{file} does not exist; --gsm8k takes the folder that holds it")
        train, held_out = (list(gsm8k(file)) for file in files)
    write(options.out / "train.jsonl", train)
    write(options.out / "validation.jsonl", held_out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
