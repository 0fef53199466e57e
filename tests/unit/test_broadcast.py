"""The broadcast transport over gloo, between threads and between processes, and what may fail."""

from __future__ import annotations

import json
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
import torch

from offbeat.errors import OffbeatError, UserError
from offbeat.records import PolicyVersion
from offbeat.weights import broadcast, packed
from offbeat.weights.broadcast import BroadcastTransport, own_address
from offbeat.weights.ipc import IpcTransport
from offbeat.weights.transport import load_manifest

CPU = torch.device("cpu")
TENSORS = {
    "model.embed_tokens.weight": torch.randn(300, 7),
    "norm": torch.randn(5).to(torch.bfloat16),
    "mask": torch.tensor([True, False, True]),
    "scale": torch.tensor(2.5, dtype=torch.float64),
    "transposed": torch.arange(6, dtype=torch.int64).reshape(2, 3).t(),
    "none": torch.zeros(0, 3),
    "layer": torch.randn(3000, 5),
}
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
RECEIVER = """
import pickle, sys
from offbeat.weights.transport import load_manifest
manifest = pickle.load(sys.stdin.buffer)
print("ready", flush=True)
sys.stdin.buffer.read(1)
loaded = load_manifest(manifest)
print(float(sum(t.double().sum() for t in loaded.values())), flush=True)
"""
SENDER = """
import pickle, sys, torch
from offbeat.records import PolicyVersion
from offbeat.weights.broadcast import BroadcastTransport
sender = BroadcastTransport(torch.device("cpu"), deadline_seconds=30)
manifest = sender.publish({"w": torch.ones(1 << 20)}, {}, PolicyVersion(0, 1))
sys.stdout.buffer.write(pickle.dumps(manifest)); sys.stdout.buffer.flush()
sys.stdin.read()
"""


@pytest.fixture
def sender():
    made = BroadcastTransport(CPU, deadline_seconds=20)
    yield made
    made.close()


@pytest.fixture
def small_buckets(monkeypatch):
    monkeypatch.setattr(packed, "BUCKET_BYTES", 4096)


def process(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


@pytest.mark.usefixtures("small_buckets")
def test_what_is_loaded_is_what_was_published(sender):
    manifest = sender.publish(TENSORS, TIED, PolicyVersion(1, 3))
    assert manifest.kind == "broadcast"
    assert len(packed.layout(manifest.tensors)) > 2
    loaded = load_manifest(manifest)
    assert loaded.keys() == TENSORS.keys() | TIED.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].device == CPU
        assert torch.equal(loaded[name], tensor)
    assert loaded["lm_head.weight"] is loaded["model.embed_tokens.weight"]


def test_a_version_stays_as_published_while_training_goes_on(sender):
    weights = {"w": torch.zeros(1000)}
    manifests = []
    for step in range(5):
        weights["w"].fill_(step)
        manifests.append(sender.publish(weights, {}, PolicyVersion(0, step)))
    weights["w"].fill_(99)
    assert [v.step for v in sender.kept()] == [2, 3, 4]
    for step in (4, 2, 3):
        assert torch.equal(load_manifest(manifests[step])["w"], torch.full((1000,), float(step)))
        assert torch.equal(sender.recall(PolicyVersion(0, step))["w"][:2], torch.full((2,), step))
    with pytest.raises(
        OffbeatError, match=r"0\.1 from the trainer.*has only versions 0\.2, 0\.3, 0\.4"
    ):
        load_manifest(manifests[1])


def test_engines_load_at_once_and_others_between(sender):
    manifests = [
        sender.publish({"w": torch.full((1 << 18,), float(v))}, {}, PolicyVersion(0, v))
        for v in range(2)
    ]
    with ThreadPoolExecutor(3) as pool:
        loads = [pool.submit(load_manifest, manifests[i % 2]) for i in range(16)]
        for i, load in enumerate(loads):
            assert load.result()["w"].eq(i % 2).all()


