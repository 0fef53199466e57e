"""The engine against a plain forward pass, on tiny random models."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from engine_models import (
    EOS,
    KINDS,
    check_completion,
    load_oracle,
    make_model,
    read_version,
    teacher_forced,
    write_version,
)

from offbeat.config import TrainSection
from offbeat.errors import RequestRefused, RunFailed, UserError
from offbeat.records import (
    Batch,
    Completion,
    GenerateRequest,
    Group,
    PolicyVersion,
    Prompt,
    Sample,
    Sampling,
)
from offbeat.rollout.kv import chunked, share_prefixes
from offbeat.rollout.spans import GAP, LONGEST
from offbeat.rollout.stop_strings import StopStrings
from offbeat.rollout.transformers_engine import TransformersEngine
from offbeat.train.step import gather


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(root / kind, kind) for kind in KINDS}


def run_engine(
    path: Path, body: Callable[[TransformersEngine], Awaitable[Any]], **settings: Any
) -> Any:
    settings = {"max_context": 96, "seats": 8, "load_manifest": read_version} | settings

    async def main() -> Any:
        engine = TransformersEngine(str(path), **settings)
        await engine.start()
        try:
            return await asyncio.wait_for(body(engine), 60)
        finally:
            await engine.stop()

    return asyncio.run(main())


async def collect(
    engine: TransformersEngine, name: str, prompt: Any, n: int, sampling: Sampling
) -> list[Completion]:
    request = GenerateRequest(name, np.array(prompt, np.int32), n, sampling)
    return [completion async for completion in engine.generate(request)]


def make_prompts(seed: int, count: int, shared: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    head = random.integers(1, 257, shared)
    sizes = random.integers(1, 24, count)
    return [np.concatenate([head, random.integers(1, 257, size)]) for size in sizes]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_equal_a_plain_pass(
    models: dict[str, Path], kind: str, temperature: float
) -> None:
    """Mixed lengths, shared prefixes, n > 1 and n > seats, joining and leaving."""
    prompts = [*make_prompts(1, 4), *make_prompts(2, 4, shared=20), *make_prompts(2, 2, shared=20)]
    counts = [1, 3, 12, 1, 2, 5, 1, 9, 1, 3]

    async def body(engine: TransformersEngine) -> list[list[Completion]]:
        async def one(i: int) -> list[Completion]:
            await asyncio.sleep(0.004 * (i % 4))
            sampling = Sampling(3 + 5 * (i % 5), temperature)
            return await collect(engine, str(i), prompts[i], counts[i], sampling)

        return await asyncio.gather(*(one(i) for i in range(len(prompts))))

    results = run_engine(models[kind], body)
    oracle = load_oracle(models[kind])
    for i, (prompt, found) in enumerate(zip(prompts, results, strict=True)):
        assert sorted(c.index for c in found) == list(range(counts[i]))
        for completion in found:
            check_completion(oracle, prompt, completion, temperature)
            assert completion.request_id == str(i)
            ended = completion.ref.token_ids[-1] == EOS
            assert completion.finish_reason == ("stop" if ended else "length")
            assert ended or completion.tokens == 3 + 5 * (i % 5)
            assert (completion.version_min, completion.version_max) == (0, 0)


def test_sampled_ids_are_returned_not_encoded_again(models: dict[str, Path]) -> None:
    """T1: a text has several encodings; the sampled one comes back."""

    async def body(engine: TransformersEngine) -> list[Completion]:
        return await collect(engine, "r", [65, 66], 64, Sampling(40, 3.0))

    found = run_engine(models["llama"], body, seats=64)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models["llama"])
    again = [tokenizer.encode(c.text) for c in found]
    assert any(list(c.ref.token_ids) != ids for c, ids in zip(found, again, strict=True))
    oracle = load_oracle(models["llama"])
    for completion in found:
        check_completion(oracle, [65, 66], completion, 3.0)
        assert completion.text == tokenizer.decode(
            completion.ref.token_ids, skip_special_tokens=True
        )


HELLO = ["</s>", "he", "llo", "hello", " ", *"helo"]


def hello_tokenizer(path: Path, eos: str = "</s>") -> None:
    """One that writes `hello` as a single token, and knows `he` and `llo` as well."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(HELLO)}
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    bpe = kinds.BPE(vocab=words | {"ll": len(words)}, merges=merges)
    core = Tokenizer(bpe)
    core.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    core.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos).save_pretrained(path)


