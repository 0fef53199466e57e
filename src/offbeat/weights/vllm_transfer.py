"""Offbeat's weights inside vLLM's workers: a weight-transfer backend and its registration.

```
 engine process                         worker process (one a device)
 stage_manifest ────────────────────►   a thread reads and verifies the version beside decoding
 manifest_staged? ◄─────────────────    "" once the tensors are there
 pause · start · update · finish ───►   the staged tensors are loaded layer by layer
```

vLLM calls `register` in each of its processes through the entry point group
`vllm.general_plugins`. Only those processes import this module.
"""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import parent_process, resource_tracker
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from offbeat.errors import OffbeatError
from offbeat.records import Manifest, PolicyVersion, TensorEntry
from offbeat.weights.transport import load_manifest

BACKEND = "offbeat"
EXTENSION = "offbeat.weights.vllm_transfer.Staging"
SHARED_MEMORY = Path("/dev/shm")


def register() -> None:
    """vLLM's plugin hook: makes the backend known; may be called again."""
    try:
        WeightTransferEngineFactory.register_engine(BACKEND, ManifestTransfer)
    except ValueError:
        return  # registered before
    parent = parent_process()
    if parent is not None and os.environ.get("OFFBEAT_VLLM") == "1":
        # A killed engine must not leave its core and workers behind, with their memory.
        threading.Thread(target=_die_with, args=(parent,), name="parent", daemon=True).start()


def pack(manifest: Manifest) -> str:
    """A manifest as JSON, to travel through vLLM's calls."""
    return json.dumps(asdict(manifest))


def unpack(text: str) -> Manifest:
    """The manifest that `pack` packed."""
    found = json.loads(text)
    entries = {
        name: TensorEntry(entry["dtype"], tuple(entry["shape"]), entry["checksum"])
        for name, entry in found.pop("tensors").items()
    }
    base = found.pop("base")
    return Manifest(
        version=PolicyVersion(**found.pop("version")),
        tensors=entries,
        base=None if base is None else PolicyVersion(**base),
        **found,
    )


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on beforehand."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Names the staged version that is to be loaded."""

    version: str


class ManifestTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Loads a published version; it must have been staged, and is refused under another name."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._reading: _Reading | None = None
        self._wanted: frozenset[str] = frozenset()

    def stage(self, manifest: Manifest) -> None:
        """Begins to read a version; one that was staged before and not loaded is forgotten."""
        self._reading = _Reading(manifest, self.device)

    def staged(self) -> str | None:
        """None while the version is read, "" when it is there, else why it is not."""
        reading = self._reading
        if reading is None:
            return "nothing is staged"
        return reading.state()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Brings the layers into the form in which checkpoints are loaded."""
        self._wanted = frozenset(name for name, _ in self.model.named_parameters())
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Loads the staged tensors. Raises when one that the model has is missing."""
        reading = self._reading
        if reading is None or str(reading.manifest.version) != update_info.version:
            raise OffbeatError(f"version {update_info.version} was not staged")
        tensors = reading.tensors()
        # Tied names are not loaded: the model ties them itself.
        loaded = self.model.load_weights(
            [(name, tensors[name]) for name in reading.manifest.tensors]
        )
        missing = sorted(self._wanted - loaded) if loaded is not None else []
        if missing:
            raise OffbeatError(f"version {update_info.version} lacks {', '.join(missing[:3])}")

    def finish_weight_update(self) -> None:
        """Brings the layers back into the form in which they compute."""
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            # A head that shares the embedding's weight keeps its packed copy of the old one.
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
        self._reading = None

    def shutdown(self) -> None:
        """Lets go of what is staged."""
        self._reading = None


class Staging:
    """What vLLM's workers can do besides, for an engine of Offbeat. vLLM mixes it into them."""

    weight_transfer_engine: ManifestTransfer

    def stage_manifest(self, manifest: str) -> None:
        """Begins to read a packed manifest's version."""
        self.weight_transfer_engine.stage(unpack(manifest))

    def manifest_staged(self) -> str | None:
        """None while it is read, "" when it is there, else why it is not."""
        return self.weight_transfer_engine.staged()

    def process_id(self) -> int:
        """This worker's process."""
        return os.getpid()


class _Reading:
    """A version on its way into this process, on a thread of its own."""

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self.manifest = manifest
        self._device = device
        self._tensors: Mapping[str, torch.Tensor] | None = None
        self._error: Exception | None = None
        # A daemon: a sender that never comes must not keep the process alive.
        self._thread = threading.Thread(target=self._read, name="stage", daemon=True)
        self._thread.start()

    def state(self) -> str | None:
        if self._thread.is_alive():
            return None
        return "" if self._error is None else f"{type(self._error).__name__}: {self._error}"

    def tensors(self) -> Mapping[str, torch.Tensor]:
        self._thread.join()
        if self._tensors is None:
            raise OffbeatError(f"version {self.manifest.version}: {self._error}")
        return self._tensors

    def _read(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread has its own
            self._tensors = load_manifest(self.manifest)
        except Exception as error:  # boundary: the engine asks for it, and is told
            self._error = error


def _die_with(parent: Any) -> None:
    parent.join()
    try:
        _unlink_rings()
    finally:
        os._exit(1)


def _unlink_rings() -> None:
    """Removes the shared memory through which vLLM's processes speak, whoever made it: with the
    parent gone nobody does, and the process that would tidy up may have been killed, too."""
    tracker: Any = resource_tracker._resource_tracker
    for found in gc.get_objects():
        if type(found) is ShmRingBuffer and hasattr(found, "shared_memory"):
            name = found.shared_memory.name
            with suppress(FileNotFoundError):
                (SHARED_MEMORY / name).unlink()
                if tracker._fd is not None and tracker._check_alive():  # it would warn of a leak
                    tracker.unregister(f"/{name}", "shared_memory")
