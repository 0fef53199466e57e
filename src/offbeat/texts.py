"""Texts that may not be text: half of a surrogate pair, which an escape in JSON can say.

Python holds it in a `str`; no file, terminal or tokenizer takes it.
"""

from __future__ import annotations


def writable(text: str) -> str:
    """The text with a question mark for each lone surrogate."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def lone_surrogate(text: str) -> str | None:
    """The first lone surrogate in a text, as its escape; None if there is none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"\\u{ord(text[error.start]):04x}"
    return None
