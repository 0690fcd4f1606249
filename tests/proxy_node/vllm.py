"""Starts real vLLM servers with the demo model, for tests that run only if BATON_PEER_VLLM names an interpreter."""

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

import psutil

from tests.cluster.harness import DEMO, Cluster, cluster, free_port, wait_for

VLLM = os.environ.get("BATON_PEER_VLLM", "")
MAX_MODEL_LEN = 2048
LENGTH, NUM_STREAMS = 1500, 3
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
}  # fmt: skip


class VllmServer:
    """One server, in a separate process group."""

    def __init__(self, log: Path, *flags: str, port: int = 0) -> None:
        self.port = port or free_port()
        self.flags = flags
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [
            VLLM, "-m", "vllm.entrypoints.openai.api_server", "--model", str(DEMO), "--host", "127.0.0.1",
            "--port", str(self.port), "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), *flags,
        ]  # fmt: skip
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command, env=os.environ | ENVIRONMENT | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
                stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip

    def answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        with suppress(OSError), urlopen(f"{self.url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def ready(self) -> None:
        wait_for(self.answers, f"vLLM at {self.url}", 600.0)

    def end(self) -> None:
        """Kill the server and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()

    def restarted(self) -> "VllmServer":
        """Start the server again, at the same address, and wait until it answers."""
        self.end()
        server = VllmServer(self.log, *self.flags, port=self.port)
        server.ready()
        return server


@contextmanager
def served(roles: Sequence[str], *flags: str) -> Iterator[tuple[Cluster, dict[str, VllmServer]]]:
    """A router and a proxy node for each of new servers, by name. `roles` are the nodes' roles."""
    names = [f"{role}-{roles[:index].count(role)}" for index, role in enumerate(roles)]
    with tempfile.TemporaryDirectory(prefix="baton-vllm-") as directory:
        servers = {name: VllmServer(Path(directory) / f"{name}.log", *flags) for name in names}
        try:
            for server in servers.values():
                server.ready()
            urls = {name: server.url for name, server in servers.items()}
            counts = roles.count("prefill"), roles.count("decode")
            with cluster(*counts, engines=urls, max_model_len=MAX_MODEL_LEN, log_level="info") as running:
                yield running, servers
        finally:
            for server in servers.values():
                server.end()


def kill_server(server: VllmServer) -> None:
    os.kill(server.process.pid, signal.SIGKILL)


def terminate_server(server: VllmServer) -> None:
    os.kill(server.process.pid, signal.SIGTERM)


def kill_engine_core(server: VllmServer) -> None:
    children = psutil.Process(server.process.pid).children(recursive=True)
    [core] = [each for each in children if "EngineCore" in "".join(each.cmdline())]
    core.kill()


ACTS = [kill_server, terminate_server, kill_engine_core]


def end_in_mid_stream(
    running: Cluster, name: str, server: VllmServer, act: Callable[[VllmServer], None]
) -> list[float]:
    """End the server of a node while answers are streamed. Each must be complete and the same as before. Return their
    longest gaps, in seconds."""
    prompts = [[40 + index, *range(200, 230)] for index in range(NUM_STREAMS)]
    whole = [running.complete(prompt, LENGTH) for prompt in prompts]
    has_begun = threading.Event()
    gaps = [0.0] * NUM_STREAMS

    def stream(index: int) -> list[int]:
        last = 0.0

        def seen(count: int) -> None:
            nonlocal last
            now = time.monotonic()
            gaps[index] = max(gaps[index], now - (last or now))
            last = now
            if count >= 20:
                has_begun.set()

        return running.stream(prompts[index], LENGTH, seen)

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(stream, index) for index in range(NUM_STREAMS)]
        assert has_begun.wait(120)
        computes = name if name.startswith("decode") else "decode-0"  # a prefill engine is idle by then
        wait_for(lambda: running.nodes()[computes]["running"], "the node generates")
        assert not all(each.done() for each in streams), "no stream is left"
        act(server)
        assert [each.result() for each in streams] == whole
    return gaps


@contextmanager
def vllm_server(*flags: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="baton-vllm-") as directory:
        server = VllmServer(Path(directory) / "log", *flags)
        try:
            server.ready()
            yield server.url
        finally:
            server.end()
