"""What a run came to, and whether that is success (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.errors import RunFailed
from offbeat.ledger import LEFT_OVER, Counts


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a loop reached; `stopped`: it was asked to end before all steps were done."""

    steps: int
    counts: Counts
    stopped: bool = False


def checked(counts: Counts, steps: int, on_no_signal: str, wanted: int | None = None) -> None:
    """Raises `RunFailed` for a run that came to its end and learnt nothing, or has fewer steps than
    were `wanted` (None: as many as the data gives)."""
    lost = sum(n for reason, n in counts["discarded"].items() if reason != LEFT_OVER)
    why = ", ".join(f"{reason} {n}" for reason, n in counts["discarded"].items())
    if steps == 0 or lost > counts["trained"]:
        raise RunFailed(
            f"{lost} of {counts['admitted']} groups were discarded ({why}); {steps} steps are done"
            "; mend what discards them, and begin another run"
        )
    if wanted is not None and steps < wanted:
        raise RunFailed(
            f"the data ended after {steps} of {wanted} steps, as groups were discarded ({why}); in "
            "a run with more data.epochs others take their places"
        )
    if counts["no_signal"] == counts["trained"]:
        raise RunFailed(
            f"all {counts['trained']} groups trained were no_signal (equal rewards, see "
            f'train.on_no_signal = "{on_no_signal}"): nothing was learnt in {steps} steps'
        )
