"""Memory of GPUs over a double of the driver, what is special to `cuda_ipc`, and pools that are lent.

What all channels have in common is in test_kv_channels.
"""

import asyncio
import ctypes
import os
import secrets
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shared.kv.channel import ChannelError, DescriptorError, PeerDescriptor, PeerLostError
from shared.kv.connections import WELCOME
from shared.kv.local import private
from shared.kv.memory import HostMemory
from shared.kv.shm import ShmChannel
from shared.kv_gpu.cuda_calls import Access, AllocationProperties, CopyAttributes, IpcHandle
from shared.kv_gpu.cuda_driver import CudaDevice, CudaError, CudaRegion, CudaStream, Driver
from shared.kv_gpu.cuda_ipc import OFFER, CudaIpcChannel
from shared.kv_gpu.pool import PoolClient, PoolOwner, descriptor_file
from tests.shared.fake_cuda import STEP, FakeCuda, FakeDeviceMemory, gpu

NUM_ROWS, ROW_BYTES = 8, 4096
KINDS = pytest.mark.parametrize("kind", ["vmm", "legacy"])


def written(region: CudaRegion, size: int) -> bytes:
    return ctypes.string_at(region.address, size)


def test_structures_have_the_sizes_of_cudas_own() -> None:
    sizes = [ctypes.sizeof(kind) for kind in (AllocationProperties, Access, IpcHandle, CopyAttributes)]
    assert sizes == [32, 12, 64, 24]


@KINDS
def test_a_region_is_zero_shared_while_anyone_has_it_and_gone_after(kind: str) -> None:
    fake = FakeCuda(kind)
    ours = CudaRegion.allocate(CudaDevice(0, Driver(fake)), ROW_BYTES)
    assert (ours.kind, ours.size) == ((kind, STEP) if kind == "vmm" else (kind, ROW_BYTES))
    assert written(ours, ROW_BYTES) == bytes(ROW_BYTES)
    other = FakeCuda(kind)
    theirs = CudaRegion.attach(CudaDevice(1, Driver(other)), kind, ours.size, ours.descriptor, ours.handle)
    ctypes.memset(theirs.address, 7, ROW_BYTES)
    assert written(ours, ROW_BYTES) == b"\7" * ROW_BYTES
    for _ in range(2):
        ours.close()
    assert written(theirs, 3) == b"\7\7\7"
    theirs.close()
    assert [fake.memories, fake.sizes, fake.streams, other.memories, other.sizes] == [{}] * 5


