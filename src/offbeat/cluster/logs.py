"""Log files of a run: one a process, under `logs/` of the run directory."""

from __future__ import annotations

import logging
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to(folder: Path | None, who: str) -> logging.Handler | None:
    """Appends this process's log to `<folder>/<who>.log`; the handler, to be removed again.

    Nothing happens where the folder does not exist (another node that does not share it).
    """
    if folder is None or not folder.is_dir():
        return None
    handler = logging.FileHandler(folder / f"{who.replace('/', '-')}.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter(FORMAT))
    root = logging.getLogger()
    root.addHandler(handler)
    if root.level > logging.INFO or root.level == logging.NOTSET:
        root.setLevel(logging.INFO)
    return handler
