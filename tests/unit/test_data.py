"""Reading rows, tokenising with one BOS, the seeded order, and what is refused with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offbeat.config import Config
from offbeat.data import load_prompts, load_tokenizer, planned_steps, read_rows, tokenize
from offbeat.errors import UserError

BOS = 1
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_tokenizer(folder: Path, *, adds_bos: bool = True, template: str | None = TEMPLATE) -> None:
    """A tokenizer of single characters that writes <s> before every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: at for at, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *letters])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    if adds_bos:
        raw.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair=None, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = template
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(folder))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def settings(folder: Path, data: dict[str, Any] | None = None, **sections: Any) -> Config:
    return Config.model_validate(
        {
            "run": "one",
            "seed": 7,
            "model": {"path": folder / "model"},
            "data": {"train": folder / "train.jsonl", **(data or {})},
            "train": {"groups_per_step": 1},
            "reward": {"a": {"kind": "function", "function": "a:b"}},
            **sections,
        }
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder / "model")
    return load_tokenizer(settings(folder))


def text_of(ids: Any) -> str:
    return "".join(chr(32 + at - 4) for at in ids if at >= 4)


def test_jsonl_lines_are_counted_with_blank_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b", "x": [1]}\n')
    rows = read_rows(path)
    assert [(row.line, row.columns["prompt"]) for row in rows] == [(1, "a"), (3, "b")]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"prompt": "a"}\n{"prompt": \n', ["line 2", "not JSON"]),
        (b'{"prompt": "a"}\n{"x": ' + b"9" * 5000 + b"}\n", ["line 2", "not JSON", "4300 digits"]),
        (b'{"prompt": "a"}\n[1]\n', ["line 2", "no JSON object"]),
        (b'{"prompt": "\xff"}\n', ["UTF-8"]),
        (b"\n", ["no rows"]),
    ],
)
def test_bad_jsonl_names_file_and_line(tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_rows(path)
    assert [word for word in ["bad.jsonl", *words] if word not in str(caught.value)] == []


def test_parquet_and_saved_data_sets_give_the_same_rows(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{n}"}], "reference": n} for n in range(5)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "a.parquet")
    saved = tmp_path / "saved"
    saved.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (table.slice(0, 3), table.slice(3)), strict=True):
        with pa.OSFile(str(saved / name), "wb") as sink, pa.ipc.new_stream(sink, part.schema) as w:
            w.write_table(part)
    state = {"_data_files": [{"filename": name} for name in names]}
    (saved / "state.json").write_text(json.dumps(state))
    parts = tmp_path / "parts"
    parts.mkdir()
    pq.write_table(table, parts / "0.parquet")
    for path in (tmp_path / "a.parquet", saved, parts):
        found = read_rows(path)
        assert [dict(row.columns) for row in found] == rows
        assert [row.line for row in found] == [1, 2, 3, 4, 5]


def test_directories_that_are_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no data set directory"):
        read_rows(tmp_path)
    (tmp_path / "dataset_dict.json").write_text("{}")
    (tmp_path / "test").mkdir()
    with pytest.raises(UserError, match="several data sets"):
        read_rows(tmp_path)
    (tmp_path / "x.parquet").write_bytes(b"no")
    with pytest.raises(UserError, match=r"x\.parquet cannot be read as parquet"):
        read_rows(tmp_path / "x.parquet")


def test_text_gets_exactly_one_bos_and_no_eos(tokenizer: Any) -> None:
    ids = tokenize(tokenizer, ["ab", "<s>ab", "<s><s>ab", "a<s>b"], [False] * 4)
    assert [list(row).count(BOS) for row in ids] == [1, 1, 1, 2]
    assert all(row[0] == BOS and row[-1] > 3 for row in ids)
    assert text_of(ids[0]) == "ab"


def test_templates_write_their_own_bos(tokenizer: Any, tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"prompt": [{"role": "user", "content": "hi"}]}])
    prompt = load_prompts(settings(tmp_path), tokenizer, "train").prompt(0)
    assert list(prompt.token_ids).count(BOS) == 1
    assert text_of(prompt.token_ids) == "<user>hi<assistant>"
    assert prompt.text == "<s><user>hi<assistant>"
    assert (prompt.question, prompt.messages) == ("hi", ({"role": "user", "content": "hi"},))


