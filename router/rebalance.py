"""Changes the roles of nodes to match the router's load: `--rebalance on`."""

import asyncio
import logging
import time
from collections.abc import Callable

from router.http.admin import Admin
from router.metrics.scaling import ScalingSignals
from router.nodes.pool import NodePool
from router.scaling import RebalanceClock
from shared.errors import BatonError
from shared.lifecycle import TaskGroup

log = logging.getLogger("baton.router")
TICK_S = 1.0


class Rebalancer:
    """Changes a node's role when `RebalanceClock` returns a role. The rebalancer does nothing while the nodes also
    serve other routers, because it knows only the requests of its own router."""

    def __init__(
        self, pool: NodePool, signals: ScalingSignals, admin: Admin, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool, self._signals, self._admin = pool, signals, admin
        self._clock = RebalanceClock(clock)
        self._has_warned = False

    def start(self) -> TaskGroup:
        """Start the task that changes roles, and return its group."""
        tasks = TaskGroup()
        tasks.start(self.run())
        return tasks

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self.tick()

    async def tick(self) -> None:
        """Change the role of a node if a change is due."""
        if (routers := self._signals.num_routers) > 1:
            if not self._has_warned:
                log.warning("--rebalance on: roles stay as they are, because the nodes serve %d routers", routers)
            self._has_warned = True
            return
        role = self._clock.update(self._signals.needed(), self._signals.present())
        if not role:
            return
        prefill, decode = self._pool.routable()
        owners = {each.info.shared_pool_owner for each in self._pool.connections.values()}
        nodes = [
            each for each in (prefill if role == "decode" else decode)
            if not each.info.shared_pool_owner and each.info.incarnation_id not in owners
        ]  # fmt: skip
        if not nodes:
            return
        node = min(nodes, key=lambda each: (len(each.listeners), each.load.outstanding_tokens, each.info.id))
        log.info("rebalance: node %s becomes a %s node: requests need more nodes of this role", node.info.id, role)
        try:
            await self._admin.change(node, role)
        except BatonError as error:
            log.warning("rebalance: node %s keeps its role: %s", node.info.id, error)
