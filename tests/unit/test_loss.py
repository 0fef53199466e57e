from __future__ import annotations

import math

import pytest
import torch

from offbeat.loss import MAX_LOG_RATIO, policy_loss

CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def terms_at(ratios: list[float], advantages: list[float], weights: torch.Tensor | None = None):
    behaviour = torch.full((len(ratios),), -1.0)
    logprobs = (behaviour + torch.log(torch.tensor(ratios))).requires_grad_()
    terms = policy_loss(logprobs, behaviour, torch.tensor(advantages), weights, **CLIP)
    terms.sum.backward()
    return terms, logprobs.grad


def test_unchanged_weights_give_ratio_one_and_the_policy_gradient():
    terms, grad = terms_at([1.0, 1.0], [2.0, -3.0])
    assert terms.ratios.tolist() == [1.0, 1.0]
    assert terms.clipped_count.item() == 0
    assert grad.tolist() == [-2.0, 3.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.25, 1.0, -1.25, -1.25),  # inside the upper bound
        (1.5, 1.0, -1.3, 0.0),  # beyond it: held at 1 + clip_high
        (1.5, -1.0, 1.5, 1.5),  # too likely and bad: pushed back in full
        (0.5, -1.0, 0.8, 0.0),  # already unlikely: held at 1 - clip_low
        (0.5, 1.0, -0.5, -0.5),
    ],
)
def test_clipping_is_asymmetric_and_pessimistic(ratio, advantage, loss, slope):
    terms, grad = terms_at([ratio], [advantage])
    assert terms.sum.item() == pytest.approx(loss, rel=1e-6)
    assert grad.item() == pytest.approx(slope, rel=1e-6)
    assert terms.clipped_count.item() == (slope == 0.0)


def test_the_sum_is_additive_over_cuts_and_weights_mask():
    ratios, advantages = [0.5, 1.1, 2.0, 0.9], [1.0, -1.0, 0.5, 2.0]
    whole = terms_at(ratios, advantages)[0].sum.item()
    parts = sum(terms_at(ratios[i : i + 2], advantages[i : i + 2])[0].sum.item() for i in (0, 2))
    assert parts == pytest.approx(whole, rel=1e-6)
    masked, grad = terms_at(ratios, advantages, torch.tensor([1.0, 0.0, 0.0, 1.0]))
    assert masked.sum.item() == pytest.approx(-0.5 - 1.8, rel=1e-6)
    assert grad[1:3].tolist() == [0.0, 0.0]


def test_an_absurd_ratio_stays_finite_and_nan_is_not_hidden():
    behaviour = torch.tensor([-200.0, -1.0])
    logprobs = torch.tensor([-1.0, float("nan")])
    terms = policy_loss(logprobs, behaviour, torch.tensor([-1.0, 1.0]), **CLIP)
    assert terms.ratios[0].item() == pytest.approx(math.exp(MAX_LOG_RATIO))
    assert math.isnan(terms.sum.item())
