from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))
from trainer_cases import (
    EOS,
    gradient_of,
    make_model,
    make_trainer,
    record_steps,
    to_batch,
    weights_of,
)

from offbeat.errors import RunFailed, UserError
from offbeat.records import PolicyVersion
from offbeat.track.recorder import reward_record
from offbeat.train import checkpoint
from offbeat.train.batching import Trajectory, plan
from offbeat.train.trainer import learning_rate
from offbeat.weights.transport import load_manifest

STEPS = record_steps(6)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "actor")


@pytest.fixture
def start(model):
    """Makes trainers that are set up, and closes them."""
    made = []

    def make(**settings):
        resume_from = settings.pop("resume_from", None)
        trainer = make_trainer(settings.pop("model", model), **settings)
        made.append(trainer)
        trainer.setup(resume_from)
        return trainer

    yield make
    for trainer in made:
        trainer.close()


def test_the_mean_reward_is_the_recorders_to_the_bit(start):
    """What `offbeat replay` compares."""
    trainer = start()
    for step, recorded in enumerate(STEPS):
        batch, payloads = to_batch(step, recorded)
        means, _ = reward_record(batch)
        assert trainer.step(batch, payloads).reward_mean == means["total"]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def logprob_by_hand(model, prompt, answer, temperature=1.0):
    """The slow truth: one sample alone, all logits."""
    ids = torch.tensor([[*prompt, *answer]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_log_probs_are_those_of_each_sample_alone_at_the_temperature(
    tmp_path, start, family, tied, sharing
):
    path = make_model(tmp_path / family, family, tied)
    trainer = start(model=path, prefix_sharing=sharing, temperature=0.7)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    samples = [(p, a) for p, rest in STEPS[0] for a, _, _ in rest]
    expected = torch.cat([logprob_by_hand(plain, p, a, 0.7) for p, a in samples])
    trajectories = [Trajectory(np.array(p, np.int32), np.array(a, np.int32)) for p, a in samples]
    found = torch.full_like(expected, math.nan)
    for micro in plan(trajectories, tokens_per_micro_batch=60, prefix_sharing=sharing):
        found[torch.from_numpy(micro.source)] = trainer.model.logprobs(micro).detach()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("sharing", [False, True])
def test_bfloat16_computes_near_float32_and_keeps_float32_weights(tmp_path, start, sharing):
    batch, payloads = to_batch(0, STEPS[0])
    exact, _ = gradient_of(start(prefix_sharing=sharing), batch, payloads)
    trainer = start(prefix_sharing=sharing, dtype="bfloat16")
    rough, _ = gradient_of(trainer, batch, payloads)
    assert exact.dtype == rough.dtype == torch.float32
    assert 0 < (exact - rough).norm() <= 0.2 * exact.norm()
    assert {t.dtype for t in trainer.model.tensors()[0].values()} == {torch.float32}


def test_blocks_of_logits_change_nothing(start, monkeypatch):
    batch, payloads = to_batch(0, STEPS[0])
    whole, _ = gradient_of(start(), batch, payloads)
    monkeypatch.setattr("offbeat.train.model.LOGITS_AT_ONCE", 5 * 64)
    blocks, _ = gradient_of(start(), batch, payloads)
    assert (whole - blocks).norm() <= 1e-5 * whole.norm()


def test_t5_the_gradient_is_the_same_however_the_step_is_cut(start):
    batch, payloads = to_batch(0, STEPS[0])
    grads, counts, losses = [], [], []
    for sharing, budget in [(False, 10**6), (False, 100), (False, 45), (True, 10**6), (True, 20)]:
        trainer = start(prefix_sharing=sharing, tokens_per_micro_batch=budget)
        grad, result = gradient_of(trainer, batch, payloads)
        grads.append(grad)
        counts.append(result.micro_batches)
        losses.append(result.loss)
    assert counts == [1, 2, 4, 1, 4]
    for grad, loss in zip(grads, losses, strict=True):
        assert (grad - grads[0]).norm() <= 1e-5 * grads[0].norm()
        assert loss == pytest.approx(losses[0], rel=1e-5, abs=1e-6)


def test_t2_final_eos_is_trained_and_padding_is_not(start, model):
    """Pad = eos. The gradient equals that of each sample alone, where there is no padding."""
    recorded = [([5, 6, 7], [([8, EOS], [-4.0] * 2, 1.0), ([9, 10, 11, 12, EOS], [-4.0] * 5, 0.0)])]
    batch, payloads = to_batch(0, recorded)
    trainer = start(prefix_sharing=False, clip_high=1e6, clip_low=0.999)
    grad, result = gradient_of(trainer, batch, payloads)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    loss = 0.0
    for sign, answer in ((1.0, [8, EOS]), (-1.0, [9, 10, 11, 12, EOS])):
        ratio = torch.exp(logprob_by_hand(plain, [5, 6, 7], answer) + 4.0)
        advantage = sign * 0.5 / (math.sqrt(0.5) + 1e-4)
        loss = loss - (ratio * advantage).sum() / 7
    loss.backward()
    expected = torch.cat([p.grad.reshape(-1) for p in plain.parameters()])
    assert result.tokens == 7
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    assert (grad - expected).norm() <= 1e-5 * expected.norm()


def test_t4_with_unchanged_weights_the_ratio_is_one(start, model):
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    step = [
        (p, [(a, logprob_by_hand(plain, p, a, 1.3).tolist(), r) for a, _, r in rest])
        for p, rest in STEPS[0]
    ]
    result = start(temperature=1.3).step(*to_batch(0, step))
    assert result.ratio_mean == pytest.approx(1.0, abs=1e-5)
    assert result.ratio_outside == result.clip_fraction == 0.0
    assert result.logprob_diff_max < 1e-4
    assert 0 <= result.logprob_diff_mean <= result.logprob_diff_p99 <= result.logprob_diff_max


def test_the_mismatch_is_under_the_weights_that_made_the_tokens(start, model):
    """The policy has moved on; the recorded log-probs are those of version 0, and of version 1."""
    trainer = start(max_staleness=2, learning_rate=1e-2, warmup_steps=0)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def recorded(step):
        return [
            (p, [(a, logprob_by_hand(plain, p, a).tolist(), r) for a, _, r in rest])
            for p, rest in STEPS[step]
        ]

    first = trainer.step(*to_batch(0, recorded(0)))
    trainer.publish()
    second = trainer.step(*to_batch(1, recorded(1), version=0))
    plain.load_state_dict(load_manifest(trainer.publish()))
    third = trainer.step(*to_batch(2, recorded(2)))
    for result in (first, second, third):
        assert result.logprob_diff_max < 1e-4
        assert result.logprob_diff_exact
        assert result.logprob_diff_tokens > 0
        assert result.logprob_diff_outside == 0
    assert second.ratio_outside > 0.5  # what the policy's change alone does
    assert first.drift is third.drift is None
    assert set(second.staleness) == {1}


def test_the_mismatch_is_finite_where_the_versions_are_gone(start):
    trainer = start(max_staleness=4)
    for step in range(5):
        trainer.step(*to_batch(step, STEPS[step]))
        trainer.publish()
    result = trainer.step(*to_batch(5, STEPS[5], version=1))
    assert math.isfinite(result.logprob_diff_mean)
    assert not result.logprob_diff_exact


def test_the_mismatch_is_finite_without_signal(start):
    flat = [(p, [(a, x, 1.0) for a, x, _ in rest]) for p, rest in STEPS[0]]
    result = start().step(*to_batch(0, flat))
    assert result.computed == 0
    assert math.isfinite(result.logprob_diff_mean)
    assert result.logprob_diff_exact


def test_comparing_changes_no_bit_of_training(start, monkeypatch):
    """Version 0 is put in and out of the model at every step, also where that fails."""
    with_probe, without = start(max_staleness=9), start(max_staleness=9)
    monkeypatch.setattr("offbeat.train.probe.TIME_SHARE", 1e9)
    monkeypatch.setattr(without._meter, "_probe", lambda *args: args[2])
    for step in range(4):
        found = with_probe.step(*to_batch(step, STEPS[step], version=0))
        assert found.logprob_diff_exact
        assert without.step(*to_batch(step, STEPS[step], version=0)).logprob_diff_exact == (
            step < 1
        )
    before = weights_of(with_probe)

    def fail(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("offbeat.train.probe.evaluate", fail)
    assert same(before, weights_of(without))
    for trainer in (with_probe, without):
        trainer.step(*to_batch(4, STEPS[4], version=0))
    assert same(weights_of(with_probe), weights_of(without))
    assert not same(before, weights_of(without))


def test_g1_a_group_of_one_gives_no_signal_and_no_nan(start):
    trainer = start(on_no_signal="train")
    before = weights_of(trainer)
    result = trainer.step(*to_batch(0, [([5, 6], [([7, EOS], [-4.0, -4.0], 0.7)])]))
    assert result.applied
    assert result.no_signal == (0,)
    assert result.loss == result.grad_norm == 0.0
    assert result.computed > 0
    assert same(before, weights_of(trainer))


def test_g5_dropped_samples_shift_no_other(start):
    prompt = [5, 6, 7]
    samples = [([8 + j, EOS], [-4.0, -4.0], float(j)) for j in range(8)]
    holes = [(a, p, None if j in (0, 3, 4) else r) for j, (a, p, r) in enumerate(samples)]
    kept = [s for s in holes if s[2] is not None]
    with_holes, result = gradient_of(start(), *to_batch(0, [(prompt, holes)]))
    without, expected = gradient_of(start(), *to_batch(0, [(prompt, kept)]))
    assert torch.equal(with_holes, without)
    assert result.tokens == expected.tokens == 10
    assert len(result.staleness) == 5


def test_skipped_samples_count_in_the_mean_all_the_same(start):
    batch, payloads = to_batch(0, STEPS[0])
    skipped, a = gradient_of(start(on_no_signal="skip"), batch, payloads)
    trained, b = gradient_of(start(on_no_signal="train"), batch, payloads)
    assert (skipped - trained).norm() <= 1e-5 * trained.norm()
    rewarded = [s for _, rest in STEPS[0] for s in rest if s[2] is not None]
    assert a.tokens == b.tokens == sum(len(answer) for answer, _, _ in rewarded)
    assert a.computed < b.computed
    assert a.no_signal == b.no_signal == (3,)
    assert a.loss == pytest.approx(b.loss, rel=1e-5)


def test_g4_a_run_without_signal_ends_and_says_so(start):
    flat = [(p, [(a, x, 1.0) for a, x, _ in rest]) for p, rest in STEPS[0]]
    trainer = start(max_no_signal_steps=3)
    before = weights_of(trainer)
    for step in range(2):
        result = trainer.step(*to_batch(step, flat))
        assert result.applied
        assert len(result.no_signal) == 4
        assert math.isnan(result.ratio_mean)
    trainer.step(*to_batch(2, STEPS[0]))  # a signal: counted anew
    moved = weights_of(trainer)
    assert not same(before, moved)
    trainer.step(*to_batch(3, flat))
    trainer.step(*to_batch(4, flat))
    with pytest.raises(RunFailed, match=r"3 steps.*max_no_signal_steps.*signal was 2"):
        trainer.step(*to_batch(5, flat))
    assert same(moved, weights_of(trainer))  # momentum alone moves nothing


def test_a_non_finite_step_changes_nothing_but_the_number(start):
    bad = [(p, [(a, [math.nan] * len(x), r) for a, x, r in rest]) for p, rest in STEPS[0]]
    trainer, clean = start(max_bad_steps=2, warmup_steps=6), start(warmup_steps=6)
    trainer.step(*to_batch(0, STEPS[0]))
    clean.step(*to_batch(0, STEPS[0]))
    before = weights_of(trainer)
    result = trainer.step(*to_batch(1, bad))
    assert not result.applied
    assert math.isnan(result.loss)
    assert same(before, weights_of(trainer))
    assert trainer.version == PolicyVersion(0, 2)
    after = trainer.step(*to_batch(2, STEPS[2]))
    expected = clean.step(*to_batch(1, STEPS[2]))
    assert after.learning_rate == expected.learning_rate == result.learning_rate
    assert trainer.step(*to_batch(3, STEPS[3])).learning_rate > after.learning_rate
    clean.step(*to_batch(2, STEPS[3]))
    assert same(weights_of(trainer), weights_of(clean))
    trainer.step(*to_batch(4, bad))
    with pytest.raises(RunFailed, match=r"2 steps.*max_bad_steps.*good step was 3"):
        trainer.step(*to_batch(5, bad))


def test_a_sample_that_is_too_stale_is_refused_by_name(start):
    trainer = start(max_staleness=1)
    trainer.step(*to_batch(0, STEPS[0]))
    trainer.step(*to_batch(1, STEPS[1]))
    before = weights_of(trainer)
    batch, payloads = to_batch(2, STEPS[2], version=1)
    old = payloads[1][2]
    payloads[1][2] = replace(old, versions=np.array([*old.versions[:-1], 0], np.int32))
    with pytest.raises(RunFailed, match=r"prompt 9 .*staleness 2.*max_staleness = 1"):
        trainer.step(batch, payloads)
    assert trainer.version.step == 2
    assert same(before, weights_of(trainer))
    payloads[1][2] = old
    assert trainer.step(batch, payloads).staleness == (1,) * 15


def test_batches_come_in_order_and_aligned(start):
    trainer = start()
    with pytest.raises(RunFailed, match="step 0 and got batch 1"):
        trainer.step(*to_batch(1, STEPS[0]))
    batch, payloads = to_batch(0, STEPS[0])
    payloads[0][0] = replace(payloads[0][0], logprobs=np.zeros(99, np.float32))
    with pytest.raises(RunFailed, match=r"prompt 0 has .* 99 log-probs"):
        trainer.step(batch, payloads)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (5, 3), (2, 7), (5, 5)])
def test_w9_the_rate_is_never_zero(schedule, warmup, total):
    rates = [
        learning_rate(u, peak=1.0, warmup_steps=warmup, schedule=schedule, total_steps=total)
        for u in range(total + 2)
    ]
    assert all(0 < rate <= 1 for rate in rates)
    assert rates[0] == (1 / warmup if warmup else 1.0)
    if total > warmup:
        assert max(rates) == 1.0
        falls = rates[max(0, warmup - 1) : total]
        assert falls == sorted(falls, reverse=True)


def test_a_smaller_last_batch_is_a_smaller_step(start):
    trainer = start(schedule="linear", total_steps=3)
    rates = [trainer.step(*to_batch(t, STEPS[t])).learning_rate for t in range(2)]
    last = trainer.step(*to_batch(2, STEPS[2][:1]))
    assert last.applied
    assert last.learning_rate > 0
    assert rates[0] == pytest.approx(5e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_publish_gives_the_weights_of_the_version(tmp_path, start, tied):
    trainer = start(model=make_model(tmp_path / "m", tied=tied), lineage=3)
    first = trainer.publish()
    assert first.version == PolicyVersion(3, 0)
    trainer.step(*to_batch(0, STEPS[0]))
    second = trainer.publish()
    assert second.version == PolicyVersion(3, 1)
    assert dict(second.tied) == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    loaded = load_manifest(second)
    assert loaded.keys() == trainer.model.module.state_dict().keys()
    assert same(loaded, trainer.model.module.state_dict())
    assert not same(load_manifest(first), loaded)
    kinds = [span.kind for span in trainer.drain_spans()]
    assert kinds == ["publish", "train", "publish"]
    assert trainer.drain_spans() == []


def test_a_checkpoint_loads_as_it_is_and_resumes_bit_for_bit(tmp_path, start, model):
    straight = start()
    for step in range(2):
        straight.step(*to_batch(step, STEPS[step]))
    (tmp_path / "ledger").write_text("rows")
    path = tmp_path / "ckpt" / checkpoint.checkpoint_name(2)
    straight.save(path, {"epoch": 1}, {"ledger.sqlite": tmp_path / "ledger"})
    plain = AutoModelForCausalLM.from_pretrained(path)
    assert plain.dtype == torch.float32
    assert same(plain.state_dict(), straight.model.module.state_dict())
    assert (path / "tokenizer.json").read_text() == (model / "tokenizer.json").read_text()
    assert json.loads((path / "config.json").read_text())["use_cache"] is True
    assert (path / "ledger.sqlite").read_text() == "rows"
    assert checkpoint.read(path).extra == {"epoch": 1}
    resumed = start(lineage=1, resume_from=path)
    assert resumed.version == PolicyVersion(1, 2)
    for step in range(2, 4):
        assert replace(straight.step(*to_batch(step, STEPS[step])), seconds=0) == replace(
            resumed.step(*to_batch(step, STEPS[step])), seconds=0
        )
    assert same(weights_of(straight), weights_of(resumed))


def test_checkpoints_are_whole_or_absent_and_pruned(tmp_path, start):
    trainer = start(keep_checkpoints=2)
    folder = tmp_path / "ckpt"
    for step in range(5):
        trainer.save(folder / checkpoint.checkpoint_name(step), {})
        trainer.step(*to_batch(step, STEPS[step]))
    names = [path.name for path in checkpoint.all_checkpoints(folder)]
    assert names == ["step-000000", "step-000003", "step-000004"]
    with pytest.raises(FileNotFoundError):
        trainer.save(folder / "step-000005", {}, {"gone": tmp_path / "gone"})
    with pytest.raises(RunFailed, match="the trainer is at step 5"):
        trainer.save(folder / "step-000004", {})
    for again in (False, True):  # replaces
        trainer.save(folder / "step-000005", {"again": again})
        assert checkpoint.read(folder / "step-000005").extra == {"again": again}
    assert len(list(folder.iterdir())) == 3
    shutil.copytree(folder / "step-000005", folder / "step-000006")
    assert checkpoint.newest_valid(folder) == folder / "step-000005", "6 holds another step"
    newest = folder / "step-000005" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert checkpoint.newest_valid(folder) == folder / "step-000004"
    shutil.rmtree(folder)
    assert checkpoint.newest_valid(folder) is None


def test_a_model_that_does_not_load_is_the_users_to_mend(tmp_path, start):
    with pytest.raises(UserError, match=r"model\.path .*absent"):
        start(model=tmp_path / "absent")


def test_a_window_shorter_than_the_context_refuses_sharing(tmp_path, start):
    path = make_model(tmp_path / "m", "qwen2")
    settings = json.loads((path / "config.json").read_text())
    settings |= {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    settings["layer_types"] = ["sliding_attention"] * 2
    (path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"window of 16.*prefix_sharing"):
        start(model=path)
