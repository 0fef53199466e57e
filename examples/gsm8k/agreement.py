"""How often a reward source agrees with known labels, on a file that `offbeat score` wrote.

    python examples/gsm8k/agreement.py examples/gsm8k/data/answers.scored.jsonl exact

Prints a line for each model: rows, agreement, right answers called wrong, wrong ones called right,
rows without a value. A value of at least --threshold calls an answer right.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def counts(
    rows: Iterable[Mapping[str, Any]], source: str, label: str, by: str, threshold: float
) -> dict[str, Counter[str]]:
    """By the values of column `by`: agree, missed, false and none, of all rows."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        outcome = row["rewards"][source]
        value = None if outcome is None else outcome["value"]
        if value is None:
            kind = "none"
        elif (value >= threshold) == row[label]:
            kind = "agree"
        else:
            kind = "missed" if row[label] else "false"
        found[str(row.get(by))][kind] += 1
    return dict(found)


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns 0."""
    parser = argparse.ArgumentParser(description="Agreement of a reward source with labels.")
    parser.add_argument("file", type=Path, help="JSONL that `offbeat score` wrote")
    parser.add_argument("source", help="name of the reward source")
    parser.add_argument("--label", default="is_correct", help="column with true or false")
    parser.add_argument("--by", default="model", help="column to tell apart")
    parser.add_argument("--threshold", type=float, default=0.5)
    options = parser.parse_args(arguments)
    with options.file.open(encoding="utf-8") as file:
        rows = (json.loads(line) for line in file)
        found = counts(rows, options.source, options.label, options.by, options.threshold)
    for name, kinds in {**found, "all": sum(found.values(), Counter())}.items():
        total = kinds.total()
        print(
            f"{name:20} {total:6} rows  {kinds['agree'] / max(total, 1):7.2%} agree  "
            f"{kinds['missed']:4} missed  {kinds['false']:4} false  {kinds['none']:4} without"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
