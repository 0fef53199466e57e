"""Versions sent over a process group: NCCL between GPUs, gloo between CPUs, by the same steps.

```
 engine (load_manifest)                        trainer (server thread, then one thread a request)
 "version 0.7 for session s" ──socket───────►  has it? ──no──► "the trainer has only ..."
 ◄────────────────────────────────────socket─  "ok"
 group of two over the store, prefix s  ◄────►  group of two over the store, prefix s
 receive a bucket, check, unpack  ◄────group──  send the snapshot's buckets
 "done" ────────────────────────────socket──►  lets go of the group
```

The trainer keeps snapshots of the newest versions on its device, so the thread that trains is never
waited for and may change the weights at once; it listens on a socket, and hosts the `TCPStore` at
which a group meets. Engines pull, each by itself, whenever they like: rolling updates and restarted
engines need nothing else. Every load is a fresh group of its own (4 ms for gloo), an object beside
whatever default group a process has; so a failed load leaves nothing that a later one could meet.

Every wait ends at the load's deadline. An engine that dies costs the trainer a thread until then at
most; a trainer that dies fails the load at once or, should NCCL not notice, at the deadline.

The NCCL wire needs two GPUs and was not run: the tests run the same code over gloo. Anyone who can
reach the store's port can ask for weights: run it inside a trusted network, as torch's own store.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qs, urlencode, urlsplit

import torch
import torch.distributed
from torch import Tensor

from offbeat.errors import OffbeatError
from offbeat.records import Manifest, PolicyVersion
from offbeat.weights.packed import Snapshot, check_bucket, layout, take_snapshot, unpack

log = logging.getLogger(__name__)
dist: Any = torch.distributed  # whose stubs lack the stores and the groups' options
Wire = Literal["gloo", "nccl"]
T = TypeVar("T")

SCHEME = "broadcast"
KEEP_ON_CPU, KEEP_ON_GPU = 3, 2
"""Snapshots kept. On a GPU two: the one that engines load, and the one before it."""
_OK = "ok"
_POLL = 0.002
_LINE_BYTES = 4096
_CLOSE_SECONDS = 5.0


class BroadcastTransport:
    """The trainer's side. `deadline_seconds` bounds each load, on both sides."""

    def __init__(self, device: torch.device, *, deadline_seconds: float) -> None:
        self._device = device
        self._deadline = deadline_seconds
        self._keep = KEEP_ON_GPU if device.type == "cuda" else KEEP_ON_CPU
        self._snapshots: dict[str, Snapshot] = {}  # by version; replaced, never changed
        self._host = own_address()
        self._store = dist.TCPStore(
            self._host, 0, None, True, timeout=_delta(deadline_seconds), wait_for_workers=False
        )
        self._listener = socket.create_server((self._host, 0), backlog=128)
        self.path = self._address()
        self._server = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._server.start()

    def publish(
        self, tensors: Mapping[str, Tensor], tied: Mapping[str, str], version: PolicyVersion
    ) -> Manifest:
        """Snapshots a version on the trainer's device; keeps the newest 3 (2 on a GPU)."""
        snapshot = take_snapshot(tensors, tied, version, device=self._device)
        kept = {n: s for n, s in self._snapshots.items() if n != str(version)}
        kept[str(version)] = snapshot
        self._snapshots = dict(list(kept.items())[-self._keep :])
        return snapshot.manifest("broadcast", self.path)

    def kept(self) -> list[PolicyVersion]:
        """Versions that can still be loaded, oldest publication first."""
        return [snapshot.version for snapshot in self._snapshots.values()]

    def recall(self, version: PolicyVersion) -> Mapping[str, Tensor]:
        """A kept version's tensors, on the trainer's device; do not write to them."""
        return self._snapshots[str(version)].tensors()

    def close(self) -> None:
        """Ends the server; loads that run fail."""
        with contextlib.suppress(OSError):  # twice is no error
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._server.join(_CLOSE_SECONDS)
        self._snapshots = {}

    def _address(self) -> str:
        port, store = self._listener.getsockname()[1], self._store.port
        query = {"store": str(store), "deadline": f"{self._deadline:g}"}
        if self._device.type == "cuda":
            query["gpu"] = _gpu()
        return f"{SCHEME}://{self._host}:{port}?{urlencode(query)}"

    def _serve(self) -> None:
        while True:
            try:
                engine, _ = self._listener.accept()
            except OSError:  # closed
                return
            call = threading.Thread(target=self._answer, args=(engine,), daemon=True)
            call.name = "weights"
            call.start()

    def _answer(self, engine: socket.socket) -> None:
        """Serves one request; whatever goes wrong concerns this request alone."""
        until = time.monotonic() + self._deadline
        try:
            with engine:
                self._hand_out(_Line(engine, until), until)
        except Exception as error:  # boundary: an engine's failed load never ends the server
            log.warning("a load of weights failed on the trainer's side: %r", error)

    def _hand_out(self, line: _Line, until: float) -> None:
        ask = json.loads(line.hear())
        snapshot = self._snapshots.get(ask["version"])
        if snapshot is None:
            line.say(f"the trainer has only versions {', '.join(self._snapshots)}")
            return
        line.say(_OK)
        store = _client(self._host, self._store.port, self._deadline)
        with store as opened, _Pair(opened, ask, 0, self._device, self._host, until) as pair:
            for bucket in snapshot.buckets:
                pair.send(bucket)
            line.hear()


