from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from offbeat.errors import UserError
from offbeat.model_files import check_weights


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_file({"a": np.zeros(1000, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_whole_weights_are_accepted(weights: Path) -> None:
    check_weights(weights.parent, "model.path")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda whole: whole[:-1], "bytes and has"),
        (lambda whole: whole[:20], "cut short"),
        (lambda whole: b"", "cut short"),
        (lambda whole: b"version https://git-lfs.github.com/spec/v1\n", "cut short"),
        (lambda whole: b"\x02" + bytes(7) + b"[]", "no safetensors header"),
    ],
)
def test_broken_weights_are_refused_by_name(
    weights: Path, change: Callable[[bytes], bytes], said: str
) -> None:
    weights.write_bytes(change(weights.read_bytes()))
    with pytest.raises(UserError, match=said) as refused:
        check_weights(weights.parent, "model.path")
    assert str(refused.value).startswith(f"model.path: {weights} ")


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no weights"):
        check_weights(tmp_path, "reward.j.model")