def _write_always(engine: TransformersEngine, ids: list[int]) -> None:
    """Makes the engine draw these ids, one after another, with their true log-probs."""
    model = engine._stepper.model  # type: ignore[union-attr]
    coming = iter(ids)

    def draw(logits: Any, heat: list[float], counts: list[int]) -> Any:
        token = next(coming)
        return [token], [torch.log_softmax(logits[0].float(), -1)[token].item()]

    model.draw = draw


def test_t1_he_llo_is_trained_as_he_llo(tmp_path: Path) -> None:
    """Sampled `he` + `llo`, which the tokenizer writes as the one token `hello`."""
    path = make_model(tmp_path / "m")
    hello_tokenizer(path)

    async def body(engine: TransformersEngine) -> list[Completion]:
        _write_always(engine, [1, 2, 0])
        return await collect(engine, "r", [4, 5], 1, Sampling(8))

    (found,) = run_engine(path, body)
    from transformers import AutoTokenizer

    assert found.text == "hello"
    assert AutoTokenizer.from_pretrained(path).encode("hello") == [3]
    assert found.ref.token_ids.tolist() == [1, 2, 0]
    assert len(found.ref.logprobs) == len(found.ref.versions) == 3
    check_completion(load_oracle(path), [4, 5], found, 1.0)
    samples = [Sample(found, {}, reward) for reward in (1.0, 0.0)]
    prompt = Prompt(0, np.array([4, 5], np.int32), "", "")
    batch = Batch(0, (Group(prompt, 0, 0, tuple(samples)),))
    trained = gather(batch, [[found.ref, found.ref]], TrainSection.model_validate({}))
    assert [t.completion.tolist() for t in trained.trajectories] == [[1, 2, 0], [1, 2, 0]]
    assert trained.behaviour.tolist() == found.ref.logprobs.tolist() * 2


@pytest.mark.parametrize("text", ["", " "])
def test_t6_nothing_and_white_space_are_kept_as_they_are(tmp_path: Path, text: str) -> None:
    path = make_model(tmp_path / "m")
    hello_tokenizer(path)
    ids = [4, 0] if text else [0]

    async def body(engine: TransformersEngine) -> list[Completion]:
        _write_always(engine, ids)
        return await collect(engine, "r", [1, 2], 1, Sampling(8))

    (found,) = run_engine(path, body)
    assert (found.text, found.finish_reason, found.tokens) == (text, "stop", len(ids))
    assert found.ref.token_ids.tolist() == ids
    check_completion(load_oracle(path), [1, 2], found, 1.0)


def test_a_tokenizer_of_its_own_says_what_ends_a_sample_and_what_it_reads(tmp_path: Path) -> None:
    """`model.tokenizer`: the prompts' tokenizer is the answers' too."""
    path = make_model(tmp_path / "m")
    hello_tokenizer(tmp_path / "t", eos="hello")

    async def body(engine: TransformersEngine) -> list[Completion]:
        _write_always(engine, [0, 1, 3])
        return await collect(engine, "r", [1, 2], 1, Sampling(8))

    (found,) = run_engine(path, body, tokenizer_path=str(tmp_path / "t"))
    assert found.ref.token_ids.tolist() == [0, 1, 3]
    assert (found.text, found.finish_reason) == ("</s>he", "stop")


def _favour(path: Path, token: int) -> Path:
    """A model that answers nearly always with one token."""
    model = load_oracle(path)
    with torch.no_grad():
        model.lm_head.weight[token] = 0
        model.model.norm.weight.fill_(1.0)
        hidden = model.model(torch.arange(1, 40)[None]).last_hidden_state[0]
        model.lm_head.weight[token] = 40 * hidden.mean(0) / hidden.mean(0).norm()
        model.lm_head.weight[:token] *= 0.01
        model.lm_head.weight[token + 1 :] *= 0.01
    model.save_pretrained(path)
    return path


def test_eos_is_kept_and_an_empty_answer_is_a_sample(tmp_path: Path) -> None:
    """T2 and T6."""
    path = _favour(make_model(tmp_path / "m"), EOS)

    async def body(engine: TransformersEngine) -> list[Completion]:
        return await collect(engine, "r", [5, 6, 7], 3, Sampling(10, 0.0))

    for completion in run_engine(path, body):
        assert completion.ref.token_ids.tolist() == [EOS]
        assert (completion.text, completion.tokens) == ("", 1)
        assert completion.finish_reason == "stop"
        assert np.isfinite(completion.ref.logprobs).all()


