"""The oracle: plain synchronous GRPO on recorded samples, in one file, knowing nothing of Offbeat.

Read it top to bottom: a step's groups become advantages, samples become padded micro-batches,
the clipped loss is averaged over all tokens of the step, AdamW moves the weights. The trainer of
the framework must end with the very same bits (`train.prefix_sharing = false`, float32, one
thread), so every operation that rounds is done in the same order here.

    steps = [                                  # one entry a training step
        [                                      # its groups
            (prompt_ids, [(token_ids, behaviour_logprobs, reward_or_None), ...]),
        ],
    ]
    weights = train("path/to/model", steps, Settings(learning_rate=1e-3))
"""

import math
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM


@dataclass
class Settings:
    algorithm: str = "grpo"  # grpo, dr_grpo, rloo
    temperature: float = 1.0
    learning_rate: float = 5e-6
    warmup_steps: int = 5
    schedule: str = "constant"  # constant, linear, cosine
    total_steps: int | None = None  # default: as many as are recorded
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    advantage_eps: float = 1e-4
    min_scored: int = 2
    tokens_per_micro_batch: int = 4096
    skip_no_signal: bool = True  # samples of advantage 0 are not computed


def advantages_of(rewards, s):
    """One number a sample, None where it has no reward."""
    present = [float(r) for r in rewards if r is not None]
    n = len(present)
    if n < max(2, s.min_scored) or min(present) == max(present):
        return [None if r is None else 0.0 for r in rewards]
    mean = math.fsum(present) / n
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in present) / (n - 1))
    scale = n / (n - 1) if s.algorithm == "rloo" else 1.0  # r - mean of the others
    spread = std + s.advantage_eps if s.algorithm == "grpo" else 1.0
    return [None if r is None else (r - mean) * scale / spread for r in rewards]


def rate_of(update, total, s):
    if update < s.warmup_steps:
        return s.learning_rate * (update + 1) / s.warmup_steps
    after = max(1, total - s.warmup_steps)
    passed = min(update - s.warmup_steps, after - 1) / after
    if s.schedule == "linear":
        return s.learning_rate * (1.0 - passed)
    if s.schedule == "cosine":
        return s.learning_rate * 0.5 * (1.0 + math.cos(math.pi * passed))
    return s.learning_rate


def micro_batches_of(rows, budget):
    """Longest first; as many rows as fit when all are padded to the first one's width.

    A row reads prompt + completion without its last token, which predicts nothing.
    """
    cuts, width = [], 0
    for row in sorted(rows, key=lambda row: -(len(row[0]) + len(row[1]))):
        if cuts and (len(cuts[-1]) + 1) * width <= budget:
            cuts[-1].append(row)
        else:
            cuts.append([row])
            width = len(row[0]) + len(row[1]) - 1
    return cuts


def logprobs_of(model, rows, temperature):
    """Log-probs of all completion tokens, row after row, in one flat tensor."""
    width = max(len(prompt) + len(answer) - 1 for prompt, answer, *_ in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    predicting, targets = [], []
    for i, (prompt, answer, *_) in enumerate(rows):
        ids[i, : len(prompt) + len(answer) - 1] = torch.tensor([*prompt, *answer[:-1]])
        predicting += [i * width + len(prompt) - 1 + t for t in range(len(answer))]
        targets += answer
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # causal: pads unseen
    logits = model.lm_head(hidden.reshape(-1, hidden.shape[-1])[torch.tensor(predicting)])
    if temperature != 1.0:
        logits = logits / temperature
    every = torch.arange(len(targets))
    return logits[every, torch.tensor(targets)] - torch.logsumexp(logits, dim=-1)


def loss_of(model, rows, tokens, s):
    """Sum of the rows' token losses over the number of tokens of the whole step."""
    logprobs = logprobs_of(model, rows, s.temperature)
    behaviour = torch.tensor([x for row in rows for x in row[2]], dtype=torch.float32)
    advantage = torch.tensor([row[3] for row in rows for _ in row[1]], dtype=torch.float32)
    ratio = torch.exp(torch.clamp(logprobs - behaviour, -20.0, 20.0))
    held = torch.clamp(ratio, 1.0 - s.clip_low, 1.0 + s.clip_high)
    return -torch.minimum(ratio * advantage, held * advantage).sum() / tokens


def train(model_dir, steps, s=None, after_step=None):
    """Trains on the recorded steps; returns the state dict. `after_step(number, model)` watches."""
    s = s or Settings()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()  # no dropout: log-probs must be those of generation
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=s.betas, weight_decay=s.weight_decay, fused=True
    )
    total = s.total_steps or len(steps)
    for number, groups in enumerate(steps):
        rows, tokens = [], 0
        for prompt, samples in groups:
            values = advantages_of([reward for _, _, reward in samples], s)
            for (answer, behaviour, _), advantage in zip(samples, values, strict=True):
                if advantage is None:
                    continue
                tokens += len(answer)
                if advantage != 0.0 or not s.skip_no_signal:
                    prompt_ids = [int(t) for t in prompt]
                    answer_ids = [int(t) for t in answer]
                    rows.append((prompt_ids, answer_ids, [float(x) for x in behaviour], advantage))
        if rows:
            for micro_batch in micro_batches_of(rows, s.tokens_per_micro_batch):
                loss_of(model, micro_batch, tokens, s).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), s.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = rate_of(number, total, s)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if after_step is not None:
            after_step(number, model)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
