"""Prompts from JSONL, parquet, or a Hugging Face data set saved to disk, in a seeded order.

`load_prompts` reads and tokenises every row once, so that what is wrong with a row is known, with
its line, before anything starts; `PromptSet.prompt(ordinal)` then only looks up.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from offbeat.config import Config
from offbeat.errors import UserError
from offbeat.model_files import model_positions, read_tokenizer
from offbeat.pick import BadPick, picked
from offbeat.records import IntArray, Messages, Prompt
from offbeat.texts import lone_surrogate

Split = Literal["train", "validation"]
Tokenizer = Any
"""A transformers tokenizer (fast or slow)."""

BATCH = 1024
"""Texts that are tokenised in one call."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a data file: its line (of a table: its row, from 1) and its columns."""

    line: int
    columns: Mapping[str, Any]


def read_rows(path: Path) -> list[Row]:
    """All rows of a JSONL file, a parquet file, or a data set directory saved to disk."""
    if not path.exists():
        raise UserError(f"{path} does not exist; set [data] to a file or directory that does")
    if path.is_dir():
        rows = _rows_of(path, _arrow_tables(path))
    elif path.suffix == ".parquet":
        rows = _rows_of(path, [_parquet(path)])
    else:
        rows = list(jsonl_rows(path))
    if not rows:
        raise UserError(f"{path} has no rows; give it at least one prompt")
    return rows


