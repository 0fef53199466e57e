"""Log files of a run: one a process, under `logs/` of the run directory."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class QuietFile(logging.FileHandler):
    """A log file that a full disk may cut short: what is logged is lost, nothing is said of it."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written before cannot be now
            super().close()


def log_to(folder: Path | None, who: str) -> logging.Handler | None:
    """Appends this process's log to `<folder>/<who>.log`; the handler, to be removed again.

    Nothing happens where the folder does not exist (another node that does not share it), or
    takes no file.
    """
    if folder is None or not folder.is_dir():
        return None
    try:
        handler = QuietFile(folder / f"{who.replace('/', '-')}.log", encoding="utf-8")
    except OSError:  # a full disk
        return None
    handler.setFormatter(logging.Formatter(FORMAT))
    root = logging.getLogger()
    root.addHandler(handler)
    if root.level > logging.INFO or root.level == logging.NOTSET:
        root.setLevel(logging.INFO)
    return handler
