"""Test the KV memory of GPUs, the `cuda_ipc` channel and shared pools, all with a fake driver.

tests/shared/test_kv_channels.py tests the behavior that all channels have in common.
"""

import asyncio
import contextlib
import ctypes
import gc
import inspect
import os
import secrets
import socket
import stat
import threading
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cuda.kv.cuda_ipc import OFFER, CudaIpcChannel
from engine.cuda.kv.driver import CudaDevice, CudaError, CudaRegion, Driver
from engine.cuda.kv.pool import PoolClient, PoolOwner, descriptor_file
from engine.cuda.memory import DeviceMemory
from engine.kv_pool import KVPool
from shared.kv.channel import ChannelError, DescriptorError, PeerDescriptor, PeerLostError
from shared.kv.connections import WELCOME
from shared.kv.layout import KVLayout
from shared.kv.local import private
from shared.kv.memory import HostMemory
from shared.kv.shm import ShmChannel
from tests.shared.fake_cuda import STRUCTURES, UNIT, CUresult, FakeCuda, FakeDeviceMemory, gpu

NUM_ROWS, ROW_BYTES = 8, 4096
CPU = torch.device("cpu")


def content(region: CudaRegion, size: int) -> bytes:
    return ctypes.string_at(region.address, size)


def new_id() -> str:
    return secrets.token_hex(16)


# ---- the driver -----------------------------------------------------------------------------------------------------


def test_the_fake_has_the_names_values_and_arguments_of_cuda_bindings() -> None:
    real = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    for name, fake in vars(FakeCuda).items():
        if name.startswith("cu"):
            num_arguments = (getattr(real, name).__doc__ or "").splitlines()[0].count(",") + 1
            assert num_arguments == max(1, len(inspect.signature(fake).parameters) - 1), name
        elif isinstance(fake, type) and issubclass(fake, IntEnum):
            assert all(getattr(getattr(real, name), member.name) == member for member in fake), name
    for code in CUresult:
        assert real.CUresult(int(code)).name == code.name
    for name, fields in STRUCTURES.items():
        assert set(fields) <= set(dir(getattr(real, name)()))


def test_memory_is_zeroed_and_exists_while_a_process_maps_it() -> None:
    fake, other = FakeCuda(), FakeCuda()
    ours = CudaRegion.allocate(CudaDevice(0, Driver(fake)), ROW_BYTES)
    assert (ours.size, content(ours, ROW_BYTES)) == (UNIT, bytes(ROW_BYTES))
    assert ours.descriptor is not None
    theirs = CudaRegion.attach(CudaDevice(1, Driver(other)), ours.size, ours.descriptor)
    ctypes.memset(theirs.address, 7, ROW_BYTES)
    assert content(ours, ROW_BYTES) == b"\7" * ROW_BYTES
    for _ in range(2):
        ours.close()
    assert content(theirs, 3) == b"\7\7\7"
    theirs.close()
    assert [fake.memories, fake.sizes, fake.streams, other.memories, other.sizes] == [{}] * 5


def test_a_failed_call_raises_the_name_of_the_call_and_of_the_error() -> None:
    device = gpu()
    with pytest.raises(CudaError, match=r"cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        CudaRegion.allocate(device, 1 << 40)
    with pytest.raises(CudaError, match=r"cuDeviceGet failed: CUDA_ERROR_INVALID_VALUE \(1\)"):
        CudaDevice(9, device.driver)


class InaccessibleCuda(FakeCuda):
    def cuMemSetAccess(self, address: int, size: int, access: list[object], count: int) -> None:
        raise ValueError(1)


def test_a_failed_mapping_is_undone() -> None:
    ours, fake = CudaRegion.allocate(gpu(), ROW_BYTES), InaccessibleCuda()
    assert ours.descriptor is not None
    with pytest.raises(CudaError, match="cuMemSetAccess failed"):
        CudaRegion.attach(CudaDevice(1, Driver(fake)), ours.size, ours.descriptor)
    assert fake.calls[-3:] == ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]
    assert (fake.sizes, fake.memories) == ({}, {})
    ours.close()


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a driver")
def test_a_missing_driver_raises_an_error_of_one_line() -> None:
    with pytest.raises(CudaError, match="no CUDA driver is available"):
        Driver.load()


# ---- KV memory ------------------------------------------------------------------------------------------------------


def device_memory(num_rows: int = 6, row_bytes: int = 1024) -> DeviceMemory:
    return DeviceMemory(CPU, num_rows, row_bytes, CudaRegion.allocate(gpu(), num_rows * row_bytes))