def jsonl_rows(path: Path) -> Iterator[Row]:
    """The rows of a JSONL file one after another; raises `UserError` that names the bad line."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    columns = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(
                        f"{path} line {number} is not JSON ({error}); mend or remove that line"
                    ) from None
                if not isinstance(columns, dict):
                    raise UserError(
                        f"{path} line {number} is no JSON object; write "
                        '{"prompt": "...", ...} on a line of its own'
                    )
                yield Row(number, columns)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _parquet(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet: {error}") from None


def _arrow_tables(path: Path) -> list[Any]:
    """The tables of a directory: a saved data set's arrow files, or parquet files."""
    import pyarrow as pa

    if (path / "dataset_dict.json").is_file():
        splits = sorted(child.name for child in path.iterdir() if child.is_dir())
        raise UserError(
            f"{path} holds several data sets ({', '.join(splits)}); name one of them, for "
            f"example {path / (splits[0] if splits else 'train')}"
        )
    parquet = sorted(path.glob("*.parquet"))
    state = path / "state.json"
    if not state.is_file():
        if parquet:
            return [_parquet(file) for file in parquet]
        raise UserError(
            f"{path} is no data set directory because it has neither state.json nor parquet "
            "files; write one with Dataset.save_to_disk"
        )
    try:
        names = [entry["filename"] for entry in json.loads(state.read_text())["_data_files"]]
        tables = []
        for name in names:
            with pa.memory_map(str(path / name)) as source:
                tables.append(pa.ipc.open_stream(source).read_all())
    except (KeyError, TypeError, ValueError, OSError, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read as a saved data set: {error}") from None
    return tables


def _rows_of(path: Path, tables: Sequence[Any]) -> list[Row]:
    columns = (row for table in tables for row in table.to_pylist())
    try:
        return [Row(number, row) for number, row in enumerate(columns, 1)]
    except UnicodeDecodeError as error:
        raise UserError(f"{path} holds what is not UTF-8 text ({error}); mend its rows") from None


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Tokenised prompts and their order: ordinal = epoch x rows + place in the epoch's order.

    `rows` are those in use; `skipped` the lines of rows that were too long for the context.
    """

    rows: tuple[Row, ...]
    prompts: tuple[Prompt, ...]
    epochs: int
    seed: int
    shuffle: bool
    skipped: tuple[int, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def total(self) -> int:
        """Ordinals there are: epochs x rows."""
        return self.epochs * len(self.prompts)

    def fingerprint(self) -> int:
        """A checksum of all token ids, in their order: of what an ordinal means."""
        check = 0
        for prompt in self.prompts:
            check = zlib.crc32(np.ascontiguousarray(prompt.token_ids, np.int32).tobytes(), check)
        return check

    def prompt(self, ordinal: int) -> Prompt:
        """The prompt at an ordinal; the same for the same seed, whenever it is asked for."""
        if not 0 <= ordinal < self.total:
            raise IndexError(f"ordinal {ordinal} is outside 0..{self.total - 1}")
        epoch, place = divmod(ordinal, len(self.prompts))
        if self.shuffle:
            place = int(_order(self.seed, epoch, len(self.prompts))[place])
        at = self.prompts[place]
        return Prompt(
            ordinal, at.token_ids, at.text, at.question, at.messages, at.reference, at.columns
        )

    def __iter__(self) -> Iterator[Prompt]:
        return (self.prompt(ordinal) for ordinal in range(self.total))


@lru_cache(maxsize=8)
def _order(seed: int, epoch: int, rows: int) -> NDArray[np.int64]:
    """The order of one epoch: a permutation from (seed, epoch)."""
    return np.random.default_rng((seed & (2**64 - 1), epoch)).permutation(rows)


def planned_steps(config: Config, total: int) -> int:
    """Steps of a run over `total` prompts, the last one maybe smaller; `train.steps` at most."""
    needed = -(-total // config.train.groups_per_step)
    return needed if config.train.steps is None else min(needed, config.train.steps)


def load_tokenizer(config: Config) -> Tokenizer:
    """The policy's tokenizer, from its directory and nowhere else."""
    path = config.model.tokenizer or config.model.path
    tokenizer: Tokenizer = read_tokenizer(path, "model.tokenizer")
    return tokenizer


def select_rows(config: Config, split: Split) -> tuple[Path, list[Row]]:
    """The rows of a split, cut to its limit and checked for what needs no tokenizer."""
    path = config.data.train if split == "train" else config.data.validation
    if path is None:
        raise UserError("data.validation is not set; set it to a file of held-out prompts")
    limit = config.data.limit if split == "train" else config.validation.limit
    rows = read_rows(path)[:limit]
    scored = split == "train" or config.validation.rewards
    for row in rows:
        check_row(config, path, row)
        if scored:
            check_pick(config, path, row)
    if split == "train":
        _check_enough(config, path, len(rows), 0)
    return path, rows


def load_prompts(config: Config, tokenizer: Tokenizer, split: Split) -> PromptSet:
    """All prompts of a split, tokenised; validation prompts keep the file's order."""
    path, rows = select_rows(config, split)
    texts = [_text(config, tokenizer, path, row) for row in rows]
    for row, text in zip(rows, texts, strict=True):
        if (half := lone_surrogate(text)) is not None:
            raise UserError(
                f"{path} line {row.line} has {half} alone in its prompt, which is half of a "
                "character and no text; mend or remove that line"
            )
    ids = tokenize(tokenizer, texts, [_messages_of(config, row) is not None for row in rows])
    room, of = _room(config)
    kept: list[Row] = []
    prompts: list[Prompt] = []
    skipped: list[int] = []
    for row, text, token_ids in zip(rows, texts, ids, strict=True):
        if len(token_ids) == 0:
            raise UserError(f"{path} line {row.line} has an empty prompt; mend or remove that line")
        if len(token_ids) <= room:
            kept.append(row)
            prompts.append(make_prompt(config, row, text, token_ids))
        elif config.data.on_overlong == "skip":
            skipped.append(row.line)
        else:
            raise UserError(
                f"{path} line {row.line} has a prompt of {len(token_ids)} tokens, and "
                f"{of} - rollout.max_tokens leaves {room}; shorten it, make room, or set "
                'data.on_overlong = "skip"'
            )
    if not prompts:
        raise UserError(
            f"{path}: all {len(skipped)} prompts are longer than the {room} tokens that {of} - "
            "rollout.max_tokens leaves; make room"
        )
    train = split == "train"
    if train:
        _check_enough(config, path, len(prompts), len(skipped))
    return PromptSet(
        tuple(kept),
        tuple(prompts),
        epochs=config.data.epochs if train else 1,
        seed=config.seed,
        shuffle=train and config.data.shuffle,
        skipped=tuple(skipped),
    )


def _room(config: Config) -> tuple[int, str]:
    """Tokens that a prompt may have, as the engine counts them, and what sets the limit."""
    context, of = config.rollout.max_context, "rollout.max_context"
    positions = model_positions(config.model.path)
    if positions is not None and positions < context:
        context, of = positions, f"the model's context of {positions}"
    room = context - config.rollout.max_tokens
    if room < 1:
        raise UserError(
            f"rollout.max_tokens = {config.rollout.max_tokens} leaves no room for a prompt in "
            f"{of}; lower it"
        )
    return room, of


def _check_enough(config: Config, path: Path, rows: int, skipped: int) -> None:
    groups = config.train.groups_per_step
    if rows < groups:
        beside = f" ({skipped} more are too long)" if skipped else ""
        raise UserError(
            f"train.groups_per_step = {groups} is more than the {rows} rows of {path}{beside}; "
            f"set it to at most {rows}"
        )


def check_row(config: Config, path: Path, row: Row) -> None:
    """Refuses a row without a usable prompt."""
    column = config.data.prompt_column
    where = f"{path} line {row.line}"
    if column not in row.columns:
        there = ", ".join(map(str, row.columns)) or "none"
        raise UserError(
            f"{where} has no column {column!r}; it has: {there}; set data.prompt_column to one"
        )
    value = row.columns[column]
    if isinstance(value, str):
        return
    good = isinstance(value, list) and len(value) > 0
    for message in value if good else ():
        parts = (message.get("role"), message.get("content")) if isinstance(message, dict) else ()
        good = good and len(parts) == 2 and all(isinstance(part, str) for part in parts)
    if not good:
        raise UserError(
            f"{where}: column {column!r} must be a text or a list of "
            '{"role": "...", "content": "..."} messages with text'
        )


def check_pick(config: Config, path: Path, row: Row) -> None:
    """Refuses a row that no reward source scores, or that names one that is not there."""
    data, sources = config.data, config.active_rewards
    columns = {key: value for key, value in row.columns.items() if key != data.prompt_column}
    try:
        picked(columns, sources, data.reward_column, tuple(config.reward))
    except BadPick as bad:
        raise UserError(f"{path} line {row.line}: {bad}") from None


def _messages_of(config: Config, row: Row) -> Messages | None:
    value = row.columns[config.data.prompt_column]
    return None if isinstance(value, str) else tuple(value)


def _text(config: Config, tokenizer: Tokenizer, path: Path, row: Row) -> str:
    """The prompt as text: as it stands, or through the chat template with a generation prompt."""
    messages = _messages_of(config, row)
    if messages is None:
        return str(row.columns[config.data.prompt_column])
    if not tokenizer.chat_template:
        raise UserError(
            f"{path} line {row.line} has messages and the tokenizer has no chat template; "
            "write prompts as text, or use a model with a template"
        )
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        )
    except Exception as error:  # a template is the user's program and may raise anything
        raise UserError(
            f"{path} line {row.line}: the chat template refuses the messages ({error})"
        ) from None


