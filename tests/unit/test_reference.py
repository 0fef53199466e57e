"""The trainer against the oracle in tests/reference_grpo.py, on the same recorded samples."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from reference_grpo import Settings, train
from trainer_cases import make_model, make_trainer, record_steps, to_batch

from offbeat.train.model import PolicyModel

STEPS = record_steps(5, groups=5, size=6, seed=1)
CASES = {
    "plain": {},
    "cut": {"tokens_per_micro_batch": 60},
    "rloo": {"algorithm": "rloo", "schedule": "cosine", "warmup_steps": 0},
    "untied": {"algorithm": "dr_grpo", "schedule": "linear", "weight_decay": 0.1},
    "hot": {"temperature": 1.4, "max_grad_norm": 1e-3, "clip_high": 0.28},
    "all": {"on_no_signal": "train"},
}


def trained(model: Path, steps, **settings):
    trainer = make_trainer(model, total_steps=len(steps), **settings)
    trainer.setup()
    for number, step in enumerate(steps):
        assert trainer.step(*to_batch(number, step)).applied
    trainer.close()
    return dict(trainer.model.module.state_dict())


@pytest.mark.parametrize("case", CASES)
def test_the_trainer_ends_with_the_bits_of_the_plain_loop(tmp_path, case):
    settings = {"learning_rate": 1e-3, "warmup_steps": 2} | CASES[case]
    model = make_model(tmp_path / "actor", tied=case != "untied")
    others = {k: v for k, v in settings.items() if k != "on_no_signal"}
    expected = train(
        model, STEPS, Settings(**others, skip_no_signal=settings.get("on_no_signal") != "train")
    )
    initial = PolicyModel(model, device=torch.device("cpu"), dtype="float32", temperature=1.0)
    start = initial.module.state_dict()
    found = trained(model, STEPS, prefix_sharing=False, **settings)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert not torch.equal(start[name], tensor), name


def test_sharing_prefixes_ends_within_rounding_of_the_plain_loop(tmp_path):
    """A small rate: AdamW divides by the gradient's size, so rounding grows where that is 0."""
    model = make_model(tmp_path / "actor")
    expected = train(model, STEPS, Settings(learning_rate=1e-4, warmup_steps=2))
    found = trained(model, STEPS, learning_rate=1e-4, warmup_steps=2, prefix_sharing=True)
    gap = torch.cat([(found[n] - t).reshape(-1) for n, t in expected.items()]).norm()
    assert gap <= 1e-5 * torch.cat([t.reshape(-1) for t in expected.values()]).norm()


def test_the_reference_stays_one_short_file_of_its_own():
    text = (Path(__file__).resolve().parents[1] / "reference_grpo.py").read_text()
    assert len(text.splitlines()) < 200
    assert "import offbeat" not in text
    assert "from offbeat" not in text
