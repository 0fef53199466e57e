"""Which disk a path is on: the ledger's file belongs on a local one.

SQLite's write-ahead log is shared memory between the processes of one machine, and its locks are
the operating system's: over a network either may do nothing, and the file is damaged.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from offbeat.errors import UserError

MOUNTS = Path("/proc/self/mountinfo")
NETWORK = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "9p", "davfs", "coda"),
        *("lustre", "gpfs", "beegfs", "ceph", "glusterfs", "pvfs2", "orangefs", "panfs", "wekafs"),
        *("gfs2", "ocfs2"),
    }
)
"""File systems whose files another machine may hold."""
FUSE = frozenset(
    {
        *("sshfs", "glusterfs", "ceph", "ceph-fuse", "s3fs", "gcsfuse", "juicefs", "rclone"),
        *("goofys", "mount-s3", "lustre", "beegfs", "davfs2", "blobfuse", "blobfuse2", "hdfs"),
        *("curlftpfs", "seaweedfs", "weed", "smbnetfs", "nfs"),
    }
)
"""The same of those that a process serves; they are mounted as `fuse.NAME`."""


def network_file_system(path: Path | str, mounts: Path | None = None) -> str | None:
    """The kind of network file system that `path` is or would be on; None for a local one.

    None also where `mounts`, by default the kernel's list, cannot be read (not on Linux).
    """
    try:
        lines = os.fsdecode((mounts or MOUNTS).read_bytes()).splitlines()
    except OSError:
        return None
    target = Path(path).resolve()
    kind, depth = "", -1
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        point = Path(_unescaped(fields[4]))
        if target.is_relative_to(point) and len(point.parts) >= depth:  # the later one covers it
            kind, depth = after.split(" ")[0], len(point.parts)
    served, _, name = kind.partition(".")
    return kind if kind in NETWORK or (served == "fuse" and name in FUSE) else None


def check_local(path: Path | str) -> None:
    """Raises `UserError` if the ledger's file `path` is or would be on a network file system."""
    kind = network_file_system(path)
    if kind is not None:
        raise UserError(
            f"ledger_dir: {path} is on a network file system ({kind}), where the ledger's file "
            "can be damaged; set ledger_dir to a folder on a local disk of this machine"
        )


def _unescaped(name: str) -> str:
    """The kernel writes blanks of a path as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), name)
