"""Runs one node as a process: builds the node from its settings, serves its RPCs, joins the registry, drains and
exits."""

import asyncio
import logging
import os
import secrets
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from engine.components import build
from engine.cuda.kv.cuda_ipc import CudaIpcChannel
from engine.cuda.kv.driver import CudaDevice
from engine.cuda.kv.pool import NAME as POOL
from engine.cuda.kv.pool import PoolClient, PoolOwner, descriptor_file
from engine.cuda.memory import DeviceMemory
from engine.engine import Engine
from engine.options import BuildOptions, check_channel
from engine.runner import set_ahead
from engine.startup import EngineComponents, stage
from node.active_requests import RequestRules
from node.adapters import RuntimeAdapters
from node.emulated_link import EmulatedLink
from node.identity import advertised
from node.node import Node, RoleAdapter
from node.probes import NodeProbes
from node.stats import describe
from node.watchdog import Watchdog, Watched
from scheduler.budget import Budget, budget_of
from scheduler.drafters import Drafter, PromptLookup, Speculation
from scheduler.policy import POLICIES
from scheduler.role import PREFILL, Role
from scheduler.scheduler import Scheduler, StepLimits
from shared import failpoints, logs
from shared.config.settings import EVERY_ADDRESS, NodeSettings
from shared.kv.channel import KVChannel, PeerLostError
from shared.kv.local import LocalChannel, private
from shared.kv.memory import KVMemory
from shared.kv.shm import ShmChannel
from shared.kv.tcp import TcpChannel
from shared.lifecycle import ProcessLifetime, freeze_gc, listen, result_before, run
from shared.registry import Announcer, announcer
from shared.resolver import Resolver
from shared.rpc import tls
from shared.rpc.methods import ATTACH, SET_ADAPTER, SET_ROLE, RpcServer, unary

log = logging.getLogger("baton.node")
EXIT_ENGINE_FAILED = 70
POOL_OWNER_S = 300.0  # how long a starting prefill node waits for the decode node that owns its shared pool
GRACE_S = 1.0  # how long a stuck process waits before it exits, so that its event loop can report the problem
NO_BLOCKS = 2  # the number of rows of a scheduler's own pool if its node computes in another node's pool

# Makes the adapter of a role. The arguments are the node, its KV memory, its channels (best first) and the maximum
# number of seconds that a reservation waits for blocks.
RoleFactory = Callable[[Node, KVMemory, Sequence[KVChannel], float], RoleAdapter]


def main(
    settings: NodeSettings, role: Role, factories: Mapping[str, RoleFactory], resolve: Resolver | None = None
) -> int:
    """Run a node until SIGTERM, and return the exit status. If the node cannot start, print one line and return 2.

    `factories` maps the name of each role to the function that creates its adapter. The node begins in `role`.
    `resolve` returns the addresses of the routers; by default, the system resolves the host of `--registry`.
    """
    if settings.cpus:
        for thread in Path("/proc/self/task").iterdir():  # all threads: importing numpy has already started some
            os.sched_setaffinity(int(thread.name), settings.cpus)
    logs.configure(settings.log_level, settings.log_format, settings.id or role.name)
    incarnation_id = secrets.token_hex(16)
    try:
        failpoints.configure(settings.failpoint, allowed=settings.allow_failpoints)
        listens = {"--host": settings.host, "--kv-host": settings.kv_host or settings.host}
        tls.configure(settings.cluster_secret_file, listens)
        private(settings.kv_directory)
        pool = _shared_pool(settings, incarnation_id) if role is PREFILL and settings.kv_channel == POOL else None
        components = build(BuildOptions.from_settings(settings, max_step_tokens=_budget(settings).ceiling), pool)
        set_ahead(components.runner, settings.async_scheduling, speculates=bool(settings.speculative_config))
        settings = settings.model_copy(update={"advertise": advertised(settings)})
    except (ValueError, OSError) as error:
        return _start_failed(settings, role, error)
    process = NodeProcess(settings, role, factories, components, incarnation_id, pool, resolve=resolve)
    return run(process.serve)


def _start_failed(settings: NodeSettings, role: Role, error: Exception) -> int:
    """Print the error as one line on stderr. If the log level is debug, print a traceback first. Return the exit
    status."""
    if settings.log_level == "debug":
        traceback.print_exception(error)
    print(f"{role.name}: {error}", file=sys.stderr)
    return 2


def _budget(settings: NodeSettings) -> Budget:
    return budget_of(settings.max_num_batched_tokens, settings.tbt_slo_ms / 1000)


def _speculation(settings: NodeSettings, drafter: Drafter | None) -> Speculation | None:
    """Return how the node guesses tokens: by prompt lookup if that is configured, otherwise with `drafter`. Return None
    if the node guesses no tokens."""
    config = settings.speculation
    if config is not None and config.method == "ngram":
        drafter = PromptLookup(config.prompt_lookup_min, config.prompt_lookup_max)
    return None if config is None or drafter is None else Speculation(drafter, config.num_speculative_tokens)


