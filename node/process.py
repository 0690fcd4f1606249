"""One node as a process: builds it from its settings, serves its RPCs, joins the registry, drains and ends."""

import asyncio
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from engine.components import build, on_gpu
from engine.cuda.memory import DeviceMemory
from engine.options import BuildOptions, EngineComponents
from engine.runner import Runner, set_ahead
from node.emulated_link import EmulatedLink
from node.node import Node
from node.node_info import advertised, describe
from node.roles import Roles, RoleSwitch
from node.watchdog import Watchdog, Watched
from scheduler.budget import Budget, budget_of
from scheduler.policy import POLICIES
from scheduler.role import PREFILL, Role
from scheduler.scheduler import Scheduler, StepLimits
from shared import failpoints
from shared.config.settings import EVERY_ADDRESS, NodeSettings
from shared.kv.channel import KVChannel, PeerLostError
from shared.kv.local import LocalChannel, private
from shared.kv.shm import ShmChannel
from shared.kv.tcp import TcpChannel
from shared.kv_gpu.cuda_driver import CudaDevice
from shared.kv_gpu.cuda_ipc import CudaIpcChannel
from shared.kv_gpu.pool import NAME as POOL
from shared.kv_gpu.pool import PoolClient, PoolOwner, descriptor_file
from shared.lifecycle import ProcessLifetime, freeze_gc, run
from shared.registry import Announcer, announcer
from shared.rpc import security
from shared.rpc.methods import ATTACH, SET_ROLE, RpcServer, unary

log = logging.getLogger("baton.node")
EXIT_ENGINE_DIED = 70
LENDER_S = 300.0  # a prefill node waits for the decode node whose pool it is to compute in
GRACE_S = 1.0  # for the event loop to end a stuck process by itself
NO_BLOCKS = 2  # what a scheduler has at least, for a node that has no pool of its own


def main(settings: NodeSettings, role: Role) -> int:
    """Runs the node until SIGTERM. Returns the process's exit status: 2 when the settings cannot be served."""
    if settings.cpus:
        for thread in Path("/proc/self/task").iterdir():  # importing numpy has started some already
            os.sched_setaffinity(int(thread.name), settings.cpus)
    boot = secrets.token_hex(16)
    try:
        failpoints.configure(settings.failpoint, allowed=settings.allow_failpoints)
        listens = {"--host": settings.host, "--kv-host": settings.kv_host or settings.host}
        security.configure(settings.cluster_secret_file, listens)
        private(settings.kv_directory)
        borrowed = _borrowed(settings, boot) if role is PREFILL and settings.kv_channel == POOL else None
        computer = build(_options(settings), borrowed)
        set_ahead(computer.runner, settings.async_scheduling)
        settings = settings.model_copy(update={"advertise": advertised(settings)})
    except (ValueError, OSError) as error:
        print(f"{role.name}: {error}", file=sys.stderr)
        return 2
    name = settings.id or role.name
    return run(
        lambda lifetime: _serve(lifetime, settings, role, computer, boot, borrowed),
        settings.log_level,
        settings.log_format,
        name,
    )


def _options(settings: NodeSettings) -> BuildOptions:
    """A setting goes to the option of its name."""
    names = {field.name for field in fields(BuildOptions)} - {"max_step_tokens"}
    return BuildOptions(**{name: getattr(settings, name) for name in names}, max_step_tokens=_budget(settings).ceiling)


def _budget(settings: NodeSettings) -> Budget:
    return budget_of(settings.max_num_batched_tokens, settings.tbt_slo_ms / 1000)


def _scheduler(
    settings: NodeSettings, computer: EngineComponents, budget: Budget, borrowed: PoolClient | None
) -> Scheduler:
    limits = StepLimits(
        settings.max_num_batched_tokens,
        settings.max_num_seqs,
        settings.long_prefill_token_threshold,
        settings.max_num_partial_prefills,
    )
    num_blocks = computer.layout.num_blocks if borrowed is None else NO_BLOCKS
    return Scheduler(limits, num_blocks, computer.layout.block_tokens, POLICIES[settings.policy], budget)


