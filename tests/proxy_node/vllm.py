"""Starts real vLLM servers with the demo model, for tests that run only where BATON_PEER_VLLM names an interpreter."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

from tests.cluster.harness import DEMO, free_port, wait_for

VLLM = os.environ.get("BATON_PEER_VLLM", "")
MAX_MODEL_LEN = 2048
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip


class VllmServer:
    """One server, in a process group of its own."""

    def __init__(self, log: Path, *flags: str, port: int = 0) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [
            VLLM, "-m", "vllm.entrypoints.openai.api_server", "--model", str(DEMO), "--host", "127.0.0.1",
            "--port", str(self.port), "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), *flags,
        ]  # fmt: skip
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command, env=os.environ | ENVIRONMENT, stdout=file, stderr=file, start_new_session=True
            )

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


@contextmanager
def vllm_server(*flags: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="baton-vllm-") as directory:
        server = VllmServer(Path(directory) / "log", *flags)
        try:
            server.ready()
            yield server.url
        finally:
            server.end()