def test_stop_token_ids_end_a_sample(models: dict[str, Path]) -> None:
    async def body(engine: TransformersEngine) -> tuple[list[Completion], list[Completion]]:
        free = await collect(engine, "a", [9, 8, 7], 1, Sampling(12, 0.0))
        wanted = int(free[0].ref.token_ids[3])
        sampling = Sampling(12, 0.0, stop_token_ids=(wanted,))
        return free, await collect(engine, "b", [9, 8, 7], 1, sampling)

    free, stopped = run_engine(models["qwen2"], body)
    tokens = free[0].ref.token_ids.tolist()
    end = tokens.index(tokens[3]) + 1
    assert stopped[0].ref.token_ids.tolist() == tokens[:end]
    assert stopped[0].finish_reason == "stop"


def test_importance_ratio_is_one_without_an_update(models: dict[str, Path]) -> None:
    """T4: the recorded log-probs are those of the distribution sampled from."""
    prompt = np.arange(10, 20)

    async def body(engine: TransformersEngine) -> list[Completion]:
        return await collect(engine, "r", prompt, 200, Sampling(4, 0.7))

    found = run_engine(models["llama"], body, seats=32)
    oracle = load_oracle(models["llama"])
    ratios, first = [], []
    for completion in found:
        ids = torch.from_numpy(completion.ref.token_ids.astype(np.int64))[:, None]
        expected = teacher_forced(oracle, prompt, completion.ref.token_ids, 0.7)
        ratios.extend((expected.gather(1, ids)[:, 0].numpy() - completion.ref.logprobs).tolist())
        first.append(int(ids[0]))
    assert abs(np.exp(ratios).mean() - 1) < 1e-4
    # The draws themselves follow that distribution: mean log-prob of the first token.
    likely = teacher_forced(oracle, prompt, [1], 0.7)[0].double()
    entropy = -(likely.exp() * likely).sum()
    spread = (likely.exp() * (likely + entropy) ** 2).sum().sqrt() / len(first) ** 0.5
    assert abs(likely[first].mean() + entropy) < 4 * spread + 1e-6


def test_too_long_is_refused_alone(models: dict[str, Path]) -> None:
    """T7: one sentence with numbers, and the others go on."""

    async def body(engine: TransformersEngine) -> list[Any]:
        return await asyncio.gather(
            collect(engine, "good", [1, 2, 3], 2, Sampling(20)),
            collect(engine, "long", [1] * 80, 2, Sampling(20)),
            collect(engine, "vocabulary", [1, 9999], 1, Sampling(2)),
            collect(engine, "cold", [1], 1, Sampling(2, -1.0)),
            collect(engine, "empty", [], 1, Sampling(2)),
            collect(engine, "good too", [4], 1, Sampling(95)),
            return_exceptions=True,
        )

    good, *refused, other = run_engine(models["llama"], body)
    assert (len(good), len(other)) == (2, 1)
    assert all(isinstance(error, RequestRefused) for error in refused)
    for number in ("80", "20", "100", "96", "long"):
        assert number in str(refused[0])


def test_the_model_limit_holds_too(models: dict[str, Path]) -> None:
    async def body(engine: TransformersEngine) -> None:
        with pytest.raises(RequestRefused, match="128"):
            await collect(engine, "r", [1] * 100, 1, Sampling(29))

    run_engine(models["llama"], body, max_context=1000)


def test_runs_repeat_and_replicas_differ(models: dict[str, Path]) -> None:
    async def body(engine: TransformersEngine) -> list[list[int]]:
        found = await collect(engine, "r", [1, 2, 3], 4, Sampling(12))
        return [c.ref.token_ids.tolist() for c in sorted(found, key=lambda c: c.index)]

    first = run_engine(models["llama"], body, seed=3, replica=0)
    assert run_engine(models["llama"], body, seed=3, replica=0) == first
    assert run_engine(models["llama"], body, seed=3, replica=1) != first
    assert run_engine(models["llama"], body, seed=4, replica=0) != first


def test_stop_strings_end_a_sample_at_the_token(models: dict[str, Path]) -> None:
    async def body(engine: TransformersEngine) -> list[tuple[str, Completion, Completion]]:
        cases = []
        for seed in range(6):
            prompt = np.random.default_rng(seed).integers(1, 257, 5)
            (free,) = await collect(engine, "a", prompt, 1, Sampling(30, 0.0))
            for stop in {free.text[4:6], free.text[10:11], free.text[7:12], "never there"}:
                if "\ufffd" not in stop and stop:
                    sampling = Sampling(30, 0.0, stop=("\u4e00\u4e01", stop))
                    cases.append((stop, free, *await collect(engine, "b", prompt, 1, sampling)))
        return cases  # type: ignore[return-value]

    cases = run_engine(models["llama"], body)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models["llama"])
    hits = 0
    for stop, free, ended in cases:
        tokens = free.ref.token_ids.tolist()
        texts = [tokenizer.decode(tokens[: i + 1]).rstrip("\ufffd") for i in range(len(tokens))]
        end = next((i + 1 for i, text in enumerate(texts) if stop in text), len(tokens))
        assert ended.ref.token_ids.tolist() == tokens[:end]
        if stop in free.text:
            hits += 1
            assert stop in ended.text
            assert ended.finish_reason == "stop"
    assert hits > 5


