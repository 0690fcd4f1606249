"""Deployments of the arms: local clusters or running stacks.

A local cluster is a `baton up` process, started by a command that a user could also give. The comparison always ends
the local clusters that it started.
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
from compare.endpoint import Endpoint, EndpointError
from compare.load.client import LoadSpec, drive
from compare.load.outcome import LoadRecording
from engine.options import BuildOptions
from shared.config.settings import PREFIX, VLLM_VARIABLES, parse_size
from shared.errors import ConfigError
from shared.kv.layout import HOST_KV_BYTES
from shared.kv.memory import available_bytes
from shared.lifecycle import python_path, set_parent_death_signal

SERVING_AT = re.compile(r'serving at (http://[^\s"]+)')
START_S = 180.0
DRAIN_S = 3  # short, because no client waits for the answers of a stopped arm
GRACE_S = 12.0
BAD_SETTINGS = 2
PROCESS_BYTES = 400 << 20  # measured memory of a node's process without weights and KV
NICENESS = 5  # niceness of nodes, so that the load generator sends on time even if nodes use all cores


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How to start the nodes of an arm.

    `cpus` are the cores that the nodes share; if it is empty, they share all cores. `emulate` is the step-time model of
    emulated nodes. `engines` are the URLs of vLLM servers that take the place of nodes.
    """

    model: str
    cpus: tuple[int, ...] = ()
    emulate: str = ""
    gpus: int = 0
    engines: tuple[str, ...] = ()

    def command(self, arm: Arm) -> list[str]:
        flags = ["--model", self.model, "--port", "0", "--registry-port", "0", "--drain-timeout-s", str(DRAIN_S)]
        flags += ["--cpus", ",".join(map(str, self.cpus))] if self.cpus else []
        flags += ["--emulate", self.emulate] if self.emulate else []
        flags += ["--engines", ",".join(self.engines[: arm.devices])] if self.engines else []
        device = "cpu" if arm.settings.get("runner") == "hash" else arm.settings.get("device", "auto")
        if self.gpus and device in {"auto", "cuda"}:
            # With a shared pool, prefill nodes use the GPUs of decode nodes.
            shared_pool = arm.settings.get("kv_channel") == "pool"
            num_gpus = min(self.gpus, arm.decode if shared_pool else arm.devices)
            flags += ["--devices", ",".join(f"cuda:{number}" for number in range(num_gpus))]
        return [sys.executable, "-P", "-m", "baton", "up", *flags, *arm.flags()]


class LocalStack:
    """The stack of one arm: a cluster process with its log or, if the arm has a URL, a running stack.

    After `start`, `endpoint` is the client of the stack's router. All methods run on the caller's event loop. `end`
    ends the cluster process that `start` started, with its nodes. It does not end a stack that ran before.
    """

    def __init__(self, arm: Arm, launch: LaunchOptions, log: Path, api_key: str = "") -> None:
        self.arm = arm
        self.endpoint = Endpoint(arm.url or "http://127.0.0.1", api_key)
        self._launch = launch
        self._log = log
        self._process: Process | None = None

    async def start(self) -> None:
        """Start the process and wait until every node is alive. Raises ConfigError or EndpointError."""
        if self.arm.url:
            await self.endpoint.connect()
            return
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._launch.command(self.arm),
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                env=environment(),
                start_new_session=True,  # so that Ctrl-C at the terminal does not signal the process directly
                preexec_fn=_child_setup(os.getpid()),
            )
        deadline = time.monotonic() + START_S
        while not await self._is_complete():
            if self._process.returncode is not None:
                raise self._start_error(self._process.returncode)
            if time.monotonic() > deadline:
                raise EndpointError(f"{self.arm.name} does not serve after {START_S:g} s; see {self._log}")
            await asyncio.sleep(0.1)
        await self.endpoint.connect()

    async def _is_complete(self) -> bool:
        found = SERVING_AT.search(self._log.read_text(errors="replace"))
        if found is None:
            return False
        if self.endpoint.url != found[1]:
            await self.endpoint.close()
            self.endpoint = Endpoint(found[1])
        with contextlib.suppress(EndpointError):
            nodes = (await self.endpoint.status())["nodes"]
            return sum(bool(node["alive"]) for node in nodes) >= self.arm.devices
        return False

    def _start_error(self, status: int) -> Exception:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        line = next((line for line in reversed(lines) if "error" in line.lower() or ": " in line), "no output")
        kind = ConfigError if status == BAD_SETTINGS else EndpointError
        return kind(f"{self.arm.name} did not start (status {status}): {line}; see {self._log}")

    def terminate(self) -> None:
        """Send SIGTERM to the process, and do not wait for its exit; `end` waits."""
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
        if self._process.returncode is None:  # killing the process also ends its nodes
            self._process.kill()
            await self._process.wait()


class Deployments:
    """The stacks of all arms. Either all stacks stay up, or one stack is up at a time and is started for its trial."""

    def __init__(self, stacks: Sequence[LocalStack], *, keeps_all: bool) -> None:
        self._keeps_all = keeps_all
        self._stacks = {stack.arm.name: stack for stack in stacks}
        self._up: dict[str, LocalStack] = {}

    async def up(self, name: str) -> Endpoint:
        """Start the arm if needed, and return its endpoint. Raises ConfigError or EndpointError."""
        if name not in self._up:
            if not self._keeps_all:
                await self.end()
            self._up[name] = self._stacks[name]
            await self._up[name].start()
        return self._up[name].endpoint

    async def drive(self, spec: LoadSpec, recording: LoadRecording) -> None:
        """Send the requests of one trial to the stack that the last `up` returned, and record the outcomes."""
        await drive(spec, recording)

    async def end(self) -> None:
        """End all processes of all arms."""
        for stack in self._up.values():
            stack.terminate()
        for stack in self._up.values():
            await stack.end()
        self._up.clear()


def fit_together(arms: Sequence[Arm], model: str) -> bool:
    """Return True if all arms fit into memory at the same time. Arms on GPUs do not: they all use the same devices."""
    used = [(arm.settings.get("device", "auto"), arm.settings.get("runner", "torch")) for arm in arms]
    if any(BuildOptions(model, device=device, runner=runner).on_gpu for device, runner in used):
        return False
    # The bytes of the weights as float32, if the files store 16 bits per weight.
    weights = sum(file.stat().st_size for file in Path(model).glob("*.safetensors")) * 2
    kv = {arm.name: parse_size(arm.settings.get("kv_cache_memory", "0")) or HOST_KV_BYTES for arm in arms}
    needed = sum(arm.devices * (PROCESS_BYTES + weights + kv[arm.name]) + PROCESS_BYTES for arm in arms)
    return needed < 0.7 * available_bytes()


def num_gpus() -> int:
    """Return the number of GPUs that are visible to this process."""
    import torch  # takes seconds

    return torch.cuda.device_count()


def environment() -> dict[str, str]:
    """Return the environment without variables that set Baton's settings. Settings that no flag sets have defaults."""
    others = VLLM_VARIABLES.values()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX) and name not in others}
    return kept | {"PYTHONPATH": python_path(os.environ)}


def _child_setup(parent: int) -> Callable[[], None]:
    """Return the function that the child process calls before it executes the program."""
    die_with_parent = set_parent_death_signal(parent)

    def setup() -> None:
        os.nice(NICENESS)
        die_with_parent()

    return setup