def test_a_process_beside_with_a_default_group_of_its_own_loads_too(sender):
    code = (
        "import torch.distributed as d\n"
        "d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)\n" + RECEIVER
    )
    manifest = sender.publish(TENSORS, TIED, PolicyVersion(0, 0))
    child = process(code)
    out, _ = child.communicate(pickle.dumps(manifest) + b"!", timeout=120)
    expected = sum(t.double().sum() for t in load_manifest(manifest).values())
    assert float(out.split()[1]) == pytest.approx(float(expected))
    assert child.returncode == 0


def test_corrupt_bytes_are_named_and_never_handed_out(sender):
    manifest = sender.publish(TENSORS, TIED, PolicyVersion(0, 0))
    sender.recall(manifest.version)["norm"][3] += 1
    with pytest.raises(OffbeatError, match=r"norm of version 0\.0 .*checksum"):
        load_manifest(manifest)
    assert load_manifest(manifest, verify=False).keys() == TENSORS.keys() | TIED.keys()


def test_the_checksum_sees_any_changed_word_and_the_place():
    torch.manual_seed(0)
    data = torch.randint(0, 256, (8 * 5000,), dtype=torch.uint8)
    before = packed.fingerprint(data).item()
    for bit in range(0, 8 * len(data), 4099):
        data[bit // 8] ^= 1 << bit % 8
        assert packed.fingerprint(data).item() != before
        data[bit // 8] ^= 1 << bit % 8
    assert packed.fingerprint(data).item() == before
    words = data.view(torch.int64)
    for a, b in ((0, 1), (0, 1024), (5, 4999), (4096, 4097)):
        swapped = words.clone()
        swapped[a], swapped[b] = words[b], words[a]
        assert packed.fingerprint(swapped.view(torch.uint8)).item() != before
    assert packed.fingerprint(data[:0]).item() == 0


@pytest.mark.usefixtures("small_buckets")
def test_an_engine_that_dies_in_a_load_holds_nobody_up(sender, monkeypatch):
    """It is killed between two buckets; others load meanwhile, and the trainer publishes."""
    entered = threading.Event()
    go_on = threading.Event()
    plain_send = broadcast._Pair.send

    def slow(self, bucket):
        if threading.current_thread().name == "weights" and not entered.is_set():
            entered.set()
            go_on.wait(30)
        plain_send(self, bucket)

    monkeypatch.setattr(broadcast._Pair, "send", slow)
    weights = {f"w{i}": torch.ones(1000) for i in range(50)}
    manifest = sender.publish(weights, {}, PolicyVersion(0, 0))
    child = process(RECEIVER)
    assert child.stdin is not None
    child.stdin.write(pickle.dumps(manifest) + b"!")
    child.stdin.flush()
    assert entered.wait(60)
    assert load_manifest(manifest)["w3"].sum() == 1000  # beside the one that hangs
    child.send_signal(signal.SIGKILL)
    child.communicate()
    again = sender.publish(weights, {}, PolicyVersion(0, 1))
    go_on.set()
    assert load_manifest(again)["w49"].sum() == 1000
    deadline = time.monotonic() + 10
    while sum(t.name == "weights" for t in threading.enumerate()) > 1:
        assert time.monotonic() < deadline, "the dead engine's thread goes on"
        time.sleep(0.05)


def test_an_engine_that_asks_and_never_comes_ends_at_the_deadline():
    sender = BroadcastTransport(CPU, deadline_seconds=1)
    manifest = sender.publish({"w": torch.ones(10)}, {}, PolicyVersion(0, 0))
    ask = {"session": "lost", "version": "0.0", "wire": "gloo"}
    address = urlsplit(manifest.path)
    links = [socket.create_connection((address.hostname, address.port)) for _ in range(3)]
    links[0].sendall(json.dumps(ask).encode() + b"\n")
    assert links[0].recv(10) == b"ok\n"
    links[1].sendall(b"no request at all\n")  # and the third says nothing
    assert load_manifest(manifest)["w"].sum() == 10
    deadline = time.monotonic() + 10
    while sum(t.name == "weights" for t in threading.enumerate()) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for link in links:
        link.close()
    sender.close()


def test_a_dead_trainer_fails_a_load_at_once():
    child = process(SENDER)
    assert child.stdout is not None
    manifest = pickle.load(child.stdout)
    assert load_manifest(manifest)["w"].sum() == 1 << 20
    results: list[BaseException] = []

    def load() -> None:
        try:
            while True:
                load_manifest(manifest)
        except OffbeatError as error:
            results.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    time.sleep(0.2)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    started = time.monotonic()
    thread.join(25)
    assert time.monotonic() - started < 10
    assert "did not come" in str(results[0])
    started = time.monotonic()
    with pytest.raises(OffbeatError, match=r"0\.1 from the trainer at .* did not come"):
        load_manifest(manifest)
    assert time.monotonic() - started < 5


def test_a_trainer_that_hangs_fails_a_load_at_its_deadline():
    with socket.create_server((own_address(), 0)) as silent:
        port = silent.getsockname()[1]
        sender = BroadcastTransport(CPU, deadline_seconds=1)
        manifest = sender.publish({"w": torch.ones(10)}, {}, PolicyVersion(0, 0))
        path = f"broadcast://{own_address()}:{port}?store={port}&deadline=1.5"
        started = time.monotonic()
        with pytest.raises(OffbeatError, match=r"within 1\.5 s|did not come"):
            load_manifest(replace(manifest, path=path))
        assert time.monotonic() - started < 4
        sender.close()


def test_close_ends_the_server_and_may_come_twice(sender):
    manifest = sender.publish({"w": torch.ones(10)}, {}, PolicyVersion(0, 0))
    sender.close()
    sender.close()
    assert not sender._server.is_alive()
    with pytest.raises(OffbeatError, match=r"did not come"):
        load_manifest(replace(manifest, path=manifest.path.replace("=20", "=2")))


def test_ipc_is_refused_on_a_cpu():
    with pytest.raises(UserError, match=r'weights\.transport = "ipc".*set it to "folder"'):
        IpcTransport(CPU)


def test_ipc_manifests_lead_to_two_snapshots_in_turns(monkeypatch):
    """The handles are made up, the memory is the CPU's: all but the mapping itself."""
    monkeypatch.setattr(
        "offbeat.weights.ipc.take_snapshot",
        lambda *args, device, into: packed.take_snapshot(*args, device=CPU, into=into),
    )
    shared = []

    def share(bucket):
        shared.append(bucket)
        return (
            0,
            b"\x00handle" + bytes([len(shared)]),
            bucket.numel(),
            0,
            b"counter",
            0,
            b"",
            False,
        )

    sender = IpcTransport(torch.device("cuda", 0), share=share)
    weights = {"w": torch.zeros(1000), "b": torch.ones(3)}
    manifests = []
    for step in range(4):
        weights["w"].fill_(step)
        manifests.append(sender.publish(weights, {"t": "b"}, PolicyVersion(0, step)))
        loaded = load_manifest(manifests[-1])
        assert loaded["w"].eq(step).all()
        assert loaded["t"] is loaded["b"]
    assert len(shared) == 2  # handles are made once
    assert [m.path == manifests[0].path for m in manifests] == [True, False, True, False]
    assert {m.kind for m in manifests} == {"ipc"}
    handle = json.loads(manifests[0].path)["handles"][0]
    assert handle[2] == shared[0].numel()
    assert handle[1] == {"bytes": "AGhhbmRsZQE="}
    with pytest.raises(OffbeatError, match=r"w of version 0\.0 .*checksum"):
        load_manifest(manifests[0])  # written anew since
    sender.close()
