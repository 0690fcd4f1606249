"""One arm's running cluster: `baton up` as a process of its own, met when all of it serves, and always ended.

It is started by its command line, so that the comparison knows of the stack what any user of it knows.
"""

import asyncio
import contextlib
import os
import re
import sys
import time
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from compare.arms import Arm
from compare.endpoint import Endpoint, Unreachable
from shared.config.settings import PREFIX, parse_size
from shared.errors import ConfigError
from shared.kv.layout import HOST_KV_BYTES
from shared.kv_gpu.cuda_driver import CudaError, Driver
from shared.lifecycle import set_parent_death_signal

ROOT = Path(__file__).resolve().parent.parent
SERVING_AT = re.compile(r"serving at (http://\S+)")
START_S = 180.0
DRAIN_S = 3  # of an arm that ends: whatever it still does, nobody waits for
GRACE_S = 12.0
BAD_SETTINGS = 2
PROCESS_BYTES = 400 << 20  # of a node with its libraries, measured
# Where nodes fill every core, the load generator still has to be on time: it is no part of what is measured.
BEHIND_CLIENT = 5


@dataclass(frozen=True, slots=True)
class Launch:
    """What every arm is started with alike: a model directory, the cores that its nodes share ((): all), and how many
    GPUs they may take."""

    model: str
    cpus: tuple[int, ...] = ()
    emulate: str = ""
    gpus: int = 0

    def command(self, arm: Arm) -> list[str]:
        flags = ["--model", self.model, "--port", "0", "--registry-port", "0", "--drain-timeout-s", str(DRAIN_S)]
        flags += ["--cpus", ",".join(map(str, self.cpus))] if self.cpus else []
        flags += ["--emulate", self.emulate] if self.emulate else []
        if self.gpus and arm.settings.get("device", "auto") in {"auto", "cuda"}:
            in_place = arm.settings.get("kv_channel") == "pool"  # there, prefill nodes are on decode nodes' GPUs
            num_gpus = min(self.gpus, arm.decode if in_place else arm.devices)
            flags += ["--devices", ",".join(f"cuda:{number}" for number in range(num_gpus))]
        return [sys.executable, "-P", "-m", "cluster", "up", *flags, *arm.flags()]


class Stack:
    """Owns the process of one arm. `endpoint` is its router, once `start` has returned."""

    def __init__(self, arm: Arm, launch: Launch, log: Path) -> None:
        self.arm = arm
        self.endpoint = Endpoint("http://127.0.0.1")
        self._launch = launch
        self._log = log
        self._process: Process | None = None

    async def start(self) -> None:
        """Returns when every node of the arm takes requests. Raises ConfigError or Unreachable, with its last words."""
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._launch.command(self.arm),
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                env=environment(),
                start_new_session=True,  # a Ctrl-C at the terminal is ours to pass on
                preexec_fn=before_it_runs(os.getpid()),
            )
        deadline = time.monotonic() + START_S
        while not await self._is_complete():
            if self._process.returncode is not None:
                raise self._ended(self._process.returncode)
            if time.monotonic() > deadline:
                raise Unreachable(f"{self.arm.name} does not serve after {START_S:g} s; see {self._log}")
            await asyncio.sleep(0.1)
        await self.endpoint.meet()

    async def _is_complete(self) -> bool:
        found = SERVING_AT.search(self._log.read_text(errors="replace"))
        if found is None:
            return False
        if self.endpoint.url != found[1]:
            await self.endpoint.close()
            self.endpoint = Endpoint(found[1])
        with contextlib.suppress(Unreachable):
            nodes = (await self.endpoint.status())["nodes"]
            return sum(bool(node["alive"]) for node in nodes) >= self.arm.devices
        return False

    def _ended(self, status: int) -> Exception:
        last = self._log.read_text(errors="replace").strip().splitlines()
        words = next((line for line in reversed(last) if "error" in line.lower() or ": " in line), "it said nothing")
        kind = ConfigError if status == BAD_SETTINGS else Unreachable
        return kind(f"{self.arm.name} did not start (status {status}): {words}; all of it is in {self._log}")

    def terminate(self) -> None:
        """Asks it to end; `end` waits for that."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    async def end(self) -> None:
        self.terminate()
        await self.endpoint.close()
        if self._process is None:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), GRACE_S)
        if self._process.returncode is None:  # its nodes have asked to die with it
            self._process.kill()
            await self._process.wait()


class Stacks:
    """The stacks of all arms. Either all stay up, or each is started for its turn and the one before it is ended."""

    def __init__(self, stacks: Sequence[Stack], *, keeps_all: bool) -> None:
        self.keeps_all = keeps_all
        self._stacks = {stack.arm.name: stack for stack in stacks}
        self._up: dict[str, Stack] = {}

    async def up(self, name: str) -> Endpoint:
        """The arm's endpoint, once it serves. Raises ConfigError or Unreachable."""
        if name not in self._up:
            if not self.keeps_all:
                await self.end()
            self._up[name] = self._stacks[name]
            await self._up[name].start()
        return self._up[name].endpoint

    async def end(self) -> None:
        """Returns when no process of any arm is left."""
        for stack in self._up.values():
            stack.terminate()
        for stack in self._up.values():
            await stack.end()
        self._up.clear()


def fit_together(arms: Sequence[Arm], model: str) -> bool:
    """Whether the processes of all arms may stay up at once: idle ones cost no time, and there is the memory.

    On GPUs they may not: the arms are to have the same devices, one arm at a time.
    """
    needs_gpu = any(arm.settings.get("device", "auto").startswith("cuda") for arm in arms)
    if needs_gpu or (Path("/dev/nvidia0").exists() and any("device" not in arm.settings for arm in arms)):
        return False
    weights = sum(file.stat().st_size for file in Path(model).glob("*.safetensors")) * 2  # as float32
    kv = {arm.name: parse_size(arm.settings.get("kv_cache_memory", "0")) or HOST_KV_BYTES for arm in arms}
    needed = sum(arm.devices * (PROCESS_BYTES + weights + kv[arm.name]) + PROCESS_BYTES for arm in arms)
    return needed < 0.7 * memory_available()


def num_gpus() -> int:
    """That this process may use."""
    try:
        return len(Driver.load().uuids())
    except CudaError:
        return 0


def memory_available() -> int:
    """Bytes that processes may take before the machine swaps."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def environment() -> dict[str, str]:
    """Ours without any BATON_ setting: what is not said on the command line is at its default, in every arm."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH", ""))))}


def before_it_runs(parent: int) -> Callable[[], None]:
    """Run in the child before it becomes its program."""
    ask = set_parent_death_signal(parent)

    def prepare() -> None:
        os.nice(BEHIND_CLIENT)
        ask()

    return prepare