def _shared_pool(settings: NodeSettings, incarnation_id: str) -> PoolClient:
    """Wait for the decode node on this device, and attach to its KV pool.

    Raises ValueError if there is no such decode node, and OSError if there is no driver.
    """
    gpu = None
    if BuildOptions.from_settings(settings).on_gpu:
        gpu = CudaDevice(int(settings.device.partition(":")[2] or 0))
    return PoolClient.attach(settings.kv_directory, gpu, incarnation_id, POOL_OWNER_S, settings.push_timeout_s)


async def open_channels(
    settings: NodeSettings, components: EngineComponents, incarnation_id: str, on_writer_lost: Callable[[str], None]
) -> list[KVChannel]:
    """Open the node's KV channels and return them, best first.

    `on_writer_lost` is called when a writer's connection ends, but not by the TCP channel, which rejects late writes.
    """
    memory, timeout_s, wanted = components.memory, settings.push_timeout_s, settings.kv_channel
    local: type[LocalChannel[Any]] = CudaIpcChannel if isinstance(memory, DeviceMemory) else ShmChannel
    check_channel(wanted, BuildOptions.from_settings(settings))
    channels: list[KVChannel] = []
    if wanted != "tcp":
        inner = local(memory, incarnation_id, on_writer_lost, settings.kv_directory, timeout_s)
        if wanted == POOL:
            gpu = memory.region.gpu if isinstance(memory, DeviceMemory) else None
            return [PoolOwner(inner, descriptor_file(settings.kv_directory, gpu))]
        channels.append(inner)
    if wanted in {"auto", "tcp"}:
        host = settings.kv_host or settings.host
        advertise = None if settings.kv_host not in {"", *EVERY_ADDRESS} else settings.advertise

        async def start(host: str, port: int) -> int:
            channels.append(TcpChannel(memory, incarnation_id, lambda _: None, host, port, advertise, timeout_s))
            return port

        await listen(start, host, settings.kv_port, "--kv-port", "--kv-host" if settings.kv_host else "--host")
    if components.emulation is not None:
        block_tokens = components.layout.block_tokens
        return [cast(KVChannel, EmulatedLink(each, components.emulation, block_tokens)) for each in channels]
    return channels