def test_stop_strings_of_several_bytes_and_of_many_tokens(models: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models["llama"])
    checker = StopStrings(lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    for text, stop in [("é 漢字\n漢😀x", "漢😀"), ("one\ntwo END", " END"), ("abcd\n\n", "\n\n")]:
        ids = tokenizer.encode(text)
        hits = [i for i in range(len(ids)) if checker.check(ids[: i + 1], (stop,))]
        end = len(tokenizer.encode(text[: text.index(stop) + len(stop)])) - 1
        assert hits[0] == end


def test_closing_the_iterator_frees_the_seats(models: dict[str, Path]) -> None:
    async def body(engine: TransformersEngine) -> tuple[Any, list[Completion]]:
        request = GenerateRequest("r", np.array([1, 2], np.int32), 20, Sampling(90))
        stream = engine.generate(request)
        waiter = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.02)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        await stream.aclose()
        for _ in range(200):
            health = await engine.health()
            if health.running == health.waiting == 0:
                break
            await asyncio.sleep(0.01)
        return health, await collect(engine, "next", [5], 3, Sampling(4))

    health, after = run_engine(models["llama"], body)
    assert (health.running, health.waiting, health.seats) == (0, 0, 8)
    assert len(after) == 3


@pytest.mark.parametrize("method", ["forward", "draw"])
def test_an_error_of_the_stepping_thread_reaches_everyone(
    models: dict[str, Path], method: str
) -> None:
    async def body(engine: TransformersEngine) -> None:
        class Broken(Exception):
            pass

        def broken(*_: Any, **__: Any) -> Any:
            raise Broken("out of luck")

        model = engine._stepper.model  # type: ignore[union-attr]
        waiting = [
            asyncio.ensure_future(collect(engine, str(i), [1, i], 4, Sampling(90)))
            for i in range(4)
        ]
        await asyncio.sleep(0.01)
        setattr(model, method, broken)
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, Broken)
        with pytest.raises(Broken):
            await collect(engine, "late", [1], 1, Sampling(2))
        with pytest.raises(Broken):
            await engine.health()

    run_engine(models["llama"], body)


def test_stop_aborts_with_what_there_is(models: dict[str, Path]) -> None:
    async def main() -> list[Completion]:
        engine = TransformersEngine(
            str(models["llama"]), max_context=128, seats=4, load_manifest=read_version
        )
        await engine.start()
        slow = engine._stepper.step  # type: ignore[union-attr]

        def step() -> None:
            time.sleep(0.005)
            slow()

        engine._stepper.step = step  # type: ignore[union-attr,method-assign]
        task = asyncio.ensure_future(collect(engine, "r", [1, 2], 6, Sampling(120)))
        await asyncio.sleep(0.1)
        await engine.stop()
        await engine.stop()
        with pytest.raises(RunFailed):
            await collect(engine, "late", [1], 1, Sampling(2))
        return await task

    found = asyncio.run(main())
    assert sorted(c.index for c in found) == list(range(6))
    assert [c.finish_reason for c in found if c.tokens == 0] == ["aborted", "aborted"]
    assert any(c.finish_reason == "aborted" and c.tokens for c in found)


def test_health_answers_while_a_step_runs(models: dict[str, Path]) -> None:
    async def body(engine: TransformersEngine) -> float:
        real = engine._stepper.step  # type: ignore[union-attr]

        def step() -> None:
            time.sleep(0.2)
            real()

        engine._stepper.step = step  # type: ignore[union-attr,method-assign]
        task = asyncio.ensure_future(collect(engine, "r", [1], 1, Sampling(2)))
        await asyncio.sleep(0.05)
        begun = time.perf_counter()
        await engine.health()
        spent = time.perf_counter() - begun
        await task
        return spent

    assert run_engine(models["llama"], body) < 0.05