def test_copies_by_the_driver_appear_in_the_pool() -> None:
    layout = KVLayout(4, 2, 3, 8, 16, "bfloat16")
    ours = device_memory(layout.num_blocks, layout.block_bytes)
    pool = KVPool(layout, ours)
    assert not pool.tensor.any()
    staging = ours.staging()
    (room,) = staging.room([2])
    room[:] = np.full(layout.block_bytes // 2, 0x3F80, np.uint16).tobytes()  # the bits of 1 in bfloat16
    staging.write([2])
    assert (pool.tensor[2] == 1).all()
    assert not pool.tensor[[0, 1, 3]].any()
    pool.tensor[3] = pool.tensor[2]
    assert bytes(staging.read([3])[0]) == bytes(staging.read([2])[0]) != bytes(staging.read([1])[0])
    staging.close()
    del pool
    for _ in range(2):
        ours.close()


@given(
    rows=st.lists(st.integers(0, 5), max_size=9), word=st.integers(0, 127), bit=st.integers(0, 63), seed=st.integers(0)
)
def test_checksums_are_per_row_and_detect_any_changed_bit(rows: list[int], word: int, bit: int, seed: int) -> None:
    ours = device_memory()
    ours.rows[:] = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, ours.rows.shape, np.uint8))
    assert ours.checksums(rows) == b"".join(ours.checksums([row]) for row in rows)
    before = ours.checksums([3])
    ours.rows.view(torch.int64)[3, word] ^= 1 << bit if bit < 63 else -(2**63)
    assert ours.checksums([3]) != before
    ours.close()


def test_the_position_of_a_word_affects_the_checksum() -> None:
    ours = device_memory(4096, 8 * 4096)  # in row i, word i is 1 and the other words are 0
    ours.rows.view(torch.int64)[:] = torch.eye(4096, dtype=torch.int64)
    sums = ours.checksums(range(4096))
    assert len({sums[at : at + 8] for at in range(0, len(sums), 8)}) == 4096
    ours.close()


@pytest.mark.parametrize(("num_rows", "row_bytes"), [(0, 8), (8, 0), (3, 12)])
def test_memory_of_no_size_or_of_partial_words_is_rejected(num_rows: int, row_bytes: int) -> None:
    with pytest.raises(ValueError, match="choose another --block-size"):
        DeviceMemory(CPU, num_rows, row_bytes)


# ---- cuda_ipc -------------------------------------------------------------------------------------------------------


async def start(directory: str | Path, device: CudaDevice | None = None) -> tuple[FakeDeviceMemory, CudaIpcChannel]:
    memory = FakeDeviceMemory(NUM_ROWS, ROW_BYTES, device)
    return memory, CudaIpcChannel(memory, new_id(), lambda _: None, directory, 0.5)


async def test_a_receiver_is_reachable_only_if_its_gpu_is(tmp_path: Path) -> None:
    ours, writer = await start(tmp_path, gpu(0))
    for ordinal, reaches in ((0, True), (1, True), (2, False)):
        theirs, receiver = await start(tmp_path, gpu(ordinal))
        assert writer.reachable(receiver.descriptor()) == reaches
        if reaches:
            receiver.grant(bytes(16), [3])
            ours.rows[1] = 9
            await writer.push(receiver.descriptor(), bytes(16), [1], [3])
            assert (theirs.rows.sum(axis=1) == [0, 0, 0, 9 * ROW_BYTES, 0, 0, 0, 0]).all()
        else:
            with pytest.raises(DescriptorError, match="cannot write to the peer's GPU"):
                await writer.push(receiver.descriptor(), bytes(16), [1], [3])
        await receiver.close()
        assert not writer.reachable(receiver.descriptor())
        theirs.close()
    near = PeerDescriptor.unpack(writer.descriptor(), "cuda_ipc")
    place = f"another-host {ours.region.gpu.uuid}"
    far = PeerDescriptor("cuda_ipc", place, near.endpoint, near.incarnation_id, ROW_BYTES, NUM_ROWS)
    assert not writer.reachable(far.pack())
    await writer.close()
    ours.close()