def tokenize(
    tokenizer: Tokenizer, texts: Sequence[str], templated: Sequence[bool]
) -> list[IntArray]:
    """Token ids with exactly one BOS where there is to be one (T3).

    A plain text gets the BOS that its tokenizer adds, unless it begins with it already; a
    templated one only what its template wrote. No other special token is added.
    """
    bos = tokenizer.bos_token_id
    adds = bos is not None and _adds_bos(tokenizer, bos)
    result: list[IntArray] = []
    for start in range(0, len(texts), BATCH):
        batch = list(texts[start : start + BATCH])
        encoded = tokenizer(batch, add_special_tokens=False)["input_ids"]
        for ids, from_template in zip(encoded, templated[start : start + BATCH], strict=True):
            own = 0
            while bos is not None and own < len(ids) and ids[own] == bos:
                own += 1
            wanted = 1 if own or (adds and not from_template) else 0
            result.append(np.asarray([bos] * wanted + list(ids[own:]), dtype=np.int32))
    return result


def _adds_bos(tokenizer: Tokenizer, bos: int) -> bool:
    with_special = tokenizer("a")["input_ids"]
    without = tokenizer("a", add_special_tokens=False)["input_ids"]
    return bool(with_special[:1] == [bos] and without[:1] != [bos])


def plain_prompt(config: Config, row: Row) -> Prompt:
    """A prompt as reward functions see it, without a tokenizer: messages by their contents."""
    messages = _messages_of(config, row)
    said = [message["content"] for message in messages or ()]
    text = "\n".join(said) if said else str(row.columns[config.data.prompt_column])
    return make_prompt(config, row, text, np.zeros(0, dtype=np.int32))


def make_prompt(config: Config, row: Row, text: str, token_ids: IntArray) -> Prompt:
    """A prompt of a row, with the ordinal still to be set."""
    data, messages = config.data, _messages_of(config, row)
    question = row.columns.get(data.question_column)
    if question is None and messages is not None:
        said = [message["content"] for message in messages if message["role"] == "user"]
        question = said[-1] if said else text
    reference = row.columns.get(data.reference_column)
    if reference is not None and not isinstance(reference, str):
        reference = json.dumps(reference, ensure_ascii=False, default=str)
    return Prompt(
        ordinal=-1,
        token_ids=token_ids,
        text=text,
        question=text if question is None else str(question),
        messages=messages,
        reference=reference,
        columns={k: v for k, v in row.columns.items() if k != data.prompt_column},
    )
