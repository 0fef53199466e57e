"""The policy loss: a clipped importance ratio on the engines' own behaviour log-probabilities.

The invariant: a step's loss is the mean over ALL its completion tokens. Each micro-batch adds
`terms.sum / tokens of the whole step`, so the gradient does not depend on how the step is cut.
Pure torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Natural-log ratios are clamped to +-20, beyond which exp() only makes infinities."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Sums over one micro-batch's T tokens; only `sum` carries a gradient.

    `sum` (scalar) is the sum of the tokens' losses; `clipped_count` (scalar) says at how many
    tokens the clipped branch won, which have no gradient; `ratios` (T,) are pi / mu.
    """

    sum: Tensor
    clipped_count: Tensor
    ratios: Tensor


def policy_loss(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    weights: Tensor | None = None,
    *,
    clip_low: float,
    clip_high: float,
) -> LossTerms:
    """PPO's clipped surrogate (arXiv 1707.06347) with separate bounds (arXiv 2503.14476), summed.

    Per token: -w * min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A), rho = pi / mu.

    Args:
        logprobs: (T,) natural log-probs of the sampled tokens under the trained weights, at the
            rollout's temperature (so that rho is 1 as long as the weights are the engine's).
        behaviour: (T,) what the engine recorded when it drew these tokens.
        advantages: (T,) the token's sample's advantage.
        weights: (T,) optional constant factors, e.g. a mask or an off-policy correction.
        clip_low: the ratio's distance below 1 at most, in (0, 1).
        clip_high: the ratio's distance above 1 at most, > 0.
    """
    log_ratio = torch.clamp(logprobs - behaviour, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = torch.exp(log_ratio)
    free = ratio * advantages
    held = torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages
    losses = -torch.minimum(free, held)
    if weights is not None:
        losses = losses * weights
    with torch.no_grad():
        clipped = (held < free).sum()
    return LossTerms(losses.sum(), clipped, ratio.detach())
