"""The demo: makes the models, trains, and says whether the language model really learned.

    python -m examples.max_of_three.demo [--reward all|rule|judge|scorer]
        [--engine transformers|vllm] [--evaluate] [--a.b v ...]

With `--engine vllm` the actor, the judge and the scorer all run on vLLM, each in an engine of its
own; that takes a machine of 24 GB. Anything behind the options goes to `offbeat train` as an
override. Exit code 0 only if true accuracy, measured by an exact checker that is no part of the
reward, rose as far as promised.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCES = {
    "all": "judge,scorer,correct", "rule": "correct", "judge": "judge", "scorer": "scorer",
}  # fmt: skip
RISE = {"all": 0.30, "rule": 0.30, "judge": 0.20, "scorer": 0.20}
MODELS = ("judge", "scorer")
"""The sources that are models, and so have an engine."""


def say(text: str) -> None:
    """A line now, also through a pipe."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def engine_overrides(engine: str, reward: str) -> list[str]:
    """Settings that put the policy, and each model among the active sources, on an engine."""
    active = [name for name in SOURCES[reward].split(",") if name in MODELS]
    sections = ["rollout", *(f"reward.{name}" for name in active)]
    return [part for section in sections for part in (f"--{section}.engine", engine)]


def evaluate(model: Path) -> float:
    """Accuracy of a checkpoint by the stand-alone script, which knows nothing of Offbeat."""
    command = [sys.executable, str(HERE / "evaluate.py"), str(model)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout.strip().splitlines()[-1])["accuracy"])


def report(summary: dict[str, Any], reward: str) -> bool:
    """Prints what the run came to; whether it rose as far as promised."""
    accuracy = [entry["metrics"]["accuracy"] for entry in summary["validation"]]
    rise = accuracy[-1] - accuracy[0]
    say("")
    say("true accuracy on 256 held-out problems: " + " -> ".join(f"{a:.1%}" for a in accuracy))
    for name, source in summary["rewards"].items():
        say(f"mean reward of {name}: {source['mean_first']:.2f} -> {source['mean_last']:.2f}")
    stale, groups, overlap = summary["staleness"], summary["groups"], summary["overlap"]
    say(f"staleness: mean {stale['mean']:.2f}, max {stale['max']}, bound {stale['bound']}")
    say(f"groups: {groups}")
    busy = ", ".join(f"{role} {share:.0%}" for role, share in summary["busy"].items())
    say(f"computing: {busy}")
    say(
        f"while the trainer computed, a decode or score span was open "
        f"{overlap['open_decode_or_score']:.0%} of the time; tokens came in "
        f"{overlap['train_spans_with_tokens']:.0%} of its spans"
    )
    good = rise >= RISE[reward]
    say(f"rise: {100 * rise:+.1f} points, promised {100 * RISE[reward]:+.0f}: "
        f"{'reached' if good else 'NOT reached'}")  # fmt: skip
    return good


def main() -> int:
    """0 if the run finished and accuracy rose as promised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reward", choices=SOURCES, default="all")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--evaluate", action="store_true", help="also evaluate both checkpoints")
    parser.add_argument("--run", default=None, help="the run's name")
    options, overrides = parser.parse_known_args()
    if options.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        say("vLLM is not installed here; install it with: make .venv/.vllm")
        return 2
    began = time.time()
    subprocess.run([sys.executable, str(HERE / "prepare.py")], check=True)
    label = options.reward if options.engine == "transformers" else f"{options.reward}-vllm"
    run = options.run or f"max-of-three-{label}-{time.strftime('%m%d-%H%M%S')}"
    command = [
        sys.executable, "-m", "offbeat", "train", str(HERE / "run.toml"),
        "--run", run, "--use_rewards", SOURCES[options.reward],
        *engine_overrides(options.engine, options.reward), *overrides,
    ]  # fmt: skip
    trained = subprocess.run(command, check=False)
    if trained.returncode != 0:
        return trained.returncode
    run_dir = HERE / "runs" / run
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    good = report(summary, options.reward)
    picture = run_dir / "plot.png"
    subprocess.run(
        [sys.executable, "-m", "offbeat", "plot", str(run_dir), "-o", str(picture)], check=True
    )
    say(f"picture: {picture}; everything else: {run_dir}; {time.time() - began:.0f} s in all")
    if options.evaluate:
        for checkpoint in sorted((run_dir / "checkpoints").iterdir()):
            say(f"evaluate.py {checkpoint.name}: {evaluate(checkpoint):.1%}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
