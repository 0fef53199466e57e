from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.train.batching import Trajectory, ancestor_mask, plan

# few ids and short lengths: equal prefixes, equal samples and prompts inside answers are common
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6)
step = st.lists(st.tuples(tokens, tokens), min_size=1, max_size=12)


def trajectories(pairs):
    return [Trajectory(np.array(p, np.int32), np.array(c, np.int32)) for p, c in pairs]


def contexts(micro):
    """For each trained token of a micro-batch: the tokens that its prediction may read."""
    ids, positions = micro.input_ids, micro.position_ids
    width = ids.shape[1]
    mask = np.tril(np.ones((width, width), bool)) if micro.ends is None else None
    mask = ancestor_mask(micro.ends) if mask is None else mask
    for place in micro.rows[micro.token_rows]:
        row, column = divmod(int(place), width)
        seen = np.flatnonzero(mask[column])
        assert positions[row, seen].tolist() == list(range(len(seen)))
        yield ids[row, seen].tolist()


@settings(max_examples=100, deadline=None)
@given(step, st.integers(1, 40), st.booleans(), st.sampled_from([None, 1, 100]))
def test_every_token_is_predicted_once_from_exactly_its_own_prefix(
    pairs, budget, sharing, hidden_size
):
    samples = trajectories(pairs)
    expected = [(p + c[:t], c[t]) for p, c in pairs for t in range(len(c))]
    found = {}
    micros = plan(
        samples,
        tokens_per_micro_batch=budget,
        prefix_sharing=sharing,
        hidden_size=hidden_size,
    )
    for micro in micros:
        assert (np.diff(micro.token_rows) >= 0).all()
        trained = zip(micro.source, contexts(micro), micro.targets, strict=True)
        for source, context, target in trained:
            assert int(source) not in found
            found[int(source)] = (context, int(target))
    assert [found[i] for i in range(len(expected))] == expected
    assert len(found) == len(expected)


@settings(max_examples=50, deadline=None)
@given(step, st.integers(1, 40))
def test_a_trie_holds_each_distinct_prefix_once_and_keeps_the_budget(pairs, budget):
    samples = trajectories(pairs)
    longest = max(len(sample.inputs) for sample in samples)
    for micro in plan(samples, tokens_per_micro_batch=budget, prefix_sharing=True):
        assert micro.computed == micro.input_ids.size <= max(budget, longest)
        mask = ancestor_mask(micro.ends)
        paths = {tuple(micro.input_ids[0, mask[i]]) for i in range(micro.computed)}
        assert len(paths) == micro.computed
    (whole,) = plan(samples, tokens_per_micro_batch=10_000, prefix_sharing=True)
    inputs = [(p + c)[:-1] for p, c in pairs]
    assert whole.computed == len({tuple(s[:n]) for s in inputs for n in range(1, len(s) + 1)})


@settings(max_examples=50, deadline=None)
@given(step, st.integers(1, 40))
def test_padded_rows_keep_the_budget_longest_first(pairs, budget):
    samples = trajectories(pairs)
    micros = plan(samples, tokens_per_micro_batch=budget, prefix_sharing=False)
    for micro in micros:
        rows, width = micro.input_ids.shape
        assert rows == 1 or rows * width <= budget
    widths = [micro.input_ids.shape[1] for micro in micros]
    assert widths == sorted(widths, reverse=True)
    assert sum(len(micro.input_ids) for micro in micros) == len(samples)


def test_the_case_that_sharing_is_for():
    rng = np.random.default_rng(0)
    head = rng.integers(0, 49_000, 27)
    samples = []
    for _ in range(8):
        prompt = np.concatenate([head, rng.integers(0, 49_000, 12)]).astype(np.int32)
        samples += [Trajectory(prompt, rng.integers(0, 9, 3).astype(np.int32)) for _ in range(8)]
    (shared,) = plan(samples, tokens_per_micro_batch=4096, prefix_sharing=True)
    (padded,) = plan(samples, tokens_per_micro_batch=4096, prefix_sharing=False)
    assert padded.input_ids.size == 64 * 41
    assert shared.computed < 27 + 8 * 12 + 64 * 2


@pytest.mark.parametrize(
    ("prompt", "answer", "shares"), [(40, 16, True), (1000, 100, True), (10, 600, False)]
)
def test_prefixes_are_shared_only_where_that_is_cheaper(prompt, answer, shares):
    rng = np.random.default_rng(0)
    head = rng.integers(0, 99, prompt).astype(np.int32)
    samples = [Trajectory(head, rng.integers(0, 99, answer).astype(np.int32)) for _ in range(8)]
    micros = plan(samples, tokens_per_micro_batch=4096, prefix_sharing=True, hidden_size=256)
    assert {micro.ends is not None for micro in micros} == {shares}


def test_empty_prompts_and_completions_are_refused():
    for pair in (([], [1]), ([1], [])):
        with pytest.raises(ValueError, match="sample 0"):
            plan(trajectories([pair]), tokens_per_micro_batch=8, prefix_sharing=True)
