"""The process that runs a user's reward function: `python -m offbeat.reward.function_worker`.

Requests come on stdin (pickle; the first is the function's style and arguments), answers go to a
pipe of their own (JSON), both with a length in front; the function's prints go to stderr. When
stdin closes, because the parent stopped the worker or died, the process ends with all that it
started, also in the middle of a call.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import queue
import signal
import struct
import sys
import threading
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, BinaryIO

from offbeat.errors import UserError
from offbeat.reward.loader import load_caller

HEADER = struct.Struct(">Q")


def main(arguments: list[str]) -> int:
    """Serves requests until stdin closes. Arguments: answer pipe, function, folder, setting."""
    pipe, spec, base, setting = arguments
    os.set_inheritable(int(pipe), False)
    answers = os.fdopen(int(pipe), "wb")
    requests: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_read, args=(_take_stdin(), requests), daemon=True).start()
    style, settings = pickle.loads(requests.get())
    try:
        caller = load_caller(spec, setting, Path(base), style, settings)
    except UserError as error:
        _send(answers, {"user_error": str(error)})
        return 2
    _send(answers, {"one_by_one": caller.one_by_one})
    with asyncio.Runner() as runner:

        def run(awaitable: Awaitable[Any]) -> Any:
            async def wrapped() -> Any:
                return await awaitable

            return runner.run(wrapped())

        while True:
            calls = pickle.loads(requests.get())
            start, cpu = time.time(), time.process_time()
            answer = caller(calls, run)
            answer.update(start=start, end=time.time(), cpu=time.process_time() - cpu)
            _send(answers, answer)


def _take_stdin() -> BinaryIO:
    """The request pipe, out of reach of the user's function, which reads nothing from stdin."""
    requests = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return requests


def _read(source: BinaryIO, requests: queue.Queue[bytes]) -> None:
    while True:
        header = source.read(HEADER.size)
        body = source.read(HEADER.unpack(header)[0]) if len(header) == HEADER.size else b""
        if not body:
            _end()
        requests.put(body)


def _end() -> None:
    """Ends this process and, as it leads a group of its own, what the function started."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def _send(answers: BinaryIO, answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    answers.write(HEADER.pack(len(body)) + body)
    answers.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
