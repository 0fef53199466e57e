"""Drift between engine and trainer, as it is told: one line when it begins, one when it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

CALM_STEPS = 3
"""Steps on end without a diagnosis that end an episode, so that one at a limit does not chatter."""


class DriftWatch:
    """Turns the steps' diagnoses ("cause: evidence") into the few lines that are worth saying."""

    def __init__(self) -> None:
        self._causes: set[str] = set()  # said in the episode that runs
        self._calm = 0

    def step(self, step: int, diagnosis: str | None) -> str | None:
        """What to say after a step: a cause that is new in its episode, the episode's end."""
        if diagnosis:
            self._calm = 0
            cause = cause_of(diagnosis)
            if cause in self._causes:
                return None
            self._causes.add(cause)
            return f"drift at step {step + 1}: {diagnosis}"
        self._calm += 1
        if not self._causes or self._calm < CALM_STEPS:
            return None
        causes, self._causes = ", ".join(sorted(self._causes)), set()
        return f"drift has ended ({causes}): engine and trainer agree for {CALM_STEPS} steps"


def drift_summary(steps: Sequence[tuple[str | None, float | None]]) -> dict[str, Any]:
    """Of each step's diagnosis and mean difference (nats; None: not compared): how many steps had
    drift and by which cause, the last sentence, and the mean difference over the steps."""
    told = [diagnosis for diagnosis, _ in steps if diagnosis]
    means = [mean for _, mean in steps if mean is not None]
    return {
        "steps": len(told),
        "causes": dict(Counter(cause_of(diagnosis) for diagnosis in told)),
        "last": told[-1] if told else None,
        "compared_steps": len(means),
        "logprob_diff_mean": sum(means) / len(means) if means else None,
    }


def cause_of(diagnosis: str) -> str:
    """The cause alone: the words before the colon."""
    return diagnosis.partition(":")[0]
