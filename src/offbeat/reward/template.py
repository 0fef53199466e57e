"""The texts that reward models read: Jinja templates, chat templates, exactly one BOS.

A template sees `question`, `answer`, `reference` (None where the row has none) and `columns` (the
row's other columns), a judge's more (`judge_prompt`); an undefined name is a failure of that
sample, never an empty string. The ready templates of judges lie in `offbeat/templates/judge`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from offbeat.config_reward import READY_TEMPLATES
from offbeat.errors import OffbeatError, UserError
from offbeat.model_files import read_tokenizer
from offbeat.records import ScoreItem


class TemplateFailed(OffbeatError):
    """A template could not be rendered for one sample."""


class TextTemplate:
    """A compiled template of a reward source."""

    def __init__(self, template: Template, variables: Mapping[str, Any]) -> None:
        """Use `load`."""
        self._template = template
        self._variables = dict(variables)

    @classmethod
    def load(cls, path: Path | None, default: str, setting: str, **variables: Any) -> TextTemplate:
        """From a file, a ready template's name or the default text.

        `setting` is named in the `UserError` when the file is at fault.
        """
        try:
            source = default if path is None else _source(path)
            environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
            return cls(environment.from_string(source), variables)
        except OSError as error:
            raise UserError(
                f"{setting}: cannot read {path} ({error.strerror}); give a Jinja file"
            ) from error
        except UnicodeDecodeError as error:
            raise UserError(f"{setting}: {path} is not UTF-8 text; save it as such") from error
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            place = f"{path}, line {line}" if line else str(path)
            raise UserError(f"{setting}: {place}: {error}; mend the Jinja template") from error

    def render(self, item: ScoreItem) -> str:
        """The text for one sample; raises `TemplateFailed`."""
        return self.fill(
            question=item.prompt.question,
            answer=item.completion,
            reference=item.prompt.reference,
            columns=dict(item.prompt.columns),
        )

    def fill(self, **values: Any) -> str:
        """The text with these values of its variables; raises `TemplateFailed`."""
        try:
            return self._template.render(self._variables, **values)
        except (
            TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
        ) as error:  # fmt: skip
            raise TemplateFailed(f"{type(error).__name__}: {error}") from error


def ready_text(name: str) -> str:
    """The source of one of `READY_TEMPLATES`."""
    return (
        resources.files("offbeat")
        .joinpath("templates", "judge", f"{name}.jinja")
        .read_text("utf-8")
    )


def encode(tokenizer: Any, text: str, *, ask: bool = False) -> list[int]:
    """Token ids of a plain text with the tokenizer's own special tokens and at most one BOS.

    With `ask` the text is to be gone on with: an end of sequence that the tokenizer puts behind
    every text is left out.
    """
    ids = list(tokenizer(text)["input_ids"])
    end = tokenizer.eos_token_id
    if ask and end is not None and list(tokenizer("a")["input_ids"])[-1:] == [end]:
        ids.pop()
    return _one_bos(tokenizer, ids)


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, ask: bool) -> list[int]:
    """Token ids of a conversation in the tokenizer's chat template, with exactly one BOS.

    `ask` opens the assistant's turn. A BOS comes from the template, or from the tokenizer if that
    adds one to every text; never from both.
    """
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=ask
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise TemplateFailed(f"chat template: {error}") from error
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    bos = tokenizer.bos_token_id
    adds = bos is not None and list(tokenizer("a")["input_ids"])[:1] == [bos]
    if adds and ids[:1] != [bos]:
        ids.insert(0, bos)
    return _one_bos(tokenizer, ids)


def load_tokenizer(path: str | Path, setting: str, *, chat: bool) -> Any:
    """The tokenizer in a model directory; with `chat` it needs a chat template."""
    tokenizer = read_tokenizer(Path(path), setting)
    if chat and not tokenizer.chat_template:
        raise UserError(
            f"{setting}: the tokenizer in {path} has no chat template; set chat = false"
        )
    return tokenizer


def _one_bos(tokenizer: Any, ids: list[int]) -> list[int]:
    bos = tokenizer.bos_token_id
    while bos is not None and ids[:2] == [bos, bos]:
        del ids[0]
    return ids


def _source(path: Path) -> str:
    name = str(path)
    return ready_text(name) if name in READY_TEMPLATES else path.read_text(encoding="utf-8")