def test_a_driver_that_refuses_is_told_with_its_own_name_for_it() -> None:
    device = gpu()
    with pytest.raises(CudaError, match=r"cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        CudaRegion.allocate(device, 1 << 40)
    with pytest.raises(CudaError, match=r"cuDeviceGet failed: CUDA_ERROR_INVALID_VALUE \(1\)"):
        CudaDevice(9, device.driver)


def test_a_machine_without_a_driver_says_so() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a driver")
    with pytest.raises(CudaError, match="no CUDA driver to use here"):
        Driver.load()


@pytest.mark.parametrize("batch", [True, False])
def test_copies_are_begun_together_where_the_driver_can(batch: bool) -> None:
    fake = FakeCuda(batch=batch)
    region = CudaRegion.allocate(CudaDevice(0, Driver(fake)), STEP)
    ctypes.memset(region.address, 5, 100)
    stream = CudaStream(region.gpu)
    fake.said.clear()
    stream.copy([(region.address + 1000 * place, region.address, 100) for place in (1, 2, 3)])
    assert fake.said == (["cuMemcpyBatchAsync"] if batch else ["cuMemcpyDtoDAsync_v2"] * 3)
    assert written(region, 1001)[-1] == 0, "nobody waited yet"
    stream.wait()
    assert all(written(region, 4000)[1000 * place :][:101] == b"\5" * 100 + b"\0" for place in (1, 2, 3))
    stream.close()
    region.close()


def test_gpus_reach_themselves_and_their_peers_by_uuid() -> None:
    uuids = [bytes([number] * 16).hex() for number in range(4)]
    assert [gpu(0).reaches(uuid) for uuid in uuids] == [True, True, False, False]
    assert [gpu(2).reaches(uuid) for uuid in uuids] == [False, False, True, False]


async def start(directory: str | Path, device: CudaDevice | None = None) -> tuple[FakeDeviceMemory, CudaIpcChannel]:
    memory = FakeDeviceMemory(NUM_ROWS, ROW_BYTES, device)
    return memory, await CudaIpcChannel.start(memory, secrets.token_hex(16), lambda _: None, directory, 0.5)


async def test_only_a_gpu_that_this_one_reaches_is_reachable(tmp_path: Path) -> None:
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
            with pytest.raises(DescriptorError, match="cannot be written to from here"):
                await writer.push(receiver.descriptor(), bytes(16), [1], [3])
        await receiver.close()
        assert not writer.reachable(receiver.descriptor()), "it has ended"
        theirs.close()
    card = PeerDescriptor.unpack(writer.descriptor(), "cuda_ipc")
    far = PeerDescriptor(
        "cuda_ipc", f"elsewhere {ours.region.gpu.uuid}", card.endpoint, card.incarnation_id, ROW_BYTES, NUM_ROWS
    )
    assert not writer.reachable(far.pack())
    await writer.close()
    ours.close()


async def test_neighbouring_rows_are_one_copy_and_a_push_waits_for_all(tmp_path: Path) -> None:
    fake = FakeCuda(batch=False)
    ours, writer = await start(tmp_path, CudaDevice(0, Driver(fake)))
    theirs, receiver = await start(tmp_path)
    ours.rows[:] = np.arange(1, NUM_ROWS + 1, dtype=np.uint8)[:, None]
    await writer.push(receiver.descriptor(), bytes(16), [0, 1, 2, 5, 6], [4, 5, 6, 0, 1])
    assert fake.said.count("cuMemcpyDtoDAsync_v2") == 2
    assert theirs.rows[:, 0].tolist() == [6, 7, 0, 0, 1, 2, 3, 0]
    for channel, memory in ((writer, ours), (receiver, theirs)):
        await channel.close()
        memory.close()


async def test_a_failed_copy_fails_its_push_and_the_next_push_begins_anew(tmp_path: Path) -> None:
    fake = FakeCuda(batch=False)
    ours, writer = await start(tmp_path, CudaDevice(0, Driver(fake)))
    theirs, receiver = await start(tmp_path)
    ours.rows[1] = 9
    fake.refusing = 1
    with pytest.raises(PeerLostError, match="cuMemcpyDtoDAsync_v2 failed: CUDA_ERROR_INVALID_VALUE"):
        await writer.push(receiver.descriptor(), bytes(16), [1], [1])
    assert not theirs.rows.any()
    await writer.push(receiver.descriptor(), bytes(16), [1], [1])
    assert (theirs.rows[1] == 9).all()
    for channel, memory in ((writer, ours), (receiver, theirs)):
        await channel.close()
        memory.close()


def nothing(_connection: socket.socket) -> None:
    """It hangs up."""


def no_descriptor(connection: socket.socket) -> None:
    connection.sendall(WELCOME + OFFER.pack(b"vmm", 1 << 20, b""))


def too_little(connection: socket.socket) -> None:
    socket.send_fds(connection, [WELCOME + OFFER.pack(b"vmm", ROW_BYTES, b"")], [connection.fileno()])


def no_memory(connection: socket.socket) -> None:
    socket.send_fds(connection, [WELCOME + OFFER.pack(b"vmm", 1 << 20, b"")], [connection.fileno()])


def no_handle(connection: socket.socket) -> None:
    connection.sendall(WELCOME + OFFER.pack(b"legacy", 1 << 20, b"no such thing"))


@pytest.mark.parametrize("serve", [nothing, no_descriptor, too_little, no_memory, no_handle])
async def test_what_is_no_memory_of_a_gpu_is_never_written_to(
    serve: Callable[[socket.socket], None], tmp_path: Path
) -> None:
    ours, writer = await start(tmp_path)
    path = str(tmp_path / "false")
    host = PeerDescriptor.unpack(writer.descriptor(), "cuda_ipc").host
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        descriptors = len(os.listdir("/proc/self/fd"))

        def run() -> None:
            connection, _ = server.accept()
            with connection:
                serve(connection)
                connection.settimeout(1.0)
                while connection.recv(4096):
                    pass

        serving = asyncio.get_running_loop().run_in_executor(None, run)
        card = PeerDescriptor("cuda_ipc", host, path, "0" * 32, ROW_BYTES, NUM_ROWS).pack()
        with pytest.raises(PeerLostError):
            await writer.push(card, bytes(16), [0], [0])
        await serving
        assert len(os.listdir("/proc/self/fd")) == descriptors
    await writer.close()
    ours.close()


# Pools that are lent


async def lender(directory: Path, lost: list[str]) -> tuple[HostMemory, PoolOwner]:
    memory = HostMemory(NUM_ROWS, ROW_BYTES)
    inner = await ShmChannel.start(memory, secrets.token_hex(16), lost.append, directory)
    try:
        return memory, PoolOwner(inner, descriptor_file(directory, None))
    except OSError:
        await inner.close()
        memory.close()
        raise


async def test_a_borrower_computes_in_the_very_rows_of_the_lender_which_knows_when_it_is_gone(tmp_path: Path) -> None:
    lost: list[str] = []
    memory, ours = await lender(tmp_path, lost)
    boot = secrets.token_hex(16)
    borrower = await asyncio.to_thread(PoolClient.attach, tmp_path, None, boot, 1.0, 1.0)
    assert (borrower.num_rows, borrower.row_bytes) == (NUM_ROWS, ROW_BYTES)
    borrower.rows[3] = 5
    assert (memory.rows[3] == 5).all()
    assert borrower.reachable(ours.descriptor())
    assert borrower.checksums([3, 0]) == memory.checksums([3, 0])
    await borrower.push(ours.descriptor(), bytes(16), (), ())
    assert not ours.fence_writer(boot), "it is connected, and may write"
    assert lost == []
    await borrower.close()
    await borrower.close()
    async with asyncio.timeout(5):
        while lost != [boot]:  # noqa: ASYNC110  (a thread of the channel tells it)
            await asyncio.sleep(0.01)
    await ours.close()
    assert not descriptor_file(tmp_path, None).exists()
    memory.close()


async def test_a_lender_that_ends_is_told_to_its_borrower_and_nothing_is_handed_to_it_any_more(tmp_path: Path) -> None:
    memory, ours = await lender(tmp_path, [])
    borrower = await asyncio.to_thread(PoolClient.attach, tmp_path, None, secrets.token_hex(16), 1.0, 1.0)
    gone = asyncio.Event()
    borrower.watch(gone.set)
    card = ours.descriptor()
    await ours.close()
    async with asyncio.timeout(5):
        await gone.wait()
    with pytest.raises(PeerLostError, match="is gone"):
        await borrower.push(card, bytes(16), (), ())
    borrower.rows[0] = 1  # what is mapped stays mapped
    await borrower.close()
    memory.close()


async def test_one_pool_a_device_is_lent_and_its_place_is_free_again_when_its_owner_is_dead(tmp_path: Path) -> None:
    memory, ours = await lender(tmp_path, [])
    with pytest.raises(OSError, match="another decode node shares its pool there"):
        await lender(tmp_path, [])
    assert descriptor_file(tmp_path, None).read_bytes() == ours.descriptor()
    await ours._inner.close()  # as if it was killed: its card stays
    assert descriptor_file(tmp_path, None).exists()
    other_memory, other = await lender(tmp_path, [])
    await ours.close()
    assert descriptor_file(tmp_path, None).read_bytes() == other.descriptor(), "another one's card is left alone"
    await other.close()
    memory.close()
    other_memory.close()


async def test_what_a_killed_owner_left_is_in_nobodys_way_whatever_its_block_size(tmp_path: Path) -> None:
    path = descriptor_file(tmp_path, None)
    larger = HostMemory(NUM_ROWS, 2 * ROW_BYTES)
    before = PoolOwner(await ShmChannel.start(larger, secrets.token_hex(16), lambda _: None, tmp_path), path)
    with pytest.raises(OSError, match="another decode node shares its pool there"):
        await lender(tmp_path, [])
    await before._inner.close()  # as if it was killed: its card stays
    for left in (path.read_bytes(), b"half a ca"):
        path.write_bytes(left)
        memory, ours = await lender(tmp_path, [])
        assert path.read_bytes() == ours.descriptor()
        await ours.close()
        memory.close()
    larger.close()


def test_a_directory_in_which_others_may_put_their_cards_is_refused(tmp_path: Path) -> None:
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


async def test_a_borrower_waits_for_its_lender_and_says_whom_it_lacks(tmp_path: Path) -> None:
    boot = secrets.token_hex(16)
    for content in (None, b"nonsense"):
        if content is not None:
            descriptor_file(tmp_path, None).write_bytes(content)
        with pytest.raises(ValueError, match="--kv-channel pool: no decode node shares its pool in"):
            PoolClient.attach(tmp_path, None, boot, 0.0, 1.0)
    waiting = asyncio.create_task(asyncio.to_thread(PoolClient.attach, tmp_path, None, boot, 10.0, 1.0))
    await asyncio.sleep(0.3)
    descriptor_file(tmp_path, None).unlink()
    memory, ours = await lender(tmp_path, [])
    borrower = await waiting
    with pytest.raises(ValueError, match="KV blocks have 4096 bytes, ours 512: both need the same --model"):
        borrower.fitting(512)
    with pytest.raises(ChannelError):
        await ours.push(b"", bytes(16), (), ())
    await borrower.close()
    await ours.close()
    memory.close()


async def test_a_pool_on_a_gpu_is_lent_under_that_gpus_uuid(tmp_path: Path) -> None:
    device = gpu(1)
    memory = FakeDeviceMemory(NUM_ROWS, ROW_BYTES, device)
    inner = await CudaIpcChannel.start(memory, secrets.token_hex(16), lambda _: None, tmp_path)
    ours = PoolOwner(inner, descriptor_file(tmp_path, device))
    with pytest.raises(ValueError, match="no decode node shares"):
        PoolClient.attach(tmp_path, gpu(0), secrets.token_hex(16), 0.0, 1.0)
    borrower = await asyncio.to_thread(PoolClient.attach, tmp_path, gpu(1), secrets.token_hex(16), 1.0, 1.0)
    assert borrower.region is not None
    ctypes.memset(borrower.region.address + ROW_BYTES, 3, ROW_BYTES)
    assert memory.rows[:, 0].tolist() == [0, 3, 0, 0, 0, 0, 0, 0]
    await borrower.close()
    await ours.close()
    memory.close()