async def test_adjacent_rows_are_one_copy_and_a_failed_copy_fails_only_its_push(tmp_path: Path) -> None:
    fake = FakeCuda()
    ours, writer = await start(tmp_path, CudaDevice(0, Driver(fake)))
    theirs, receiver = await start(tmp_path)
    ours.rows[:] = np.arange(1, NUM_ROWS + 1, dtype=np.uint8)[:, None]
    fake.num_failing = 1
    with pytest.raises(PeerLostError, match="cuMemcpyDtoDAsync failed: CUDA_ERROR_INVALID_VALUE"):
        await writer.push(receiver.descriptor(), bytes(16), [1], [1])
    assert not theirs.rows.any()
    fake.calls.clear()
    await writer.push(receiver.descriptor(), bytes(16), [0, 1, 2, 5, 6], [4, 5, 6, 0, 1])
    assert fake.calls.count("cuMemcpyDtoDAsync") == 2
    assert theirs.rows[:, 0].tolist() == [6, 7, 0, 0, 1, 2, 3, 0]
    for channel, memory in ((writer, ours), (receiver, theirs)):
        await channel.close()
        memory.close()


OFFERS: dict[str, Callable[[socket.socket], object]] = {
    "none": lambda connection: None,
    "no descriptor": lambda connection: connection.sendall(WELCOME + OFFER.pack(1 << 20)),
    "too little": lambda c: socket.send_fds(c, [WELCOME + OFFER.pack(ROW_BYTES)], [c.fileno()]),
    "no memory": lambda c: socket.send_fds(c, [WELCOME + OFFER.pack(1 << 20)], [c.fileno()]),
}


@pytest.mark.parametrize("offer", OFFERS)
async def test_an_invalid_offer_fails_the_push_and_leaks_no_descriptor(offer: str, tmp_path: Path) -> None:
    ours, writer = await start(tmp_path)
    path = str(tmp_path / "false")
    host = PeerDescriptor.unpack(writer.descriptor(), "cuda_ipc").host
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        gc.collect()  # garbage of earlier tests may have open descriptors
        num_open = len(os.listdir("/proc/self/fd"))

        def run() -> None:
            connection, _ = server.accept()
            with connection:
                OFFERS[offer](connection)
                connection.settimeout(1.0)
                while connection.recv(4096):
                    pass

        serving = asyncio.get_running_loop().run_in_executor(None, run)
        descriptor = PeerDescriptor("cuda_ipc", host, path, "0" * 32, ROW_BYTES, NUM_ROWS).pack()
        with pytest.raises(PeerLostError):
            await writer.push(descriptor, bytes(16), [0], [0])
        await serving
        assert len(os.listdir("/proc/self/fd")) <= num_open
    await writer.close()
    ours.close()


# ---- shared pools ---------------------------------------------------------------------------------------------------

Shared = tuple[HostMemory, ShmChannel, PoolOwner]


async def share(directory: Path, lost: list[str] | None = None, row_bytes: int = ROW_BYTES) -> Shared:
    memory = HostMemory(NUM_ROWS, row_bytes)
    inner = ShmChannel(memory, new_id(), [].append if lost is None else lost.append, directory)
    try:
        return memory, inner, PoolOwner(inner, descriptor_file(directory, None))
    except OSError:
        await inner.close()
        memory.close()
        raise


async def test_a_client_computes_in_the_owners_rows_and_the_owner_notices_its_end(tmp_path: Path) -> None:
    lost: list[str] = []
    memory, _, owner = await share(tmp_path, lost)
    incarnation_id = new_id()
    client = await asyncio.to_thread(PoolClient.attach, tmp_path, None, incarnation_id, 1.0, 1.0)
    assert (client.num_rows, client.row_bytes) == (NUM_ROWS, ROW_BYTES)
    client.rows[3] = 5
    assert (memory.rows[3] == 5).all()
    assert client.reachable(owner.descriptor())
    assert client.checksums([3, 0]) == memory.checksums([3, 0])
    await client.push(owner.descriptor(), bytes(16), (), ())
    with pytest.raises(ChannelError):
        await owner.push(b"", bytes(16), (), ())
    with pytest.raises(ValueError, match="KV blocks have 4096 bytes, ours 512: both need the same --model"):
        client.fitting(512)
    assert not owner.fence_writer(incarnation_id), "the client is connected and may write"
    assert lost == []
    for _ in range(2):
        await client.close()
    async with asyncio.timeout(5):
        while lost != [incarnation_id]:  # noqa: ASYNC110  (set by a thread of the channel)
            await asyncio.sleep(0.01)
    await owner.close()
    assert not descriptor_file(tmp_path, None).exists()
    memory.close()


