"""The faults of a scenario and how they are injected."""

import asyncio
from typing import Any

from shared.failpoints import FailpointError
from shared.rpc.connection import RpcChannel
from shared.rpc.messages import SetRoleRequest
from shared.rpc.methods import SET_ROLE, PeerError
from tests.simulation.hosts import Host, NodeHost
from tests.simulation.loop import CURRENT, Died
from tests.simulation.scenario import OUTAGE, Fault

RESTART_S = (0.1, 0.5, 2.0)
AT_SITE = {"kill at site", "vanish at site", "freeze at site", "raise"}


class Faults:
    """Injects timed faults in `run`, and faults at failpoints in `at_site`, which is called at every failpoint."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.fired_raise = False
        self._at_sites = [fault for fault in world.scenario.faults if fault.kind in AT_SITE]

    async def run(self) -> None:
        began, last_s = self.world.loop.now, 0.0
        for fault in self.world.scenario.faults:
            last_s = max(last_s, fault.at_s + fault.for_s)
            if fault.kind not in AT_SITE:
                await asyncio.sleep(max(0.0, began + fault.at_s - self.world.loop.now))
                self._do(fault)
        await asyncio.sleep(max(0.0, began + last_s - self.world.loop.now))

    def heal(self) -> None:
        """End all faults and restart the hosts that are down."""
        world = self.world
        self._at_sites.clear()
        world.network.heal()
        world.exchange.num_faults = 0
        world.redis.down_until = world.redis.hangs_until = world.redis.wrong_until = 0.0
        for host in world.hosts:
            host.process.thaws_at = host.process.lag_s = 0.0
            if not host.is_up:
                host.start()

    # ---- timed faults --------------------------------------------------------------------------------------------

    def _do(self, fault: Fault) -> None:
        world, random, now = self.world, self.world.random, self.world.loop.now
        up = [host for host in world.hosts if host.is_up]
        nodes = [host for host in up if isinstance(host, NodeHost)]
        if not nodes or (fault.kind == "kill router" and not world.router.is_up):
            return
        host = random.choice(nodes)
        if fault.kind == "freeze":  # a router too may freeze
            host = random.choice(up)
        world.note(f"fault: {fault.kind} {host.name} for {fault.for_s:.2f} s")
        world.reached(f"fault: {fault.kind}")
        match fault.kind:
            case "kill" | "vanish":
                self.kill(host, silent=fault.kind == "vanish")
            case "kill router":
                self.kill(world.router)
            case "freeze":
                host.process.thaws_at = now + fault.for_s
            case kind if kind in OUTAGE.values():
                for node in nodes:
                    if OUTAGE[node.role] == kind:
                        node.process.thaws_at = now + fault.for_s
            case "hang" if host.engine is not None:
                host.engine.hangs_until = now + fault.for_s
            case "slow":
                host.process.lag_s = 0.001 + 0.01 * random.random()
                world.loop.call_later(fault.for_s, setattr, host.process, "lag_s", 0.0)
            case "cut" | "cut one way":
                self._cut(fault, up)
            case "reset":
                self._reset(host)
            case "stall":
                self._stall(nodes, fault.for_s)
            case "drain":
                host.drain()
            case "role":
                self._change_role(host)
            case "clock jumps":
                host.process.wall_offset_s += random.choice((-3600.0, 3600.0))
            case kind if kind.startswith("registry"):
                self._disturb_registry(fault)

    def kill(self, host: Host, *, silent: bool = False) -> None:
        self.world.died(host, silent=silent)
        self.world.loop.call_later(self.world.random.choice(RESTART_S), self._restart, host)

    def _restart(self, host: Host) -> None:
        if not host.is_up and not self.world.is_ending:
            host.start()

    def _cut(self, fault: Fault, up: list[Host]) -> None:
        if len(up) < 2:
            return
        one, other = self.world.random.sample(up, 2)
        self.world.note(f"cut between {one.name} and {other.name}")
        self.world.network.cut(one.name, other.name, fault.for_s)
        if fault.kind == "cut":
            self.world.network.cut(other.name, one.name, fault.for_s)

    def _reset(self, host: NodeHost) -> None:
        """Reset one of the host's connections after a random number of further bytes."""
        ends = self.world.network.ends_of(host.process)
        if ends:
            self.world.random.choice(ends).breaks_after = self.world.random.randrange(400)

    def _stall(self, nodes: list[NodeHost], for_s: float) -> None:
        """Stall the connections between a prefill and a decode node in both directions."""
        prefill, decode = (
            self.world.random.choice([host for host in nodes if host.role == role]) for role in ("prefill", "decode")
        )
        self.world.network.stall(prefill.process, decode.process, for_s)

    def _change_role(self, host: NodeHost) -> None:
        if host.node is not None and host.node.state.info.address and self.world.router.is_up:
            host.role = "prefill" if host.role == "decode" else "decode"
            self.world.router.run(_set_role(host.node.state.info.address, host.role, self.world.random.random() * 4.0))

    def _disturb_registry(self, fault: Fault) -> None:
        until = self.world.loop.now + fault.for_s
        match fault.kind:
            case "registry down":
                self.world.redis.down_until = until
            case "registry hangs":
                self.world.redis.hangs_until = until
            case "registry wrong":
                self.world.redis.wrong_until = until
            case _:
                self.world.redis.flush()

    # ---- faults at failpoints --------------------------------------------------------------------------------------

    def at_site(self, site: str, detail: str) -> None:
        """Inject the scenario's faults for this site. Raises Died if a fault kills the process, or FailpointError."""
        process = CURRENT.get()
        self.world.reached(f"site {site}")
        if not process.alive:
            raise Died
        for fault in tuple(self._at_sites):
            if fault.site != site:
                continue
            fault.passing -= 1
            if fault.passing:
                continue
            self._at_sites.remove(fault)
            self.world.note(f"fault: {fault.kind} {process} at {site} {detail}")
            self.world.reached(f"fault: {fault.kind}")
            match fault.kind:
                case "kill at site" | "vanish at site":
                    self.kill(self.world.host_of(process), silent=fault.kind == "vanish at site")
                    raise Died
                case "freeze at site":
                    process.thaws_at = self.world.loop.now + fault.for_s
                case _:
                    self.fired_raise = True
                    raise FailpointError(f"failpoint {site}")


async def _set_role(address: str, role: str, drain_s: float) -> None:
    channel = RpcChannel(address)
    try:
        await SET_ROLE.call(channel, SetRoleRequest(role, drain_s), 20.0)
    except PeerError:
        pass  # the node died or is unreachable
    finally:
        channel.close()
