"""Writes the data of this folder from GSM8K's own files (openai/grade-school-math, MIT licence).

    python examples/gsm8k/make_data.py FOLDER [--out examples/gsm8k/data]

FOLDER holds `test.jsonl` (question, answer) or `train.jsonl` as well, and the models' solutions,
`model_solutions.jsonl` or `example_model_solutions.jsonl`. Nothing is downloaded. Written are

- `answers.jsonl`: every model's solution to every problem, a row each, with its label `is_correct`:
  what `offbeat score` tries reward sources on;
- `train.jsonl` and `validation.jsonl`: prompts to train on, from `train.jsonl` and `test.jsonl`,
  or both from `test.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
INSTRUCTION = "Reason step by step. End with a line #### and the final number."
SOLUTIONS = ("model_solutions.jsonl", "example_model_solutions.jsonl")
VALIDATION_ROWS = 256

Row = dict[str, Any]


def prompt(question: str, reference: str) -> Row:
    """The columns of [data]. The reference is the worked solution; its last line has the number."""
    content = f"{question}\n{INSTRUCTION}"
    return {
        "prompt": [{"role": "user", "content": content}],
        "question": question,
        "reference": reference,
        "data_source": "openai/gsm8k",
    }


def problems(path: Path) -> list[Row]:
    """The prompts of one of GSM8K's files."""
    return [prompt(row["question"], row["answer"]) for row in read(path)]


def answers(path: Path) -> Iterator[Row]:
    """A row for each model's solution of each problem, those of one problem on end."""
    for row in read(path):
        for name, found in row.items():
            if isinstance(found, dict):
                yield prompt(row["question"], row["ground_truth"]) | {
                    "completion": found["solution"],
                    "model": name,
                    "is_correct": found["is_correct"],
                }


def read(path: Path) -> Iterator[Row]:
    """The rows of a JSONL file."""
    with path.open(encoding="utf-8") as file:
        yield from (json.loads(line) for line in file if line.strip())


def write(path: Path, rows: Iterable[Row]) -> None:
    """Writes a JSONL file and says how many rows it has."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{path}: {len(lines)} rows")


def main(arguments: list[str] | None = None) -> int:
    """Returns 0, or 2 where the folder lacks the files."""
    parser = argparse.ArgumentParser(description="Write this folder's data from GSM8K's files.")
    parser.add_argument("folder", type=Path, help="folder with GSM8K's files")
    parser.add_argument("--out", type=Path, default=HERE / "data", help="default: data, here")
    options = parser.parse_args(arguments)
    test, train = options.folder / "test.jsonl", options.folder / "train.jsonl"
    solutions = [options.folder / name for name in SOLUTIONS]
    there = next((path for path in solutions if path.is_file()), None)
    if there is None or not test.is_file():
        parser.exit(2, f"{options.folder} has no test.jsonl, or none of {', '.join(SOLUTIONS)}\n")
    options.out.mkdir(parents=True, exist_ok=True)
    write(options.out / "answers.jsonl", answers(there))
    held_out = problems(test)
    rows = problems(train) if train.is_file() else held_out[VALIDATION_ROWS:]
    write(options.out / "train.jsonl", rows)
    write(options.out / "validation.jsonl", held_out[:VALIDATION_ROWS])
    return 0


if __name__ == "__main__":
    sys.exit(main())
