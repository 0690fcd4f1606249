"""The hosts of a simulated cluster and their processes: the real node and router without sockets and HTTP.

A node is a `node.process.NodeProcess` with the simulation's memory, runner and channels. A router is a `NodePool` and a
`Dispatcher` with the real registry. Clients run in the router's process, in place of its HTTP handlers.
"""

import asyncio
from contextvars import Context
from functools import partial
from types import SimpleNamespace
from typing import Any

from decode_node.receiver import HandoffReceiver
from engine.hash_model import LANES
from engine.startup import EngineComponents
from node.node import Node
from node.process import NodeProcess
from prefill_node.sender import HandoffSender
from router.dispatch.admission import AdmissionQueue
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.rules import DispatchRules
from router.nodes.pool import NodePool
from router.observer import RouterObserver
from scheduler.geometry import Geometry
from scheduler.role import ROLES
from scheduler.scheduler import Scheduler
from shared.config.settings import NodeSettings
from shared.kv.layout import KVLayout
from shared.registry import EmbeddedRegistry, RedisRegistry, Registry
from tests.simulation.channel import SimChannel, SimMemory
from tests.simulation.engine import SimEngine, SimRunner, SimWatchdog
from tests.simulation.loop import CURRENT, Process
from tests.simulation.scenario import VOCABULARY, Scenario

JOIN_PORT = 8001
HEARTBEAT_S = 0.5
NODE_TIMEOUT_S = 2.5
DRAIN_S = 6.0
MAX_MODEL_LEN = 1024


class Host:
    """One host, on which one process runs at a time."""

    def __init__(self, world: Any, name: str) -> None:
        self.world = world
        self.name = name
        self.process = Process(name)
        self.process.alive = False
        self.lifetime: Any = None  # in place of `shared.lifecycle.ProcessLifetime`, which handles signals
        self.task: asyncio.Task[Any] | None = None
        self.starts = 0
        self.is_silent = False  # the host vanished together with its process
        self.left: list[str] = []  # tasks still running after an orderly exit

    @property
    def is_up(self) -> bool:
        return self.process.alive

    def start(self) -> None:
        """Start a new process. If the host had vanished, reset the connections of the old process, so that its peers
        notice."""
        if self.is_silent:
            self.is_silent = False
            self.world.network.died(self.process, silent=False)
        self.starts += 1
        random = self.world.random
        self.process = Process(self.name)
        self.process.clock_offset_s = random.random() * 1e6
        self.process.wall_offset_s = random.choice((0.0, 0.0, -3600.0, 3600.0))
        # The lifetime is replaced here, so that a signal that comes early does not reach the old process.
        self.lifetime = SimpleNamespace(draining=asyncio.Event())
        self.world.note(f"{self.name} starts")
        self.task = self.run(self._life())

    def drain(self) -> None:
        async def set_event() -> None:
            self.lifetime.draining.set()

        self.run(set_event())

    def run(self, work: Any) -> "asyncio.Task[Any]":
        """Start a task inside this process."""
        context = Context()
        context.run(CURRENT.set, self.process)
        return asyncio.get_running_loop().create_task(work, context=context)

    async def _life(self) -> None:
        status = await self.main()
        if status:
            self.world.violate(f"{self.name} ended with status {status}")
        asyncio.get_running_loop().call_soon(self.world.ended, self, context=self.world.context)

    async def main(self) -> int:
        raise NotImplementedError


class SimNodeProcess(NodeProcess):
    """A node process that gives the simulation access to its node."""

    host: "NodeHost"

    async def open(self, *given: Any) -> Any:
        self.host.node, registry = await super().open(*given)
        return self.host.node, registry


