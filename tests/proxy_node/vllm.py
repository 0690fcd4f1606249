"""Start real vLLM servers with the demo model, for tests that run only if BATON_PEER_VLLM names an interpreter."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.cluster.harness import DEMO, DEMO_VOCABULARY, Cluster, cluster, copy_tokenizer, free_port, wait_for

VLLM = os.environ.get("BATON_PEER_VLLM", "")
MAX_MODEL_LEN = 2048
NIXL = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"})
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
}  # fmt: skip


class VllmServer:
    """One server, in a separate process group, but not in a separate session.

    Linux gives each session an equal share of the CPU. The priority of a thread counts only against threads of the
    same session (see "autogroup" in sched(7)).
    """

    def __init__(self, log: Path, *flags: str, port: int = 0, model: Path = DEMO) -> None:
        self.port = port or free_port()
        self.flags, self.model = flags, model
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [
            VLLM, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
            "--port", str(self.port), "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), *flags,
        ]  # fmt: skip
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command, env=os.environ | ENVIRONMENT | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
                stdout=file, stderr=file, process_group=0,
            )  # fmt: skip

    def answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        with suppress(OSError), urlopen(f"{self.url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def ready(self) -> None:
        wait_for(self.answers, f"vLLM at {self.url}", 600.0)
        if NIXL in self.flags:
            self._give_way()

    def _give_way(self) -> None:
        """Give the lowest priority to threads that compute all the time although the server has no request.

        NIXL's progress thread does this. With two cores, the threads of two servers would slow all other processes.
        """
        before, began_s = self._thread_seconds(), time.monotonic()
        time.sleep(5)
        elapsed_s = time.monotonic() - began_s
        for thread, seconds in self._thread_seconds().items():
            if seconds - before.get(thread, 0.0) > 0.8 * elapsed_s:
                os.setpriority(os.PRIO_PROCESS, thread, 19)

    def _thread_seconds(self) -> dict[int, float]:
        """Return the CPU time of each thread of the server and its children."""
        server = psutil.Process(self.process.pid)
        threads = [thread for each in (server, *server.children(recursive=True)) for thread in each.threads()]
        return {thread.id: thread.user_time + thread.system_time for thread in threads}

    def end(self) -> None:
        """Kill the server and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()

    def restarted(self) -> "VllmServer":
        """Start the server again, at the same address, and wait until it answers."""
        self.end()
        server = VllmServer(self.log, *self.flags, port=self.port, model=self.model)
        server.ready()
        return server


def names_of(roles: Sequence[str]) -> list[str]:
    return [f"{role}-{roles[:index].count(role)}" for index, role in enumerate(roles)]


@contextmanager
def served(
    roles: Sequence[str], *flags: str, model: Path = DEMO, **settings: Any
) -> Iterator[tuple[Cluster, dict[str, VllmServer]]]:
    """Start a router, and a server with a proxy node for each of `roles`. Yield the cluster, and the servers by name.
    `settings` are those of the cluster."""
    names = names_of(roles)
    with tempfile.TemporaryDirectory(prefix="baton-vllm-") as directory:
        servers = {name: VllmServer(Path(directory) / f"{name}.log", *flags, model=model) for name in names}
        try:
            for server in servers.values():
                server.ready()
            urls = {name: server.url for name, server in servers.items()}
            counts = roles.count("prefill"), roles.count("decode")
            with cluster(
                *counts, engines=urls, model=model, max_model_len=MAX_MODEL_LEN, log_level="info", **settings
            ) as running:
                yield running, servers
        finally:
            for server in servers.values():
                server.end()


def change_role(running: Cluster, name: str, role: str) -> None:
    def is_changed() -> bool:
        node = running.nodes()[name]
        return (node["role"], node["state"]) == (role, "ready")

    running.post(f"/v1/nodes/{name}/role", {"role": role})
    wait_for(is_changed, f"{name} is a {role} node")


def random_qwen3(directory: Path) -> Path:
    """Write a Qwen3 of random weights with the tokenizer of the demo model, and return its directory."""
    config = Qwen3Config(
        vocab_size=DEMO_VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    copy_tokenizer(directory)
    return directory


@contextmanager
def vllm_server(*flags: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="baton-vllm-") as directory:
        server = VllmServer(Path(directory) / "log", *flags)
        try:
            server.ready()
            yield server.url
        finally:
            server.end()