def test_no_bos_where_nobody_adds_one(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "model", adds_bos=False, template="{{ messages[0].content }}")
    plain = load_tokenizer(settings(tmp_path))
    assert [list(row).count(BOS) for row in tokenize(plain, ["ab", "ab"], [False, True])] == [0, 0]


def test_a_row_becomes_a_prompt(tokenizer: Any, tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+1=", "reference": 2, "question": "one and one", "level": 3},
        {"prompt": "1+2="},
    ]
    write(tmp_path / "train.jsonl", rows)
    first, second = load_prompts(settings(tmp_path, {"shuffle": False}), tokenizer, "train")
    assert (first.ordinal, first.reference, first.question) == (0, "2", "one and one")
    assert first.columns == {"reference": 2, "question": "one and one", "level": 3}
    assert (second.reference, second.question, second.text) == (None, "1+2=", "1+2=")
    assert first.token_ids.dtype == np.int32


def test_the_order_is_seeded_by_epoch_and_no_ordinal_repeats(
    tokenizer: Any, tmp_path: Path
) -> None:
    write(tmp_path / "train.jsonl", [{"prompt": f"{n}"} for n in range(50)])
    prompts = load_prompts(settings(tmp_path, {"epochs": 3}), tokenizer, "train")
    again = load_prompts(settings(tmp_path, {"epochs": 3}), tokenizer, "train")
    other = load_prompts(settings(tmp_path, {"epochs": 3}, seed=8), tokenizer, "train")
    assert (len(prompts), prompts.total) == (50, 150)
    texts = [prompt.text for prompt in prompts]
    assert [prompt.ordinal for prompt in prompts] == list(range(150))
    assert texts == [prompt.text for prompt in again]
    assert texts != [prompt.text for prompt in other]
    epochs = [texts[start : start + 50] for start in (0, 50, 100)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert prompts.prompt(149).text == texts[149]
    with pytest.raises(IndexError):
        prompts.prompt(150)


def test_limits_and_validation_in_the_files_order(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", [{"prompt": f"{n}"} for n in range(9)])
    config = settings(
        tmp_path, {"epochs": 3, "limit": 4, "validation": path}, validate={"limit": 5}
    )
    assert load_prompts(config, tokenizer, "train").total == 12
    held_out = load_prompts(config, tokenizer, "validation")
    assert [prompt.text for prompt in held_out] == ["0", "1", "2", "3", "4"]
    with pytest.raises(UserError, match=r"data\.validation is not set"):
        load_prompts(settings(tmp_path), tokenizer, "validation")


def test_overlong_prompts_fail_with_their_line_or_are_skipped_and_counted(
    tokenizer: Any, tmp_path: Path
) -> None:
    write(tmp_path / "train.jsonl", [{"prompt": "a"}, {"prompt": "b" * 20}, {"prompt": "c" * 19}])
    room = {"max_tokens": 12, "max_context": 32}
    with pytest.raises(UserError, match=r"line 2 has a prompt of 21 tokens.* leaves 20"):
        load_prompts(settings(tmp_path, rollout=room), tokenizer, "train")
    config = settings(tmp_path, {"on_overlong": "skip"}, rollout=room)
    prompts = load_prompts(config, tokenizer, "train")
    assert (len(prompts), prompts.skipped) == (2, (2,))
    assert [row.line for row in prompts.rows] == [1, 3]
    tight = settings(tmp_path, {"on_overlong": "skip"}, rollout=room, train={"groups_per_step": 3})
    with pytest.raises(UserError, match="1 more are too long"):
        load_prompts(tight, tokenizer, "train")


def test_t7_the_models_own_context_counts_when_it_is_shorter(
    tokenizer: Any, tmp_path: Path
) -> None:
    """An engine takes no more than the model has positions for, whatever max_context says."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 32}')
    write(tmp_path / "train.jsonl", [{"prompt": "a"}, {"prompt": "b" * 20}, {"prompt": "c" * 19}])
    room = {"max_tokens": 12, "max_context": 2048}
    with pytest.raises(UserError, match=r"line 2 has a prompt of 21.* context of 32 .* leaves 20"):
        load_prompts(settings(tmp_path, rollout=room), tokenizer, "train")
    config = settings(tmp_path, {"on_overlong": "skip"}, rollout=room)
    assert load_prompts(config, tokenizer, "train").skipped == (2,)
    none = settings(tmp_path, rollout={"max_tokens": 32, "max_context": 64})
    with pytest.raises(UserError, match=r"max_tokens = 32 leaves no room .* context of 32"):
        load_prompts(none, tokenizer, "train")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "a", "answer": "b"}, ["line 2", "'prompt'", "text, answer", "prompt_column"]),
        ({"prompt": 3}, ["line 2", "must be a text or a list"]),
        ({"prompt": []}, ["line 2", "must be a text or a list"]),
        ({"prompt": [{"role": "user"}]}, ["line 2", "must be a text or a list"]),
        ({"prompt": [{"role": "user", "content": [{}]}]}, ["line 2", "with text"]),
    ],
)
def test_rows_without_a_prompt_name_line_and_columns(
    tokenizer: Any, tmp_path: Path, row: dict[str, Any], words: list[str]
) -> None:
    write(tmp_path / "train.jsonl", [{"prompt": "a"}, row])
    with pytest.raises(UserError) as caught:
        load_prompts(settings(tmp_path), tokenizer, "train")
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    "prompt",
    ["abc\ud83d>", [{"role": "user", "content": "a"}, {"role": "user", "content": "\ud83d"}]],
)
@pytest.mark.parametrize("split", ["train", "validation"])
def test_half_of_a_character_in_a_prompt_names_the_line(
    tokenizer: Any, tmp_path: Path, prompt: Any, split: Any
) -> None:
    write(tmp_path / "train.jsonl", [{"prompt": "a"}, {"prompt": prompt, "other": "\udc00"}])
    config = settings(tmp_path, {"validation": tmp_path / "train.jsonl"})
    with pytest.raises(UserError, match=r"train\.jsonl line 2 has \\ud83d alone .* mend or remove"):
        load_prompts(config, tokenizer, split)


def test_a_column_that_nobody_tokenises_may_hold_half_a_character(
    tokenizer: Any, tmp_path: Path
) -> None:
    write(tmp_path / "train.jsonl", [{"prompt": "\U0001f600", "other": "\ud83d"}])
    prompt = load_prompts(settings(tmp_path), tokenizer, "train").prompt(0)
    assert prompt.columns == {"other": "\ud83d"}


def test_a_table_with_bytes_that_are_no_text_is_refused(tmp_path: Path) -> None:
    column = pa.array([b"a", b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"prompt": column}), tmp_path / "train.parquet")
    with pytest.raises(UserError, match=r"train\.parquet holds what is not UTF-8 text"):
        read_rows(tmp_path / "train.parquet")


def test_empty_prompts_and_missing_templates_are_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "model", adds_bos=False, template=None)
    plain = load_tokenizer(settings(tmp_path))
    write(tmp_path / "train.jsonl", [{"prompt": ""}])
    with pytest.raises(UserError, match="line 1 has an empty prompt"):
        load_prompts(settings(tmp_path), plain, "train")
    write(tmp_path / "train.jsonl", [{"prompt": [{"role": "user", "content": "a"}]}])
    with pytest.raises(UserError, match="no chat template"):
        load_prompts(settings(tmp_path), plain, "train")


def test_a_template_that_raises_names_the_line(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "model", template="{{ raise_exception('roles must alternate') }}")
    strict = load_tokenizer(settings(tmp_path))
    write(tmp_path / "train.jsonl", [{"prompt": [{"role": "user", "content": "a"}]}])
    with pytest.raises(UserError, match=r"line 1: the chat template refuses.*alternate"):
        load_prompts(settings(tmp_path), strict, "train")


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_tokenizer(settings(tmp_path))


def test_more_groups_a_step_than_rows(tokenizer: Any, tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"prompt": "a"}] * 3)
    config = settings(tmp_path, {"epochs": 10}, train={"groups_per_step": 4})
    with pytest.raises(UserError, match=r"groups_per_step = 4 is more than the 3 rows"):
        load_prompts(config, tokenizer, "train")


def test_steps_are_known_before_the_first(tmp_path: Path) -> None:
    config = settings(tmp_path, train={"groups_per_step": 4})
    assert planned_steps(config, 103) == 26
    capped = settings(tmp_path, train={"groups_per_step": 4, "steps": 10})
    assert planned_steps(capped, 103) == 10
    assert planned_steps(capped, 30) == 8
    assert planned_steps(config, 3) == 1
