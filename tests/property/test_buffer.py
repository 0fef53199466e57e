"""Laws of the buffer; `test_buffer_simulation.py` tries to break the bound as a whole."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.buffer import Buffer, BufferStateError, feasible


def fill(buffer: Buffer, floor: int, step: int, start: int = 0) -> list[int]:
    """Admits as many as fit; returns their ordinals."""
    ordinal = start
    while buffer.can_admit(floor, step):
        buffer.admit(ordinal, 0, floor, step)
        ordinal += 1
    return list(range(start, ordinal))


@settings(deadline=None)
@given(st.integers(0, 4), st.integers(1, 5))
def test_at_the_trainers_floor_exactly_max_live_fit(bound: int, size: int) -> None:
    buffer = Buffer(bound, size)
    assert len(fill(buffer, 7, 7)) == buffer.max_live == (bound + 1) * size
    with pytest.raises(BufferStateError, match="does not fit"):
        buffer.admit(999, 0, 7, 7)


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 6))
def test_zero_staleness_is_synchronous(size: int, steps: int) -> None:
    buffer = Buffer(0, size)
    for step in range(steps):
        batch = fill(buffer, step, step, step * size)
        assert len(batch) == size
        assert [buffer.ready(o, 0) for o in batch[1:]] == [True] * (size - 1)
        assert buffer.take(step) is None
        assert buffer.stragglers(step) == batch[:1]
        buffer.ready(batch[0], 0)
        assert buffer.take(step) == batch
        assert not buffer.can_admit(step, step + 1)  # not before the floor rose


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=9),
)
def test_take_and_stragglers_against_brute_force(size: int, wanted: list[tuple[int, bool]]) -> None:
    buffer, groups = Buffer(9, size), dict[int, tuple[int, bool]]()
    for ordinal, (deadline, ready) in enumerate(wanted):
        if feasible(sorted([d for d, _ in groups.values()] + [deadline]), 0, size):
            buffer.restore(ordinal, 0, deadline, 0, ready=ready)
            groups[ordinal] = deadline, ready

    def goes(extra: tuple[int, ...]) -> bool:
        able = [o for o, (_, ready) in groups.items() if ready or o in extra]
        return any(
            feasible(sorted(due for o, (due, _) in groups.items() if o not in chosen), 1, size)
            for chosen in combinations(able, size)
        )

    stragglers = buffer.stragglers(0)
    unready = [o for o, (_, ready) in groups.items() if not ready]
    if len(groups) >= size:
        assert goes(tuple(stragglers))
        fewer = combinations(unready, max(0, len(stragglers) - 1))
        assert not stragglers or not any(goes(extra) for extra in fewer)
    else:
        assert sorted(stragglers) == unready
    can = goes(())
    batch = buffer.take(0)
    assert (batch is not None) == can
    if batch is not None:
        assert feasible(sorted(d for o, (d, _) in groups.items() if o not in batch), 1, size)
        assert not stragglers


def test_fencing_and_retry_keep_the_place() -> None:
    buffer = Buffer(2, 1)
    fill(buffer, 0, 0)
    buffer.ready(1, 0)
    assert buffer.take(0) == [1]  # overtakes 0
    assert buffer.retry(0, 0, 1) == 3  # its tokens now come from version 1 on
    assert not buffer.ready(0, 0)
    assert not buffer.discard(0, 0)
    assert buffer.retry(0, 1, 1, keeps_tokens=True) == 3
    assert buffer.ready(0, 2)
    with pytest.raises(BufferStateError, match="attempt 2"):
        buffer.retry(0, 0)
    with pytest.raises(BufferStateError, match="floor fell"):
        buffer.can_admit(0, 1)
    with pytest.raises(BufferStateError, match="live already"):
        buffer.admit(2, 0, 1, 1)
    with pytest.raises(BufferStateError, match="ahead of the next step"):
        buffer.can_admit(2, 1)
    with pytest.raises(BufferStateError, match="step fell from 1 to 0"):
        buffer.take(0)
    with pytest.raises(BufferStateError, match="next step fell"):
        buffer.can_admit(1, 0)
    assert buffer.snapshot().slack == 1  # 2 and 0, due at 2 and 3, at step 1


def test_a_retry_that_keeps_tokens_keeps_its_deadline() -> None:
    buffer = Buffer(2, 1)
    fill(buffer, 0, 0)
    buffer.ready(1, 0)
    buffer.take(0)
    assert buffer.retry(0, 0, 1, keeps_tokens=True) == buffer.deadline(0) == 2
    assert buffer.retry(0, 1, 1) == buffer.deadline(0) == 3


def test_after_restore_a_retry_may_not_steal_time() -> None:
    buffer = Buffer(1, 1)
    buffer.restore(0, 0, 42, 41, ready=False)
    buffer.restore(1, 3, 41, 41, ready=True)
    assert not buffer.can_admit(40, 41)
    with pytest.raises(BufferStateError, match="from step 42 to 41"):
        buffer.retry(0, 0, 40)
    assert buffer.take(41) == [1]
    assert buffer.live() == 1


def test_w2_straggler_of_100_times_the_median() -> None:
    """Steps go on up to the window; the straggler is waited for, discarded by name; steps go on."""
    buffer, step, following = Buffer(2, 2), 0, 0
    while True:
        for ordinal in fill(buffer, step, step, following):
            following = ordinal + 1
            if ordinal != 0:
                buffer.ready(ordinal, 0)
        batch = buffer.take(step)
        if batch is None:
            break
        step += 1
    assert step == 2  # it was admitted at floor 0: step 2 is the last that may train it
    assert buffer.stragglers(step) == [0]
    assert buffer.discard(0, 0)
    for _ in range(5):
        for ordinal in fill(buffer, step, step, following):
            following = ordinal + 1
            buffer.ready(ordinal, 0)
        assert buffer.take(step) is not None
        step += 1


def test_w1_last_batch_may_be_smaller() -> None:
    buffer = Buffer(1, 4)
    for ordinal in range(3):
        buffer.admit(ordinal, 0, 0, 0)
        buffer.ready(ordinal, 0)
    assert buffer.take(0) is None
    buffer.retry(1, 0)
    assert buffer.take(0, final=True) is None
    assert buffer.stragglers(0) == [1]
    buffer.discard(1, 1)
    assert buffer.take(0, final=True) == [0, 2]
    assert buffer.take(1, final=True) == []