def test_spans_cover_the_tokens(models: dict[str, Path]) -> None:
    async def body(engine: TransformersEngine) -> tuple[int, list[Any]]:
        found = await collect(engine, "r", [1, 2, 3], 8, Sampling(40))
        return sum(c.tokens for c in found), await engine.drain_spans()

    tokens, spans = run_engine(models["llama"], body, role="reward/judge", replica=2)
    assert sum(span.tokens for span in spans) == tokens
    assert {span.kind for span in spans} == {"prefill", "decode"}
    assert {(span.role, span.replica, span.version) for span in spans} == {("reward/judge", 2, 0)}
    for before, after in itertools.pairwise(spans):
        assert before.start <= before.end <= after.start + 1e-6
        if before.kind == after.kind:
            apart = not 0 <= after.start - before.end < GAP
            assert apart or after.end - before.start > LONGEST, "they would be one"


def test_wrong_weights_are_refused_and_generation_goes_on(
    models: dict[str, Path], tmp_path: Path
) -> None:
    manifest = write_version(models["qwen2"], tmp_path / "w.safetensors", 1, 1)

    async def body(engine: TransformersEngine) -> PolicyVersion:
        with pytest.raises(RunFailed, match=r"lacks|shape"):
            await engine.load(manifest)
        await collect(engine, "r", [1], 1, Sampling(2))
        return (await engine.health()).version

    # A Qwen2 file fits no Qwen3 engine, which notices before it touches anything.
    assert run_engine(models["qwen3-tied"], body) == PolicyVersion(0, 0)


def test_models_that_would_be_wrong_are_refused(tmp_path: Path) -> None:
    path = make_model(
        tmp_path / "m", "qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1
    )
    with pytest.raises(UserError, match="full attention"):
        run_engine(path, lambda engine: engine.health())
    with pytest.raises(UserError, match="nowhere"):
        run_engine(tmp_path / "nowhere", lambda engine: engine.health())


def test_a_burst_is_prefilled_together_and_shared_prefixes_once(models: dict[str, Path]) -> None:
    """64 requests of a judge with one template, and 4 x 3 samples of a policy."""
    template = np.arange(1, 41)

    async def body(engine: TransformersEngine) -> tuple[list[int], list[int]]:
        sizes: list[int] = []
        cache = engine._stepper.model.cache  # type: ignore[union-attr]
        plan = cache.plan

        def count(*args: Any) -> Any:
            found = plan(*args)
            sizes.append(found.tokens)
            return found

        cache.plan = count  # type: ignore[method-assign]
        greedy = Sampling(2, 0.0)
        prompts = [np.concatenate([template, [100 + i, 50]]) for i in range(64)]
        for _ in range(5):  # on a busy machine the engine may begin before all have come
            await asyncio.gather(*(collect(engine, "j", p, 1, greedy) for p in prompts))
            judge, sizes[:] = list(sizes), []
            if judge[0] > 40 + 2:
                break
        await asyncio.gather(*(collect(engine, "p", p, 3, greedy) for p in prompts[:4]))
        return judge, sizes

    judge, policy = run_engine(models["llama"], body, seats=64)
    assert judge[0] in (40 + n * 2 for n in range(2, 65)), "the template once, for all"
    assert sum(judge) < 2 * 40 + 64 * (2 + 2)
    assert policy[0] in (40 + n * 2 for n in range(1, 5))


def test_prefixes_are_computed_once_and_chunks_keep_their_order() -> None:
    random = np.random.default_rng(0)
    head, body = random.integers(0, 99, 12), random.integers(0, 99, 9)
    items = [
        (np.concatenate([head, body, [1]]), (0,)),
        (np.concatenate([head, body, [2, 3]]), (1, 2)),
        (np.concatenate([head, [7]]), (3,)),
        (random.integers(100, 200, 5), (4,)),
        (head, (5,)),
    ]
    segments = share_prefixes(items)
    assert sum(len(s.tokens) for s in segments) == 11 + 10 + 1 + 2 + 2 + 1 + 5
    for budget in (1, 3, 7, 1000):
        seen = {seat: [] for seat in range(6)}
        ends = {}
        for chunk in chunked(segments, budget):
            assert sum(len(s.tokens) for s in chunk) <= budget
            for segment in chunk:
                for seat in segment.seats:
                    assert len(seen[seat]) == segment.start
                    seen[seat].extend(segment.tokens.tolist())
                if segment.item >= 0:
                    ends[segment.item] = segment.seats
        assert all(seen[seat] == t.tolist() for t, seats in items for seat in seats)
        assert ends == {i: seats for i, (_, seats) in enumerate(items)}
