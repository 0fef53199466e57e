from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offbeat.config import Config
from offbeat.errors import OffbeatError, UserError
from offbeat.records import PolicyVersion
from offbeat.weights import transport
from offbeat.weights.transport import FolderTransport, choose_folder, load_manifest, sweep

TENSORS = {
    "model.embed_tokens.weight": torch.randn(10, 4),
    "norm": torch.randn(4).to(torch.bfloat16),
    "mask": torch.tensor([True, False, True]),
    "scale": torch.tensor(2.5, dtype=torch.float64),
    "transposed": torch.arange(6, dtype=torch.int64).reshape(2, 3).t(),
    "none": torch.zeros(0, 3),
}
TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.fixture
def published(tmp_path):
    sender = FolderTransport(tmp_path, "run-1")
    yield sender, sender.publish(TENSORS, TIED, PolicyVersion(0, 3))
    sender.close()


def test_what_is_loaded_is_what_was_published(published):
    _, manifest = published
    assert manifest.version == PolicyVersion(0, 3)
    assert manifest.kind == "full"
    loaded = load_manifest(manifest)
    assert loaded.keys() == TENSORS.keys() | TIED.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
        assert manifest.tensors[name].shape == tuple(tensor.shape)
    assert loaded["lm_head.weight"] is loaded["model.embed_tokens.weight"]
    assert load_file(manifest.path).keys() == TENSORS.keys()  # an ordinary safetensors file


def test_a_corrupt_tensor_is_named_and_never_handed_out(published):
    _, manifest = published
    path = Path(manifest.path)
    data = bytearray(path.read_bytes())
    needle = TENSORS["norm"].view(torch.uint8).numpy().tobytes()
    data[data.rindex(needle)] ^= 1
    path.write_bytes(data)
    with pytest.raises(OffbeatError, match=r"norm.*checksum"):
        load_manifest(manifest)
    assert load_manifest(manifest, verify=False).keys() == TENSORS.keys() | TIED.keys()


def test_a_manifest_that_does_not_fit_its_file_is_refused(published):
    _, manifest = published
    entry = manifest.tensors["norm"]
    wrong = replace(manifest, tensors={"norm": replace(entry, shape=(2, 2))})
    with pytest.raises(OffbeatError, match=r"norm.*manifest says"):
        load_manifest(wrong)
    with pytest.raises(OffbeatError, match=r"0\.3 cannot be read"):
        load_manifest(replace(manifest, tensors={"absent": entry}))
    with pytest.raises(OffbeatError, match=r"0\.3 cannot be read"):
        load_manifest(replace(manifest, path="/nowhere"))


def test_the_newest_three_stay_and_a_mapped_one_lives_on(tmp_path):
    sender = FolderTransport(tmp_path, "run")
    manifests = []
    mapped = None
    for step in range(5):
        manifests.append(sender.publish(TENSORS, {}, PolicyVersion(0, step)))
        mapped = mapped or load_manifest(manifests[0])
    assert [Path(m.path).exists() for m in manifests] == [False, False, True, True, True]
    assert torch.equal(mapped["norm"], TENSORS["norm"])
    again = sender.publish(TENSORS, {}, PolicyVersion(0, 4))  # the same version anew
    assert load_manifest(again).keys() == TENSORS.keys()
    assert Path(manifests[2].path).exists()
    sender.close()
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_names_the_setting_and_the_bytes(tmp_path, monkeypatch):
    sender = FolderTransport(tmp_path, "run")
    usage = transport.shutil.disk_usage(tmp_path)._replace(free=1_048_576)
    monkeypatch.setattr(transport.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"needs [\d,]+ bytes.*1,048,576 free.*weights\.folder"):
        sender.publish(TENSORS, {}, PolicyVersion(0, 0))
    assert not list(sender.folder.glob("*.partial"))
    sender.close()


def test_the_folder_is_shared_memory_only_with_room(tmp_path, monkeypatch):
    settings = {
        "run": "r",
        "runs_dir": tmp_path / "runs",
        "model": {"path": tmp_path},
        "data": {"train": tmp_path / "t.jsonl"},
        "reward": {"right": {"kind": "function", "function": "r.py:right"}},
    }
    config = Config.model_validate(settings)
    monkeypatch.setattr(transport, "MEMORY_FOLDER", tmp_path)
    free = transport.shutil.disk_usage(tmp_path).free
    assert choose_folder(config, 1000) == tmp_path
    assert choose_folder(config, free // 2) == tmp_path / "runs" / "r" / "weights"
    monkeypatch.setattr(transport, "MEMORY_FOLDER", tmp_path / "absent")
    assert choose_folder(config, 1000) == tmp_path / "runs" / "r" / "weights"
    own = Config.model_validate(settings | {"weights": {"folder": tmp_path / "mine"}})
    assert choose_folder(own, free * 9) == tmp_path / "mine"


def test_folders_of_dead_owners_are_swept_and_no_others(tmp_path):
    code = "import os, sys, time; print(os.getpid(), flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    pid = int(child.stdout.readline())
    mine = FolderTransport(tmp_path, "live").folder
    owners = {
        "offbeat-other": transport._identity(pid),
        "offbeat-reused": transport._identity(pid) | {"started": "another boot/1"},
        "offbeat-elsewhere": transport._identity(pid) | {"host": "another-host", "pid": 2**22 + 1},
    }
    for name, owner in owners.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "owner.json").write_text(json.dumps(owner))
    (tmp_path / "offbeat-being-made").mkdir()
    (tmp_path / "a-users-folder").mkdir()
    assert [p.name for p in sweep(tmp_path)] == ["offbeat-reused"]
    child.communicate()
    assert [p.name for p in sweep(tmp_path)] == ["offbeat-other"]
    assert {p.name for p in tmp_path.iterdir()} == {
        mine.name, "offbeat-elsewhere", "offbeat-being-made", "a-users-folder"
    }  # fmt: skip
    FolderTransport(tmp_path, "next")
    assert mine.exists()
