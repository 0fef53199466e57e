"""The ledger's file is refused on network file systems, before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import ProjectMaker

from offbeat import disk
from offbeat.cli import main
from offbeat.disk import check_local, network_file_system
from offbeat.errors import UserError
from offbeat.store import Store

Mounts = Callable[[list[tuple[str, str]]], Path]


@pytest.fixture
def mounts(tmp_path: Path) -> Mounts:
    """Writes a kernel's list of (mount point, type), in the order of mounting."""

    def write(found: list[tuple[str, str]]) -> Path:
        path = tmp_path / "mountinfo"
        path.write_text(
            "".join(
                f"{i} 1 0:{i} / {point} rw,relatime shared:{i} master:2 - {kind} server:/x rw\n"
                for i, (point, kind) in enumerate(found, 20)
            )
        )
        return path

    return write


@pytest.mark.parametrize(
    "kind",
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "9p",
        "fuse.sshfs",
        "fuse.glusterfs",
        "fuse.s3fs",
    ],
)
def test_network_file_systems_are_known(mounts: Mounts, kind: str) -> None:
    found = mounts([("/", "ext4"), ("/mnt/shared", kind)])
    assert network_file_system("/mnt/shared/runs/a/ledger.sqlite", found) == kind
    assert network_file_system("/mnt/sharedness/a", found) is None
    assert network_file_system("/mnt", found) is None


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "fuseblk"])
def test_local_ones_are_taken(mounts: Mounts, kind: str) -> None:
    assert network_file_system("/data/x", mounts([("/", kind)])) is None


def test_the_nearest_mount_decides_and_of_two_the_later(mounts: Mounts) -> None:
    found = mounts([("/", "nfs4"), ("/home", "ext4"), ("/home", "nfs"), ("/home/me/local", "xfs")])
    assert network_file_system("/x", found) == "nfs4"
    assert network_file_system("/home/me/x", found) == "nfs"
    assert network_file_system("/home/me/local/x", found) is None


def test_a_link_is_followed_and_blanks_are_read(mounts: Mounts, tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a b")
    found = mounts([("/", "ext4"), (str(tmp_path / "a\\040b"), "cifs")])
    assert network_file_system(tmp_path / "link" / "ledger.sqlite", found) == "cifs"


def test_without_a_list_of_mounts_nothing_is_refused(tmp_path: Path) -> None:
    assert network_file_system("/x", tmp_path / "none") is None


def test_the_store_refuses(mounts: Mounts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MOUNTS", mounts([("/", "nfs4")]))
    with pytest.raises(UserError, match=r"ledger_dir: .* \(nfs4\).*; set ledger_dir to"):
        Store(tmp_path / "ledger.sqlite")
    assert not (tmp_path / "ledger.sqlite.lock").exists()
    monkeypatch.setattr(disk, "MOUNTS", mounts([("/", "nfs4"), (str(tmp_path), "ext4")]))
    check_local(tmp_path / "ledger.sqlite")


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_run_is_refused_before_it_starts(
    mounts: Mounts,
    project: ProjectMaker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    config = project()
    monkeypatch.setattr(disk, "MOUNTS", mounts([("/", "beegfs")]))
    assert main([command, str(config)]) == 2
    assert "ledger_dir" in capsys.readouterr().err
    assert not list(tmp_path.rglob("ledger.sqlite*"))