def _borrowed(settings: NodeSettings, boot: str) -> PoolClient:
    """Waits for the decode node on this device. Raises ValueError when there is none, OSError without a driver."""
    gpu = None
    if on_gpu(settings.device, computes=settings.runner == "torch" and not settings.emulate):
        gpu = CudaDevice(int(settings.device.partition(":")[2] or 0))
    return PoolClient.attach(settings.kv_directory, gpu, boot, LENDER_S, settings.push_timeout_s)


async def _serve(
    lifetime: ProcessLifetime,
    settings: NodeSettings,
    role: Role,
    computer: EngineComponents,
    boot: str,
    borrowed: PoolClient | None,
) -> int:
    node = _node(settings, role, computer, boot, borrowed)
    async with AsyncExitStack() as cleanup:
        try:
            registry = await _open(cleanup, lifetime, settings, node, computer, borrowed)
        except (ValueError, OSError) as error:
            print(f"{role.name}: {error}", file=sys.stderr)
            return 2
        node.start()
        cleanup.push_async_callback(node.close)
        await _warmed_up(node, computer.runner)
        watchdog = _watchdog(node, settings)
        watchdog.start()
        cleanup.callback(watchdog.stop)
        freeze_gc()
        await registry.start(node.info)
        info = node.info
        log.info("%s at %s: %d blocks of %d tokens", info.id, info.address, info.num_blocks - 1, info.block_tokens)
        if (died := await _until_ended(lifetime, node)) is None:
            died = await _until_drained(node, registry, settings.drain_timeout_s)
        if died is not None:
            log.error("the engine died: %s", died)
            os._exit(EXIT_ENGINE_DIED)  # at once, so that all notice; its thread may hang in the device
        await registry.close()
    return 0


def _node(
    settings: NodeSettings, role: Role, computer: EngineComponents, boot: str, borrowed: PoolClient | None
) -> Node:
    budget = _budget(settings)
    return Node(
        describe(settings, role, computer, budget, boot, borrowed.lender if borrowed else ""),
        role,
        _scheduler(settings, computer, budget, borrowed),
        computer.runner,
        settings.heartbeat_s,
        computer.vocab_size,
        settings.enable_prefix_caching,
        shared_pool=settings.kv_channel == POOL,
        stuck_s=settings.stuck_s,
    )


async def _open(
    cleanup: AsyncExitStack,
    lifetime: ProcessLifetime,
    settings: NodeSettings,
    node: Node,
    computer: EngineComponents,
    borrowed: PoolClient | None,
) -> Announcer:
    """The channels for KV and the server of RPCs; the node has its address then. Returns the registry to announce it
    in. Raises ValueError or OSError, with the fix in the message, when one of them cannot be had."""
    channels: list[KVChannel] = []
    sides = Roles(node, computer.memory, channels, settings.reserve_timeout_s)
    if borrowed is None:
        channels += await _channels(settings, computer, node.info.incarnation_id, sides.on_writer_lost)
    else:
        channels.append(borrowed)
        borrowed.watch(lambda: _lender_lost(lifetime, node))
    for channel in channels:
        cleanup.push_async_callback(channel.close)
    if borrowed is not None:
        cleanup.callback(_leave_borrowed, node)
    sides.assume(node.role)
    cleanup.push_async_callback(sides.close)
    registry = announcer(settings.registry, settings.cluster, settings.heartbeat_s)
    change = RoleSwitch(node, sides, registry, lifetime.draining)
    server = RpcServer({ATTACH: node.attach, SET_ROLE: unary(change.set_role), **sides.handlers()})
    try:
        port = await server.start(settings.host, settings.port)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        raise OSError(f"cannot listen on {where}: {error.strerror or error}; choose another --port") from None
    cleanup.push_async_callback(server.close)
    node.info = replace(node.info, address=f"{settings.advertise}:{port}")
    return registry


async def _until_drained(node: Node, registry: Announcer, timeout_s: float) -> BaseException | None:
    """Returns when no request is left, or with what the engine died of meanwhile."""
    await registry.update(replace(node.info, state="draining"))
    drained = asyncio.ensure_future(_drained(node, timeout_s))
    ends: tuple[asyncio.Future[Any], ...] = (drained, node.fatal_error)
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    return node.fatal_error.result() if node.fatal_error.done() else None