async def test_a_client_notices_the_end_of_its_owner_and_cannot_push(tmp_path: Path) -> None:
    memory, _, owner = await share(tmp_path)
    client = await asyncio.to_thread(PoolClient.attach, tmp_path, None, new_id(), 1.0, 1.0)
    gone = asyncio.Event()
    client.watch(gone.set)
    descriptor = owner.descriptor()
    await owner.close()
    async with asyncio.timeout(5):
        await gone.wait()
    with pytest.raises(PeerLostError, match="is gone"):
        await client.push(descriptor, bytes(16), (), ())
    client.rows[0] = 1  # the memory is still mapped
    await client.close()
    memory.close()


@pytest.mark.parametrize("row_bytes", [ROW_BYTES, 2 * ROW_BYTES])
async def test_a_device_has_one_shared_pool_and_a_killed_owner_is_replaced(row_bytes: int, tmp_path: Path) -> None:
    path = descriptor_file(tmp_path, None)
    memory, inner, owner = await share(tmp_path, row_bytes=row_bytes)
    with pytest.raises(OSError, match="the pool of another decode node"):
        await share(tmp_path)
    assert path.read_bytes() == owner.descriptor()
    await inner.close()  # the descriptor file remains, as after a kill
    for left in (path.read_bytes(), b"half a de"):
        path.write_bytes(left)
        next_memory, next_inner, next_owner = await share(tmp_path)
        await owner.close()
        assert path.read_bytes() == next_owner.descriptor(), "the file of another owner stays"
        await next_inner.close()
        next_memory.close()
    memory.close()


async def test_only_one_of_two_nodes_that_start_at_once_shares_its_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, inner, _ = await share(tmp_path)
    await inner.close()  # the descriptor file remains, as after a kill
    memory.close()
    both, is_live = threading.Barrier(2), ShmChannel.is_live

    def waits_for_the_other(self: ShmChannel, peer: PeerDescriptor) -> bool:
        found = is_live(self, peer)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(1.0)
        return found

    monkeypatch.setattr(ShmChannel, "is_live", waits_for_the_other)
    starts = [asyncio.to_thread(asyncio.run, share(tmp_path)) for _ in range(2)]
    found = await asyncio.gather(*starts, return_exceptions=True)
    (own,) = (each for each in found if not isinstance(each, BaseException))
    (error,) = (each for each in found if isinstance(each, BaseException))
    assert "the pool of another decode node" in str(error)
    await own[2].close()
    own[0].close()


def test_a_directory_in_which_others_can_write_is_rejected(tmp_path: Path) -> None:
    assert stat.S_IMODE(private(tmp_path / "of" / "ours").stat().st_mode) == 0o700
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    with pytest.raises(OSError, match=r"^--kv-directory .*shared: other users can write there"):
        private(tmp_path / "shared")
    if os.getuid() == 0:
        (tmp_path / "taken").mkdir()
        os.chown(tmp_path / "taken", 12345, 12345)
        with pytest.raises(OSError, match=r"^--kv-directory .*taken: other users can write there"):
            private(tmp_path / "taken")


async def test_a_client_waits_for_an_owner_for_a_limited_time(tmp_path: Path) -> None:
    for data in (None, b"nonsense"):
        if data is not None:
            descriptor_file(tmp_path, None).write_bytes(data)
        with pytest.raises(ValueError, match="--kv-channel pool: no decode node shares its pool in"):
            PoolClient.attach(tmp_path, None, new_id(), 0.0, 1.0)
    waiting = asyncio.create_task(asyncio.to_thread(PoolClient.attach, tmp_path, None, new_id(), 10.0, 1.0))
    await asyncio.sleep(0)
    descriptor_file(tmp_path, None).unlink()
    memory, _, owner = await share(tmp_path)
    client = await waiting
    await client.close()
    await owner.close()
    memory.close()


async def test_a_pool_on_a_gpu_is_found_by_the_uuid_of_the_gpu(tmp_path: Path) -> None:
    device = gpu(1)
    memory = FakeDeviceMemory(NUM_ROWS, ROW_BYTES, device)
    inner = CudaIpcChannel(memory, new_id(), lambda _: None, tmp_path)
    owner = PoolOwner(inner, descriptor_file(tmp_path, device))
    with pytest.raises(ValueError, match="no decode node shares"):
        PoolClient.attach(tmp_path, gpu(0), new_id(), 0.0, 1.0)
    client = await asyncio.to_thread(PoolClient.attach, tmp_path, gpu(1), new_id(), 1.0, 1.0)
    assert client.region is not None
    ctypes.memset(client.region.address + ROW_BYTES, 3, ROW_BYTES)
    assert memory.rows[:, 0].tolist() == [0, 3, 0, 0, 0, 0, 0, 0]
    await client.close()
    await owner.close()
    memory.close()
