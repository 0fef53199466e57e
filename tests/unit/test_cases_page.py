"""docs/cases.md names tests that exist, and every case has one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")


def test_every_named_test_exists() -> None:
    names = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(names) > 50
    for path, name in sorted(set(names)):
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in found, f"{path} has no {name}"


def test_every_case_has_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if re.match(r"\| [GTJDW]\d:", line)]
    assert len(rows) == 5 + 7 + 8 + 5 + 8
    assert [row for row in rows if "::" not in row.split("|")[-2]] == []
