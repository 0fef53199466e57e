"""Length budgets: a file stays under about 400 lines, a function under about 60."""

import ast
import sys
from pathlib import Path

FILE_LINES = 400
FUNCTION_LINES = 60


def over_budget(path: Path) -> list[str]:
    """What in `path` is too long, one line of text each."""
    text = path.read_text(encoding="utf-8")
    found = []
    lines = text.count("\n")
    if lines > FILE_LINES:
        found.append(f"{path}: {lines} lines, the budget is {FILE_LINES}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                found.append(f"{path}:{node.lineno} {node.name}: {length} lines")
    return found


def main() -> int:
    """0 when everything is within budget, else 1."""
    root = Path(__file__).parent.parent
    paths = [p for part in ("src", "examples", "benchmarks") for p in (root / part).rglob("*.py")]
    found = [line for path in sorted(paths) for line in over_budget(path)]
    sys.stderr.write("".join(f"{line}\n" for line in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
