"""Texts that cannot speak to a judge's tokenizer, and the line that no text holds (pure).

Whoever writes an answer must not be able to end the judge's turn in it. A tokenizer reads
`<|im_end|>` as that token wherever it stands in a text, so every special token in a text from
outside gets a space behind its first character: `< |im_end|>`. That is still readable, and no
tokenizer takes it for the token. Tokens are looked for as normalising tokenizers see them: in
upper and lower case, in full-width letters, with accents and invisible characters left out.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from offbeat.texts import writable

MARKUP = (
    r"<(?:\|[^\s<>]{1,64}>"
    r"|[^\s<>|]{1,64}\|>"
    r"|/?(?:s|bos|eos|pad|unk|mask|cls|sep|sop|eop|eot|eom|eod|image|audio|video)>"
    r"|/?(?:system|user|assistant|human|model|tool|think|thinking|tool_call|tool_calls"
    r"|tool_response|tool_result|function_call)>"
    r"|\w{1,32}_of_\w{1,32}>"
    r"|(?:im_start|im_end|im_sep|fim_\w{1,32}|extra_id_\d{1,6}|unused_?\d{1,6}|special_\d{1,6}"
    r"|reserved_\w{1,32})>"
    r"|</?sys>>)",
    r"\[(?:/?(?:inst|sys|system_prompt|available_tools|tool_calls|tool_results|tool_content"
    r"|call_id|args|think|model_settings|img|img_break|img_end|prefix|middle|suffix)\]"
    r"|(?:cls|sep|mask|pad|unk|bos|eos|gmask|smask|control_\d{1,6}|unused_?\d{1,6})\])",
)
"""The special tokens of the common families of chat models, as regular expressions."""

_LONGEST_MARKUP = 80
_PASSES = 8
_TURNS = 1000
_STEP = 32_768
_SEEN = frozenset("\t\n\r")


class _Plain(dict[int, str]):
    """What normalising tokenizers make of a character, for `str.translate`."""

    def __missing__(self, point: int) -> str:
        character = chr(point)
        kept = [
            part
            for part in unicodedata.normalize("NFKD", character)
            if part in _SEEN or unicodedata.category(part) not in {"Mn", "Me", "Cf", "Cc"}
        ]
        self[point] = "".join(kept)
        return self[point]


_PLAIN = _Plain()


class Neutralizer:
    """Breaks the special tokens of one judge, and the usual ones, in texts from outside."""

    def __init__(self, special_tokens: Sequence[str] = ()) -> None:
        """`special_tokens` are the judge's own, as text."""
        usual = re.compile("|".join(MARKUP), re.IGNORECASE)
        own = {_plain(token).lower().strip() for token in special_tokens}
        own = {token for token in own if len(token) > 1 and not usual.fullmatch(token)}
        wanted = [*map(_rest_ahead, MARKUP)]
        for first in sorted({token[0] for token in own}):
            rests = [token[1:] for token in own if token[0] == first]
            wanted.append(f"{re.escape(first)}(?={_any_of(rests)})")
        self._tokens = re.compile("|".join(wanted), re.IGNORECASE)
        self._reach = max([_LONGEST_MARKUP, *map(len, own)])
        letters = {token for token in special_tokens if len(token) == 1 and not token.isspace()}
        self._letters = {ord(letter): _stand_in(letter) for letter in letters}

    def text(self, text: str) -> str:
        """The text without anything that a tokenizer reads as a special token."""
        text = writable(text)
        for _ in range(_PASSES):
            places = self._places(text)
            if not places:
                break
            cuts = [0, *(place + 1 for place in places), len(text)]
            text = " ".join(text[a:b] for a, b in pairwise(cuts))
        return text.translate(self._letters) if self._letters else text

    def value(self, value: Any) -> Any:
        """The same for all texts in a value of lists and dicts; all else stays as it is."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {key: self.value(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(inner) for inner in value]
        return value

    def _places(self, text: str) -> list[int]:
        """Where special tokens begin, in order. In steps, so that other threads get their turn."""
        plain = _plain(text)
        starts = [
            match.start()
            for begin in range(0, len(plain), _STEP)
            for match in self._tokens.finditer(plain, begin, begin + _STEP + self._reach)
            if match.start() < begin + _STEP
        ]
        if not starts or plain is text:
            return starts
        places = [i for i, character in enumerate(text) for _ in _PLAIN[ord(character)]]
        return sorted({places[start] for start in starts})


def fence(texts: Iterable[str], neutral: Neutralizer | None = None) -> str:
    """A line that none of the texts holds; the same texts give the same line.

    It holds no special token that `neutral` knows.
    """
    known = list(texts)
    for turn in range(_TURNS):
        digest = hashlib.blake2b(str(turn).encode(), digest_size=6)
        for text in known:
            digest.update(f"{len(text)}:".encode() + text.encode("utf-8", "replace"))
        mark = digest.hexdigest()
        line = f"===== {mark} ====="
        if not any(mark in text for text in known) and (not neutral or neutral.text(line) == line):
            break
    return line


def texts_in(value: Any) -> list[str]:
    """All texts in a value of lists and dicts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for inner in value.values() for text in texts_in(inner)]
    if isinstance(value, list | tuple):
        return [text for inner in value for text in texts_in(inner)]
    return []


def _plain(text: str) -> str:
    """The text as normalising tokenizers see it; the same object where that is the text."""
    if text.isascii() and text.isprintable():
        return text
    steps = range(0, len(text), _STEP)
    plain = "".join(text[begin : begin + _STEP].translate(_PLAIN) for begin in steps)
    return text if plain == text else plain


def _rest_ahead(token: str) -> str:
    """The pattern cut behind its first character, so that tokens which overlap are all found."""
    first = 2 if token.startswith("\\") else 1
    return f"{token[:first]}(?={token[first:]})"


def _any_of(words: Sequence[str]) -> str:
    """A pattern for any of the words that looks at each character once, however many there are."""
    heads: dict[str, list[str]] = {}
    for word in words:
        if not word:
            return ""  # a shorter one is enough
        heads.setdefault(word[0], []).append(word[1:])
    parts = [re.escape(head) + _any_of(rests) for head, rests in sorted(heads.items())]
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _stand_in(letter: str) -> str:
    """What is shown for a character that is a special token by itself."""
    return chr(ord(letter) + 0xFEE0) if "!" <= letter <= "~" else "\u25a1"