def load_broadcast(
    manifest: Manifest, verify: bool = True, device: torch.device | None = None
) -> dict[str, Tensor]:
    """Asks the trainer for the manifest's version; name -> tensor on `device` (default: the CPU).

    Between two GPUs the buckets come by NCCL and, for the CPU, are copied on one by one, so that no
    second copy of the model needs room on the GPU. Raises `OffbeatError`: the trainer does not
    answer, has the version no more, or the bytes are not the manifest's; at the deadline at last.
    """
    address = urlsplit(manifest.path)
    query = {name: values[0] for name, values in parse_qs(address.query).items()}
    host, port, seconds = address.hostname or "", address.port or 0, float(query["deadline"])
    between_gpus = query.get("gpu") is not None and _gpu() not in ("", query["gpu"])
    wire: Wire = "nccl" if between_gpus else "gloo"
    carrier = torch.device("cuda", torch.cuda.current_device()) if between_gpus else _CPU
    ask = {"session": uuid.uuid4().hex, "version": str(manifest.version), "wire": wire}
    places = layout(manifest.tensors)
    until = time.monotonic() + seconds

    def load() -> list[Tensor]:
        with socket.create_connection((host, port), timeout=seconds) as trainer:
            line = _Line(trainer, until)
            line.say(json.dumps(ask))
            if (answer := line.hear()) != _OK:
                raise OSError(answer)
            store = _client(host, int(query["store"]), seconds)
            with store as opened, _Pair(opened, ask, 1, carrier, own_address(host), until) as pair:
                received = []
                for slots in places:
                    bucket = pair.receive(slots[-1].end)
                    if verify:
                        check_bucket(bucket, slots, manifest.version, manifest.path)
                    received.append(bucket.to(device or _CPU))
                line.say("done")
        return received

    whom = f"version {manifest.version} from the trainer at {host}:{port}"
    try:
        found = unpack(_within(seconds, load), places)
    except TimeoutError:
        raise OffbeatError(f"{whom} did not come within {seconds:g} s") from None
    except (OSError, RuntimeError) as error:  # torch's own are RuntimeErrors
        said = str(error).partition("\n")[0]
        raise OffbeatError(f"{whom} did not come: {said}") from error
    return found | {name: found[stored] for name, stored in manifest.tied.items()}


def own_address(towards: str = "10.255.255.255") -> str:
    """This machine's address on the interface that leads `towards` a host; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 1))
            return str(probe.getsockname()[0])
        except OSError:
            pass
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


_free: dict[tuple[str, int], list[Any]] = {}


@contextlib.contextmanager
def _client(host: str, port: int, seconds: float) -> Iterator[Any]:
    """A connection to the trainer's store that nobody else uses meanwhile: a blocking call holds up
    all others of its connection.

    They are kept, by address, for later loads: torch looks the peer's name up at every connect,
    which takes seconds where the name server is slow. One that failed is dropped.
    """
    free = _free.setdefault((host, port), [])
    try:
        store = free.pop()
        store.set_timeout(_delta(seconds))
    except IndexError:
        store = dist.TCPStore(host, port, None, False, timeout=_delta(seconds))
    yield store
    free.append(store)


class _Line:
    """Lines of text over a socket, until a deadline (seconds of `time.monotonic()`)."""

    def __init__(self, link: socket.socket, until: float) -> None:
        self._link, self._until = link, until
        self._file = link.makefile("rb")

    def say(self, text: str) -> None:
        self._link.settimeout(_left(self._until))
        self._link.sendall(text.encode() + b"\n")

    def hear(self) -> str:
        """Raises `ConnectionError` if the other side has gone."""
        self._link.settimeout(_left(self._until))
        said = self._file.readline(_LINE_BYTES)
        if not said.endswith(b"\n"):
            raise ConnectionError("the other side has gone")
        return said.decode().rstrip("\n")


class _Pair:
    """A process group of trainer (rank 0) and engine (rank 1), for one load."""

    def __init__(
        self,
        store: Any,
        ask: Mapping[str, str],
        rank: int,
        device: torch.device,
        host: str,
        until: float,
    ) -> None:
        self._peer, self._until, self._nccl = 1 - rank, until, ask["wire"] == "nccl"
        self._device = device if self._nccl else _CPU
        prefixed = dist.PrefixStore(ask["session"], store)
        self._group: Any
        if self._nccl:
            self._group = _nccl_group(prefixed, rank, self._device, _left(until))
        else:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = _delta(_left(until))
            self._group = dist.ProcessGroupGloo(prefixed, rank, 2, options)

    def __enter__(self) -> _Pair:
        return self

    def __exit__(self, *_: object) -> None:
        if self._nccl:
            self._group.abort()  # also what hangs; a group that is done has nothing to abort

    def send(self, bucket: Tensor) -> None:
        self._finish(self._group.send([bucket.to(self._device)], self._peer, 0))

    def receive(self, size: int) -> Tensor:
        bucket = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._finish(self._group.recv([bucket], self._peer, 0))
        return bucket

    def _finish(self, work: Any) -> None:
        if not self._nccl:
            work.wait(_delta(_left(self._until)))
            return
        while not work.is_completed():  # NCCL's own wait would only queue on the stream
            _left(self._until)
            time.sleep(_POLL)
        torch.cuda.synchronize(self._device)


def _nccl_group(store: Any, rank: int, device: torch.device, seconds: float) -> Any:
    # Else torch ends the whole process when a peer is lost; here `_Pair` gives the load up.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _delta(seconds)
    return dist.ProcessGroupNCCL(store, rank, 2, options)


def _within(seconds: float, call: Callable[[], T]) -> T:
    """Runs `call` in a thread and gives it up at the deadline, wherever it hangs."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="weights", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]


def _left(until: float) -> float:
    """Seconds until a deadline; raises `TimeoutError` when it has passed."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _gpu() -> str:
    """What identifies this process's current GPU on any machine; "" without one."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _delta(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)


_CPU = torch.device("cpu")
