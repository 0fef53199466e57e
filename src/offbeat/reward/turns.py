"""Which draws a text gets when it is asked for again (pure)."""

from __future__ import annotations

from collections import OrderedDict

KEPT = 4096


class Turns:
    """How often in a row the votes on a text came to nothing.

    A server draws the same verdict for the same seed, so whoever asks again after a verdict that
    could not be read needs other seeds. What is forgotten begins anew.
    """

    def __init__(self) -> None:
        self._vain: OrderedDict[int, int] = OrderedDict()

    def of(self, text: str) -> int:
        """0 at first, one more after every try in vain."""
        return self._vain.get(hash(text), 0)

    def came_to(self, text: str, value: float | None) -> None:
        """What a try came to; None if its verdicts could not be read, or not as one."""
        key = hash(text)
        tries = self._vain.pop(key, 0)
        if value is None:
            self._vain[key] = tries + 1
            if len(self._vain) > KEPT:
                self._vain.popitem(last=False)
