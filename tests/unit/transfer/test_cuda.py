"""What of CUDA memory can be tested without a GPU: the probe, staging (with CPU tensors) and the checks of a handle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from shared.errors import Bug
from shared.transfer import cuda
from shared.transfer.cuda import CudaDevice, CudaMemory, CudaProbe, DeviceHandle

HANDLE = DeviceHandle("uuid", b"m" * 64, 4096, 0, b"/torch_12_345_0", 7, b"e" * 64, False, 1024, 2048)


def test_without_a_device_file_the_probe_says_so_and_does_not_load_torch(tmp_path: Path) -> None:
    program = (f"import sys, pathlib; from shared.transfer import cuda; "
               f"print(cuda.probe(pathlib.Path({str(tmp_path)!r})).reason, 'torch' in sys.modules)")
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.strip() == "no CUDA device False"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU that torch can use")
def test_a_device_that_torch_cannot_use(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert cuda.probe(tmp_path) == CudaProbe(reason="no CUDA device can be used: torch finds none")


def test_devices_are_found_by_what_all_processes_call_them() -> None:
    device = CudaDevice(1, "one", "uuid-1", ("uuid-1",))
    found = CudaProbe((CudaDevice(0, "zero", "uuid-0", ("uuid-0", "uuid-1")), device))
    assert found.named("uuid-1") is device and found.named("uuid-2") is None


def test_what_is_no_tensor_of_a_gpu() -> None:
    others = (torch.empty(1), torch.empty(1, device="meta"), np.empty(1), bytearray(1), 3)
    assert not any(map(cuda.is_cuda_tensor, others))


@pytest.mark.parametrize("stage_bytes", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize(("offset", "length"), [(0, 1000), (1, 998), (500, 0), (333, 64), (0, 128)])
def test_staging_moves_exactly_the_bytes_it_is_asked_for(stage_bytes: int, offset: int, length: int) -> None:
    noise = np.random.default_rng(1).integers(0, 256, 1000, dtype=np.uint8)
    memory = CudaMemory(torch.from_numpy(noise.copy()).view(250, 4), stage_bytes=stage_bytes)
    assert memory.nbytes == 1000 and memory.device == torch.device("cpu")
    out = np.zeros(length, dtype=np.uint8)
    memory.to_host(offset, out)
    assert (out == noise[offset:offset + length]).all()
    memory.from_host(offset, 255 - out)
    expected = noise.copy()
    expected[offset:offset + length] = 255 - out
    assert (memory.bytes.numpy() == expected).all()


def test_the_bytes_are_the_tensors_own_whatever_its_type() -> None:
    tensor = torch.arange(12, dtype=torch.float32, requires_grad=True)[4:]
    memory = CudaMemory(tensor)
    memory.from_host(4, np.frombuffer(np.float32(99).tobytes(), dtype=np.uint8))
    assert tensor[1].item() == 99 and memory.nbytes == 32


def test_a_copy_between_devices_is_waited_for_by_whoever_began_it() -> None:
    memory = CudaMemory(torch.zeros(16, dtype=torch.uint8))
    memory.copy_from(4, torch.full((8,), 7, dtype=torch.uint8))()
    memory.settle()
    assert memory.bytes.tolist() == [0] * 4 + [7] * 8 + [0] * 4
    with pytest.raises(Bug):
        memory.copy_from(9, torch.full((8,), 7, dtype=torch.uint8))


@pytest.mark.parametrize(("offset", "length"), [(-1, 4), (13, 4), (0, 17)])
def test_bytes_outside_are_a_bug(offset: int, length: int) -> None:
    memory = CudaMemory(torch.zeros(16, dtype=torch.uint8))
    with pytest.raises(Bug):
        memory.to_host(offset, np.zeros(length, dtype=np.uint8))


@pytest.mark.parametrize("tensor", [torch.zeros(4, 4).t(), torch.zeros(4, 4)[:, :2], torch.zeros(0)])
def test_only_a_run_of_bytes_can_be_registered(tensor: torch.Tensor) -> None:
    with pytest.raises(Bug, match="no run of bytes"):
        CudaMemory(tensor)


@pytest.mark.parametrize("change", [
    {"counter": b"/torch_1_2_3/../../etc"}, {"counter": b"/psm_1"}, {"counter": b""}, {"counter_offset": 10_000},
    {"memory": b""}, {"length": 0}, {"length": 4000}, {"start": 4096},
])
def test_a_handle_that_could_hurt_is_not_opened(change: dict[str, object]) -> None:
    HANDLE.check()
    with pytest.raises(ValueError, match="handle"):
        cuda.open_handle(msgspec.structs.replace(HANDLE, **change))


def test_memory_of_a_device_that_is_not_seen_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "probe", lambda: CudaProbe((CudaDevice(0, "zero", "another", ("another",)),)))
    with pytest.raises(ValueError, match="GPU uuid, which this process does not see"):
        cuda.open_handle(HANDLE)


def test_memory_of_a_device_reaches_the_host() -> None:
    out = np.zeros(6, dtype=np.uint8)
    cuda.copy_to_host(out[1:5], torch.arange(4, dtype=torch.uint8))
    assert out.tolist() == [0, 0, 1, 2, 3, 0]


def test_a_handle_is_bounded_on_its_way() -> None:
    decode = msgspec.msgpack.Decoder(DeviceHandle).decode
    assert decode(msgspec.msgpack.encode(HANDLE)) == HANDLE
    for change in ({"memory": b"m" * (cuda.MAX_HANDLE_BYTES + 1)}, {"start": -1}, {"length": 2**53}):
        with pytest.raises(msgspec.ValidationError):
            decode(msgspec.msgpack.encode(msgspec.structs.replace(HANDLE, **change)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU that torch can use")
def test_torch_has_the_functions_we_call_and_refuses_without_a_device() -> None:
    with pytest.raises(RuntimeError, match="CUDA"):
        CudaMemory(torch.zeros(16)).handle()
    assert callable(torch.UntypedStorage._new_shared_cuda)
