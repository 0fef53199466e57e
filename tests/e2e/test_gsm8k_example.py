"""examples/gsm8k: its data is made, its sources are tried on answers, and agree with their labels.

On a few rows made here; with OFFBEAT_GSM8K, a folder with GSM8K's own files, on all of them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from offbeat.cli import main
from offbeat.config_file import load_config

FOLDER = Path(__file__).parents[2] / "examples" / "gsm8k"
GSM8K = os.environ.get("OFFBEAT_GSM8K")


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gsm8k_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def little(tmp_path: Path) -> Path:
    """GSM8K's files with three problems, each solved once right and once wrong."""
    (tmp_path / "gsm8k").mkdir()
    problems, solutions = [], []
    for number, wrong in ((1600, "A: 1,601"), (18, "so 3 * 6 = 17\nA: 17"), (5, "5 is too few: 6")):
        question = f"How many are {number}?"
        problems.append({"question": question, "answer": f"It is so.\n#### {number:,}"})
        solutions.append(
            {
                "question": question,
                "ground_truth": f"It is so.\nA: {number:,}",
                "small": {"solution": wrong, "is_correct": False},
                "large": {"solution": f"2 + 3\nA: ${number}.00", "is_correct": True},
            }
        )
    for name, rows in (("test", problems), ("model_solutions", solutions)):
        path = tmp_path / "gsm8k" / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "gsm8k"


def scored(source: Path, out: Path, names: str) -> list[dict[str, Any]]:
    assert module("make_data").main([str(source), "--out", str(out)]) == 0
    command = ["score", str(FOLDER / "run.toml"), str(out / "answers.jsonl"), "--sources", names]
    assert main([*command, "-o", str(out / "scored.jsonl")]) == 0
    return [json.loads(line) for line in (out / "scored.jsonl").read_text("utf-8").splitlines()]


def agreement(out: Path, source: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, float]:
    """Rows of all models, and the share that agrees with the labels."""
    capsys.readouterr()
    assert module("agreement").main([str(out / "scored.jsonl"), source]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    found = re.fullmatch(r"all +(\d+) rows +([\d.]+)% agree .*", last)
    assert found is not None, last
    return int(found[1]), float(found[2]) / 100


def test_its_functions_of_every_style_score_its_answers(
    little: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "data"
    rows = scored(little, out, "exact,math,verl,steps,form,length")
    assert len(rows) == 6
    outcomes = [row["rewards"] for row in rows]
    assert {o["length"]["status"] for o in outcomes} == {"abstained"}, "tokens are not counted"
    others = [o[name] for o in outcomes for name in ("exact", "math", "verl", "steps", "form")]
    assert {outcome["status"] for outcome in others} == {"scored"}
    assert json.loads(outcomes[1]["verl"]["raw"]) == {"score": 0.0, "found": "1600.00"}
    for name in ("exact", "math"):
        assert agreement(out, name, capsys) == (6, 1.0)
    assert json.loads((out / "validation.jsonl").read_text().splitlines()[0])["reference"]


def test_its_configuration_is_one_and_the_page_names_its_files() -> None:
    config = load_config(FOLDER / "run.toml", files=False)
    assert list(config.active_rewards) == ["exact", "length"]
    page = (FOLDER / "README.md").read_text("utf-8")
    for path in {*FOLDER.glob("*.py"), *FOLDER.glob("*.toml")}:
        assert path.name in page
    for name in config.reward:
        assert f"`{name}`" in page


def test_a_folder_without_the_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        module("make_data").main([str(tmp_path), "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(GSM8K is None, reason="OFFBEAT_GSM8K names no folder with GSM8K's files")
def test_agreement_with_all_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = scored(Path(str(GSM8K)), tmp_path, "exact,math")
    assert all(row["reward"] is not None for row in rows)
    for name in ("exact", "math"):
        count, share = agreement(tmp_path, name, capsys)
        assert count == 2400
        assert share >= 0.99
