"""Finds the token that completes a stop string, decoding only a short tail of a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


class StopStrings:
    """Says whether the newest token of a sample completes one of its stop strings.

    `check` must be asked at every token: earlier tokens are then known to complete none.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._pieces: dict[int, str] = {}

    def check(self, token_ids: Sequence[int], stops: Sequence[str]) -> bool:
        """True if the text of `token_ids` holds a stop string."""
        if not stops or not self._may_complete(token_ids[-1], stops):
            return False
        # A character takes at most four tokens (bytes); tokens that show nothing widen the window.
        longest = max(len(stop) for stop in stops)
        window = 4 * longest + 4
        while True:
            text = self._decode(token_ids[-window:]).rstrip("\ufffd")
            if any(stop in text for stop in stops):
                return True
            # Room for a broken character at the window's start, where a cut may fall.
            if window >= len(token_ids) or len(text) > longest + 4:
                return False
            window *= 4

    def _may_complete(self, token: int, stops: Sequence[str]) -> bool:
        """Cheap and never wrong about a no: the last character must come from this token.

        Undecided (True) for partial characters, and for white space, which some tokenizers drop
        at the start of a text.
        """
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._decode([token])
        if "\ufffd" in piece:
            return True
        return any(stop[-1] in piece or stop[-1].isspace() for stop in stops)