class NodeHost(Host):
    adapters: list[Any]  # one for each role that the node has had, in order of time
    incarnation_id = ""
    node: Node | None = None
    engine: SimEngine | None = None
    scheduler: Scheduler | None = None

    def __init__(self, world: Any, name: str, role: str) -> None:
        super().__init__(world, name)
        self.role = role

    def start(self) -> None:
        self.incarnation_id, self.node, self.engine, self.scheduler = "", None, None, None
        self.adapters = []
        super().start()

    async def main(self) -> int:
        scenario: Scenario = self.world.scenario
        self.incarnation_id = f"{self.world.random.getrandbits(128):032x}"
        geometry = Geometry(scenario.block_tokens, scenario.groups)
        num_blocks = 1 + geometry.block_rows * (scenario.num_blocks[self.role] - 1) + 4 * geometry.state_rows
        layout = KVLayout(num_blocks, 1, 1, scenario.block_tokens, LANES, "float32")
        memory: Any = SimMemory(num_blocks, layout.block_bytes)
        runner = SimRunner(memory.rows, scenario.block_tokens, VOCABULARY, scenario.ahead, scenario.groups)
        computer = EngineComponents(
            runner, memory, layout, MAX_MODEL_LEN, VOCABULARY, "print", {},
            groups=scenario.groups, max_num_seqs=scenario.max_num_seqs,
        )  # fmt: skip
        settings = NodeSettings(
            model="sim",
            id=self.name,
            advertise="127.0.0.1",
            registry=f"127.0.0.1:{JOIN_PORT}" if scenario.registry == "embedded" else "redis://sim",
            heartbeat_s=HEARTBEAT_S,
            max_num_batched_tokens=scenario.budget_tokens,
            max_num_seqs=scenario.max_num_seqs,
            policy=scenario.policy,
            drain_timeout_s=DRAIN_S,
            reserve_timeout_s=5.0,
        )
        process = SimNodeProcess(
            settings,
            ROLES[self.role],
            {"prefill": partial(self._adapter, HandoffSender), "decode": partial(self._adapter, HandoffReceiver)},
            computer,
            self.incarnation_id,
            make_engine=SimEngine,
            make_watchdog=SimWatchdog,
            open_channels=self.channels,
            freeze_gc=lambda: None,
        )
        process.host = self
        return await process.serve(self.lifetime)

    def _adapter(self, kind: Any, *given: Any) -> Any:
        self.adapters.append(kind(*given))
        return self.adapters[-1]

    async def channels(
        self, settings: Any, computer: EngineComponents, incarnation_id: str, on_writer_lost: Any
    ) -> list[Any]:
        """Open simulated channels. This replaces `node.process.open_channels`."""
        memory: Any = computer.memory
        lost = {"tcp": lambda _: None, "shm": on_writer_lost}
        names = self.world.scenario.channels
        return [
            SimChannel(self.world.exchange, name, memory, incarnation_id, lost[name], self._is_promised)
            for name in names
        ]

    def _is_promised(self, block: int) -> bool:
        assert self.scheduler is not None
        return block in self.scheduler.pool._reserved or block in self.scheduler.pool._quarantined


class RouterHost(Host):
    dispatch: Dispatcher | None = None
    fleet: NodePool | None = None

    def start(self) -> None:
        self.dispatch = self.fleet = None
        super().start()

    async def main(self) -> int:
        scenario: Scenario = self.world.scenario
        identity = f"{self.name}-{self.starts}"
        registry: Registry
        if scenario.registry == "embedded":
            registry = EmbeddedRegistry("127.0.0.1", JOIN_PORT)
        else:
            registry = RedisRegistry("redis://sim", "default")
        observer = RouterObserver()
        queue = AdmissionQueue(max_wait_s=120.0)  # a stall of the only decode node is not an overload
        self.fleet = NodePool(identity, registry, "disaggregated", NODE_TIMEOUT_S, observer, queue.resize)
        rules = DispatchRules(disaggregate=scenario.disaggregate)
        self.dispatch = Dispatcher(self.fleet, queue, "sim", rules, observer)
        await self.fleet.start()
        await self.lifetime.draining.wait()
        await self.fleet.close()
        return 0
