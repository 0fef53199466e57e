"""How a maker tells `prepare.py` how far it is: a line `@0.35 message` on its output."""

from __future__ import annotations


def report(share: float, message: str) -> None:
    """Say which share of the work is done, and a few words about it."""
    print(f"@{share:.3f} {message}", flush=True)
