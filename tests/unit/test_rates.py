"""A changed learning rate holds for steps whose batch was recorded after the change."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from trainer_cases import make_config, make_model

from offbeat.rates import Rate, ended, pack_rates, rate_of, unpack_rates
from offbeat.train.trainer import Trainer

CHANGES = st.lists(
    st.tuples(st.integers(0, 12), st.sampled_from([1e-5, 3e-5, 1e-4]), st.sampled_from([9, 12])),
    max_size=6,
)


def changed(rates: tuple[Rate, ...], at: int, learning_rate: float, steps: int) -> tuple[Rate, ...]:
    return (*ended(rates, at), Rate(None, learning_rate, steps))


@given(changes=CHANGES, step=st.integers(0, 15))
def test_each_step_has_the_rate_of_the_last_change_before_it(
    changes: list[tuple[int, float, int]], step: int
) -> None:
    """Changes may come at an earlier step than one before: its steps were not trained then."""
    rates: tuple[Rate, ...] = (Rate(None, 1.0, 5),)
    expected = (1.0, 5)
    for at, learning_rate, steps in changes:
        rates = changed(rates, at, learning_rate, steps)
        if step >= at:
            expected = (learning_rate, steps)
    found = rate_of(rates, step)
    assert found is not None
    assert (found.learning_rate, found.total_steps) == expected
    untils = [rate.until for rate in rates[:-1]]
    assert untils == sorted(set(untils)), "each says of some steps, in their order"
    assert unpack_rates(pack_rates(rates)) == rates


def test_resumes_without_a_change_do_not_lengthen_the_list() -> None:
    rates: tuple[Rate, ...] = ()
    for step in range(1, 50):
        rates = ended((*rates, Rate(None, 1e-4, 100)), step)
    assert rates == (Rate(49, 1e-4, 100),)


def test_the_trainer_takes_the_rate_of_its_step(tmp_path: Path) -> None:
    config = make_config(make_model(tmp_path / "model"), learning_rate=1e-3, warmup_steps=0)
    rates = (Rate(2, 0.5, 10), Rate(3, 0.25, 10))
    trainer = Trainer(
        config, total_steps=10, publish_folder=tmp_path / "weights", run_id="rates", rates=rates
    )
    found = []
    for step in range(5):
        trainer._step = trainer._updates = step
        found.append(trainer._learning_rate())
    assert found == [0.5, 0.5, 0.25, 1e-3, 1e-3]