@dataclass
class NodeProcess:
    """One node from its start to its exit.

    `serve` runs on the process's event loop and returns the exit status. It opens the parts of the node in the order of
    their dependencies, and closes them in reverse. If the engine fails or makes no progress for too long, the process
    exits at once, so that its peers and its supervisor notice the failure.
    """

    settings: NodeSettings
    role: Role
    factories: Mapping[str, RoleFactory]
    components: EngineComponents
    incarnation_id: str
    pool: PoolClient | None = None  # the pool of a decode node, if this node computes in it
    make_engine: Callable[..., Engine] = Engine
    make_watchdog: Callable[[Sequence[Watched], Callable[[str], None]], Watchdog] = Watchdog
    open_channels: Callable[..., Awaitable[list[KVChannel]]] = open_channels
    freeze_gc: Callable[[], None] = freeze_gc
    resolve: Resolver | None = None  # replaces the resolver of the system

    async def serve(self, lifetime: ProcessLifetime) -> int:
        async with AsyncExitStack() as cleanup:
            try:
                node, registry = await self.open(cleanup, lifetime)
                probes = NodeProbes(lambda: (node.state.info, node.stats()), node.failure, node.refusal)
                await probes.serve(self.settings, cleanup)
                node.start()
                cleanup.push_async_callback(node.close)
                await self._warm_up(node)
            except (ValueError, OSError) as error:
                return _start_failed(self.settings, self.role, error)
            watchdog = self._watchdog(node)
            watchdog.start()
            cleanup.callback(watchdog.stop)
            self.freeze_gc()
            info = node.state.info
            await registry.start(info)
            log.info("%s at %s: %d blocks of %d tokens", info.id, info.address, info.num_blocks - 1, info.block_tokens)
            failed = result_before(asyncio.shield(node.fatal_error), lifetime.draining.wait())
            failure = await failed or await self._drain(node, registry)
            if failure is not None:
                log.error("the engine failed: %s", failure)
                os._exit(EXIT_ENGINE_FAILED)  # no cleanup, because the engine's thread may hang in the device
            await registry.close()
        return 0

    async def open(self, cleanup: AsyncExitStack, lifetime: ProcessLifetime) -> tuple[Node, Announcer]:
        """Open the KV channels and the RPC server. The server's port becomes part of the node's address.

        Raises ValueError or OSError if a channel or the server cannot be opened; the message says how to fix it.
        """
        settings, channels = self.settings, list[KVChannel]()
        node = self._node(channels)
        if self.pool is None:
            channels += await self.open_channels(settings, self.components, self.incarnation_id, node.on_writer_lost)
        else:
            channels.append(self.pool)
            self.pool.watch(lambda: _on_pool_owner_lost(lifetime, node))
        for channel in channels:
            cleanup.push_async_callback(channel.close)
        if self.pool is not None:
            cleanup.callback(leave_shared_pool, node)
        node.take_role(self.role)
        cleanup.push_async_callback(node.close_adapters)
        registry = announcer(settings.registry, settings.cluster, settings.heartbeat_s, self.resolve)
        set_role = unary(partial(node.set_role, registry, lifetime.draining))
        adapters = self.components.runner.adapters if settings.allow_runtime_lora_updating else None
        set_adapter = unary(RuntimeAdapters(node, registry, adapters).set_adapter)
        server = RpcServer({ATTACH: node.attach, SET_ROLE: set_role, SET_ADAPTER: set_adapter, **node.handlers()})
        port = await listen(server.start, settings.host, settings.port, "--port")
        cleanup.push_async_callback(server.close)
        node.update_info(address=f"{settings.advertise}:{port}")
        return node, registry

    def _node(self, channels: list[KVChannel]) -> Node:
        settings, components, budget = self.settings, self.components, _budget(self.settings)
        limits = StepLimits(
            settings.max_num_batched_tokens,
            components.max_num_seqs,
            settings.long_prefill_token_threshold,
            settings.max_num_partial_prefills,
        )
        num_blocks = components.layout.num_blocks if self.pool is None else NO_BLOCKS
        owner = self.pool.owner if self.pool is not None else ""
        given = components.memory, channels, settings.reserve_timeout_s
        return Node(
            describe(settings, self.role, components, budget, self.incarnation_id, owner),
            Scheduler(
                limits,
                num_blocks,
                components.layout.block_tokens,
                POLICIES[settings.policy],
                budget,
                groups=components.groups,
                speculation=_speculation(settings, components.drafter),
            ),
            components.runner,
            RequestRules(
                components.vocab_size,
                settings.enable_prefix_caching,
                settings.kv_channel == POOL,
                poolings=components.runner.poolings,
                grammars=components.grammars,
                images=components.images,
            ),
            lambda node, role: self.factories[role.name](node, *given),
            settings.heartbeat_s,
            stuck_s=settings.stuck_s,
            make_engine=self.make_engine,
        )

    async def _warm_up(self, node: Node) -> None:
        """Run the first steps on the engine's thread, which owns part of the runner's state.

        Raises ValueError with a one-line message if the steps fail.
        """
        drafter = self.components.drafter

        def warm_up() -> None:
            self.components.runner.warm_up()
            if drafter is not None:
                drafter.warm_up()

        with stage("running the first steps", "leave more memory free: lower --gpu-memory-utilization or --num-blocks"):
            await node.between_steps(warm_up)

    def _watchdog(self, node: Node) -> Watchdog:
        """Make the watchdog of the engine and the event loop. The watchdog has its own thread, because a blocked event
        loop cannot detect that it is blocked."""

        def exit_stuck(reason: str) -> None:
            log.error("stuck: %s", reason)
            node.report_stuck(reason)
            time.sleep(GRACE_S)
            os._exit(EXIT_ENGINE_FAILED)

        engine = node.engine
        loop_s = self.settings.stuck_s + 2 * self.settings.heartbeat_s
        watched = [
            Watched("the engine", lambda: engine.progress, lambda: engine.allowed_s),
            Watched("the event loop", lambda: node.num_heartbeats, lambda: loop_s),
        ]
        return self.make_watchdog(watched, exit_stuck)

    async def _drain(self, node: Node, registry: Announcer) -> BaseException | None:
        """Announce that the node drains, and drain it. Return the engine's error if the engine fails during the
        drain."""
        await registry.update(replace(node.state.info, state="draining"))
        return await result_before(asyncio.shield(node.fatal_error), self._drain_requests(node))

    async def _drain_requests(self, node: Node) -> None:
        timeout_s = self.settings.drain_timeout_s
        if migrated := await node.drain(timeout_s, f"node {node.state.info.id} is shutting down"):
            log.warning("%d requests did not end within %g s: they are retried on other nodes", migrated, timeout_s)
        await node.sessions.flush()  # so that the routers know that the node leaves as planned


def _on_pool_owner_lost(lifetime: ProcessLifetime, node: Node) -> None:
    """Fail the node, because the pool's owner has ended and its memory is gone. After a restart, the node waits for a
    new owner."""
    if not lifetime.draining.is_set():
        node.on_engine_failed(PeerLostError("the decode node that owns the shared KV pool has ended"))


def leave_shared_pool(node: Node) -> None:
    """Exit the process at once if a step may still write into the shared pool.

    When this node's connection closes, the pool's owner assumes that this node will write nothing more. While the
    engine's thread runs, only the end of the process can guarantee this.
    """
    if node.engine.is_running or node.fatal_error.done():
        log.error("exiting at once: a step may still write into the shared KV pool")
        os._exit(EXIT_ENGINE_FAILED)
