"""The form of a verdict: what it admits is read, who enforces it, and what a server is sent."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from offbeat.config import RewardSourceSection
from offbeat.errors import UserError
from offbeat.records import Prompt, Reward, ScoreItem, Structure
from offbeat.reward.genrm import GenRM
from offbeat.reward.judge_engines import EngineBackend
from offbeat.reward.judge_http import HttpBackend
from offbeat.reward.structure import check_spelling, server_fields, structure_of
from offbeat.reward.verdict import Grade, Unread, parse_verdict
from offbeat.testing.judge_server import Fault, JudgeServer
from offbeat.testing.tiny import make_tiny_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "max_of_three"))
SCALES = [(1.0, 10.0), (0.0, 1.0), (-5.0, 5.0), (0.5, 4.5), (0.0, 100.0)]


def section(**settings: Any) -> RewardSourceSection:
    base = {"kind": "genrm", "model": "m", "engine": "vllm", "structured": "on"}
    return RewardSourceSection.model_validate(base | settings)


def form(**settings: Any) -> Structure:
    found = structure_of(section(**settings))
    assert found is not None
    return found


def words(**settings: Any) -> tuple[str, ...]:
    return form(**settings).choices


@pytest.mark.parametrize(
    ("parser", "structured", "engine", "enforced"),
    [
        ("rubric", "auto", "vllm", True),
        ("choice", "auto", "vllm", True),
        ("last_number", "auto", "vllm", False),
        ("last_number", "on", "vllm", True),
        ("expected", "auto", "vllm", False),
        ("expected", "on", "vllm", False),
        ("rubric", "off", "vllm", False),
        ("choice", "auto", "transformers", False),
        ("json", "auto", "vllm", True),
        ("yes_no", "auto", "vllm", True),
        ("number", "auto", "vllm", False),
        ("number", "on", "vllm", True),
        ("json", "off", "vllm", False),
        ("json", "auto", "transformers", False),
        ("json", "off", "transformers", False),
    ],
)
def test_when_a_form_is_enforced(parser: str, structured: str, engine: str, enforced: bool) -> None:
    more: dict[str, Any] = {"choices": {"good": 1, "bad": 0}} if parser == "choice" else {}
    more |= {"rubric": ["a"]} if parser == "rubric" else {}
    found = structure_of(section(parser=parser, structured=structured, engine=engine, **more))
    assert (found is not None) == enforced
    if found is not None:
        assert sum(map(bool, (found.json_schema, found.regex, found.choices))) == 1


def test_an_engine_that_enforces_nothing_is_refused() -> None:
    for parser in ("json", "number"):
        with pytest.raises(ValidationError, match=r'structured = "on".*engine'):
            section(engine="transformers", parser=parser)
    section(engine="transformers", parser="json", base_url="http://host:8000/v1")


def test_the_schema() -> None:
    schema = json.loads(form(parser="json", scale=(1, 10)).json_schema or "")
    assert schema == {
        "type": "object",
        "properties": {"score": {"type": "number", "minimum": 1, "maximum": 10}},
        "required": ["score"],
        "additionalProperties": False,
    }
    assert words(parser="yes_no") == ("yes", "no")
    assert words(parser="choice", choices={"good": 1, "so so": 0.5}) == ("good", "so so")
    assert words(pairwise="all") == ("A", "B", "tie")
    assert words(pairwise="all", choices={"one": 1, "two": 0}) == ("one", "two")


def test_the_schema_of_a_rubric() -> None:
    schema = json.loads(form(parser="rubric", rubric=["a", "b"], scale=(0, 5)).json_schema or "")
    grade = {"type": "number", "minimum": 0, "maximum": 5}
    assert schema["properties"] == {"1": grade, "2": grade}
    assert (schema["required"], schema["additionalProperties"]) == (["1", "2"], False)
    own = structure_of(section(parser="rubric", rubric=["a", "b"]), criteria=3)
    assert own is not None
    assert json.loads(own.json_schema or "")["required"] == ["1", "2", "3"]
    assert structure_of(section(parser="rubric")) is None  # each row has its own
    fields = server_fields(section(parser="rubric"), criteria=1)["response_format"]
    assert fields["json_schema"]["schema"]["required"] == ["1"]
    assert server_fields(section(parser="rubric")) == {}


@given(st.data(), st.sampled_from(SCALES))
def test_numbers_that_the_form_admits_are_read(data: st.DataObject, scale: Any) -> None:
    pattern = form(parser="number", scale=scale).regex
    text = data.draw(st.from_regex(f"(?:{pattern})", fullmatch=True))
    read = parse_verdict(text, "number", scale)
    inside = scale[0] <= float(text) <= scale[1]
    assert isinstance(read, Grade) if inside else read.cause == "out_of_range"  # type: ignore[union-attr]
    if isinstance(read, Grade):
        assert read.grade == float(text)


@given(st.data(), st.sampled_from(SCALES))
def test_last_numbers_that_the_form_admits_are_read(data: st.DataObject, scale: Any) -> None:
    pattern = form(parser="last_number", scale=scale).regex
    text = data.draw(st.from_regex(f"(?:{pattern})", fullmatch=True))
    last = text.rpartition("\n")[2]
    read = parse_verdict(text, "last_number", scale)
    if scale[0] <= float(last) <= scale[1]:
        assert isinstance(read, Grade)
        assert read.grade == float(last)
    else:
        assert isinstance(read, Unread)
        assert read.cause == "out_of_range"


@given(
    st.sampled_from(SCALES), st.floats(0, 1), st.integers(0, 6), st.sampled_from(["", " ", "\n"])
)
def test_json_that_the_form_admits_is_read(
    scale: Any, share: float, decimals: int, blank: str
) -> None:
    low, high = scale
    number = f"{low + share * (high - low):.{decimals}f}"
    read = parse_verdict(f'{{{blank}"score"{blank}:{blank}{number}{blank}}}', "json", scale)
    inside = low <= float(number) <= high
    assert isinstance(read, Grade) == inside
    assert inside or isinstance(read, Unread)


def test_choices_are_read() -> None:
    values = [parse_verdict(c, "yes_no", (0, 1)) for c in form(parser="yes_no").choices]
    assert values == [Grade(1.0, 1.0), Grade(0.0, 0.0)]
    choices = {"correct": 1.0, "partly correct": 0.5, "not correct": 0.25, "wrong": 0.0}
    for said in words(parser="choice", choices=choices):
        read = parse_verdict(said, "choice", (0, 1), choices=choices)
        assert read == Grade(choices[said], choices[said])


def byte_level() -> PreTrainedTokenizerFast:
    tokens = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def letters() -> PreTrainedTokenizerFast:
    words = ["<unk>", "<eos>", *"abcdefghijklmnopqrstuvwxyz"]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<eos>")


def tokenizers(tmp_path: Path) -> dict[str, Any]:
    from make_judge import make_tokenizer  # type: ignore[import-not-found]

    characters = PreTrainedTokenizerFast.from_pretrained(make_tiny_model(tmp_path / "characters"))
    return {"characters": characters, "bytes": byte_level(), "demo judge": make_tokenizer()}


def test_tokenizers_that_can_and_cannot_spell_a_form(tmp_path: Path) -> None:
    forms = [form(parser=parser) for parser in ("json", "number", "yes_no")]
    for tokenizer in tokenizers(tmp_path).values():
        for structure in forms:
            check_spelling(structure, tokenizer, "judge")
    check_spelling(forms[2], letters(), "judge")
    for structure in forms[:2]:
        with pytest.raises(UserError, match=r'reward\.judge\.structured: .*spell.* "off"'):
            check_spelling(structure, letters(), "judge")
    letters().save_pretrained(tmp_path / "letters")
    config = section(parser="json")
    backend = EngineBackend([None], tmp_path / "letters", config, name="judge")  # type: ignore[list-item]
    with pytest.raises(UserError, match="cannot spell"):
        asyncio.run(backend.start())


def test_random_walks_through_xgrammar_are_read(tmp_path: Path) -> None:
    """vLLM's own masks, without a model: whatever they admit is a grade or out of range."""
    xgrammar = pytest.importorskip("xgrammar")
    rng = random.Random(0)
    walked = grades = 0
    for tokenizer in tokenizers(tmp_path).values():
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
        compiler = xgrammar.GrammarCompiler(info)
        for scale in SCALES:
            for parser in ("json", "number", "rubric"):
                structure = form(parser=parser, scale=scale, rubric=["a", "b"])
                grammar = (
                    compiler.compile_json_schema(structure.json_schema, any_whitespace=False)
                    if structure.json_schema
                    else compiler.compile_regex(structure.regex)
                )
                for _ in range(10):
                    text = walk(xgrammar, grammar, tokenizer, rng)
                    read = parse_verdict(text, parser, scale, criteria=["a", "b"])  # type: ignore[arg-type]
                    walked += 1
                    grades += isinstance(read, Grade)
                    if isinstance(read, Unread):
                        assert (parser, read.cause) == ("number", "out_of_range"), text
    assert grades > walked / 2