async def _drained(node: Node, timeout_s: float) -> None:
    """Whoever is not done by then goes on elsewhere."""
    await node.drain(timeout_s)
    if moved := node.migrate_all(f"node {node.info.id} ends"):
        log.warning("%d requests go on elsewhere, as they were not done within %g s", moved, timeout_s)
        await node.sessions.flush_deltas()


def _watchdog(node: Node, settings: NodeSettings) -> Watchdog:
    """Of the engine, and of the event loop, without which no death of the engine would be told."""

    def end(why: str) -> None:
        log.error("stuck: %s", why)
        node.stuck(why)
        time.sleep(GRACE_S)
        os._exit(EXIT_ENGINE_DIED)

    engine = node.engine
    loop_s = settings.stuck_s + 2 * settings.heartbeat_s
    return Watchdog(
        [
            Watched("the engine", lambda: engine.progress, lambda: engine.allowed_s),
            Watched("the event loop", lambda: node.num_heartbeats, lambda: loop_s),
        ],
        end,
    )


async def _warmed_up(node: Node, runner: Runner) -> None:
    """On the engine's thread, whose own some of it is; a failure is the engine's death."""
    loop = asyncio.get_running_loop()
    warm = loop.create_future()

    def command(_: Scheduler) -> None:
        runner.warm_up()
        loop.call_soon_threadsafe(warm.set_result, None)

    node.engine.post(command)
    await asyncio.wait((warm, node.fatal_error), return_when=asyncio.FIRST_COMPLETED)


def _lender_lost(lifetime: ProcessLifetime, node: Node) -> None:
    """Started anew, it waits for the next one: what is mapped now is no decode node's any more."""
    if not lifetime.draining.is_set():
        node.on_engine_failed(PeerLostError("the decode node in whose pool it computes has ended"))


def _leave_borrowed(node: Node) -> None:
    """Hanging up on the lender says that nothing is written any more. While something may still compute, only the
    process's end may say that."""
    if node.engine.is_running or node.fatal_error.done():
        log.error("ends at once: a step may still be computing in the decode node's pool")
        os._exit(EXIT_ENGINE_DIED)


async def _until_ended(lifetime: ProcessLifetime, node: Node) -> BaseException | None:
    """Returns at the first signal, or with what the engine died of."""
    draining = asyncio.ensure_future(lifetime.draining.wait())
    ends: tuple[asyncio.Future[Any], ...] = (draining, node.fatal_error)
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    draining.cancel()
    return node.fatal_error.result() if node.fatal_error.done() else None


async def _channels(
    settings: NodeSettings, computer: EngineComponents, boot: str, on_writer_lost: Callable[[str], None]
) -> list[KVChannel]:
    """Best first. The news that a tcp writer is gone is nothing to act on: the receiver itself fences it off."""
    memory, patience_s, wanted = computer.memory, settings.push_timeout_s, settings.kv_channel
    local: type[LocalChannel[Any]] = CudaIpcChannel if isinstance(memory, DeviceMemory) else ShmChannel
    if wanted not in {"auto", "tcp", POOL, local.name}:
        raise ValueError(f"--kv-channel {wanted}: is not for KV on --device {settings.device}: use {local.name} or tcp")
    channels: list[KVChannel] = []
    if wanted != "tcp":
        inner = await local.start(memory, boot, on_writer_lost, settings.kv_directory, patience_s)
        if wanted == POOL:
            gpu = memory.region.gpu if isinstance(memory, DeviceMemory) else None
            return [PoolOwner(inner, descriptor_file(settings.kv_directory, gpu))]
        channels.append(inner)
    if wanted in {"auto", "tcp"}:
        host = settings.kv_host or settings.host
        advertised = None if settings.kv_host not in {"", *EVERY_ADDRESS} else settings.advertise
        channels.append(
            await TcpChannel.start(memory, boot, lambda _: None, host, settings.kv_port, advertised, patience_s)
        )
    if computer.emulation is not None:
        return [EmulatedLink(channel, computer.emulation, computer.layout.block_tokens) for channel in channels]
    return channels