def test_reasons_may_come_before_a_last_number(tmp_path: Path) -> None:
    """xgrammar's form of last_number: lines as they please, and an end only behind a number."""
    xgrammar = pytest.importorskip("xgrammar")
    tokenizer = byte_level()
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    grammar = xgrammar.GrammarCompiler(info).compile_regex(form(parser="last_number").regex)
    for text, complete in (
        ("8", True),
        ("2 errors.\n\n8.5", True),
        ("good", False),
        ("8\n", False),
    ):
        matcher = xgrammar.GrammarMatcher(grammar)
        assert all(map(matcher.accept_token, tokenizer(text)["input_ids"])), text
        assert matcher.accept_token(tokenizer.eos_token_id) == complete, text


def walk(xgrammar: Any, grammar: Any, tokenizer: Any, rng: random.Random) -> str:
    matcher = xgrammar.GrammarMatcher(grammar)
    mask = xgrammar.allocate_token_bitmask(1, len(tokenizer))
    ids: list[int] = []
    while not matcher.is_terminated():
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: len(tokenizer)]
        token = rng.choice(np.flatnonzero(bits).tolist())
        assert matcher.accept_token(token)
        ids.append(token)
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def judged(server: JudgeServer, **settings: Any) -> list[Reward]:
    config = section(base_url=server.base_url, deadline_seconds=5, **settings)
    prompt = Prompt(0, np.zeros(1, np.int32), "p", "2+2?")

    async def main() -> list[Reward]:
        source = GenRM("judge", config, HttpBackend(config, name="judge", pause_seconds=0.02))
        await source.start()
        try:
            return await source.score([ScoreItem(prompt, "4")])
        finally:
            await source.stop()

    return asyncio.run(main())


def test_what_a_server_is_sent() -> None:
    assert server_fields(section(parser="json", structured="auto")) == {}
    assert server_fields(section(parser="json", structured="off")) == {}
    sent = server_fields(section(parser="json"))["response_format"]
    assert (sent["type"], sent["json_schema"]["strict"]) == ("json_schema", True)
    assert sent["json_schema"]["schema"]["required"] == ["score"]
    choice = {"structured_outputs": {"choice": ["yes", "no"]}}
    assert server_fields(section(parser="yes_no")) == choice
    assert list(server_fields(section(parser="number"))["structured_outputs"]) == ["regex"]
    with JudgeServer('{"score": 10}', model="m") as server:
        (reward,) = judged(server, parser="json")
        assert reward.value == 1.0
        assert all("response_format" in call.body for call in server.calls)
        (reward,) = judged(server, parser="json", structured="auto")
        assert reward.value == 1.0
        assert "response_format" not in server.calls[-1].body


def test_a_verdict_is_read_whatever_the_server_promised() -> None:
    with JudgeServer("I would say 8", model="m") as server:
        (reward,) = judged(server, parser="json")
    assert (reward.status, reward.cause, reward.value) == ("failed", "unparseable", None)


@pytest.mark.parametrize(
    ("parser", "field"), [("json", "response_format"), ("yes_no", "structured_outputs")]
)
def test_a_server_without_the_form_is_refused_at_start(parser: str, field: str) -> None:
    refusal = Fault(400, body=b'{"error": "unknown field"}')
    words = rf'reward\.judge\.structured = "on" sends {field}.*"off".*unknown field'
    with JudgeServer(model="m", script=[refusal]) as server, pytest.raises(UserError, match=words):
        judged(server, parser=parser)
    with JudgeServer(model="m", script=[Fault(reply="yes"), refusal]) as server:
        (reward,) = judged(server, parser=parser)
    assert (reward.status, reward.cause, reward.value) == ("failed", "refused", None)
    assert 'structured = "on"' in reward.reason


def test_a_model_that_the_server_does_not_list() -> None:
    with JudgeServer(model="other", script=[Fault(404)]) as server:
        with pytest.raises(UserError, match=r'reward\.judge\.model = "m" is none of .*\(other\)'):
            judged(server, structured="auto")
        (reward,) = judged(server, structured="auto")  # an alias: it is taken all the same
        assert reward.status == "scored"
