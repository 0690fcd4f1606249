"""Run the workers of one comparison alternately, with the CPU given to one worker at a time.

Every worker is a process group of its own, stopped (SIGSTOP) except while it answers a call.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.models import checkpoint
from shared.lifecycle import set_parent_death_signal

ROOT = Path(__file__).resolve().parents[2]
FP32, BITS16, INT8 = "Baton fp32", "Baton 16-bit weights", "Baton int8"
LLAMA_F32, LLAMA_BF16, LLAMA_F16, LLAMA_Q8 = (f"llama.cpp {kind}" for kind in ("F32", "BF16", "F16", "Q8_0"))
VLLM_FP32, TRANSFORMERS = "vLLM fp32", "transformers fp32"
OUR_KV_GIB, VLLM_KV_GIB = 0.5, 1  # our default; vLLM takes whole GiB, and touches only what it uses


class WorkerError(Exception):
    """A worker did not start, or a call failed in it; the message is one line."""


class PeerWorker:
    """A process that runs `module` of benchmarks.peers with `python`. Raises WorkerError if its model does not load."""

    def __init__(
        self, python: str, module: str, options: Mapping[str, Any], env: Mapping[str, str] | None = None
    ) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        try:
            self._process = subprocess.Popen(
                [python, "-m", f"benchmarks.peers.{module}", json.dumps(dict(options))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": str(options["threads"])} | dict(env or {}),
                text=True,
                start_new_session=True,
                preexec_fn=set_parent_death_signal(os.getpid()),  # noqa: PLW1509 - this process has no other thread yet
            )
        except OSError as error:
            self._log.close()
            raise WorkerError(f"{module}: {error}") from None
        self._module = module
        try:
            self.facts: dict[str, Any] = self._answer()
        except WorkerError:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def call(self, name: str, **arguments: Any) -> Any:
        """Call a method of the worker; the other workers are stopped meanwhile. Raises WorkerError if it fails."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"call": name, "with": arguments}) + "\n")
            self._process.stdin.flush()
            return self._answer()
        except BrokenPipeError:
            raise WorkerError(f"{self._module} ended: {self._last_words()}") from None
        finally:
            self._signal(signal.SIGSTOP)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def peak_bytes(self) -> int:
        """Peak resident memory of its processes (VmHWM), each at its own time."""
        return sum(_status(process, "VmHWM") * 1024 for process in _group(self._process.pid))

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._log.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"{self._module} ended: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self._module}: {answer['error']}")
        return answer["value"]

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "no output"

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _group(leader: int) -> list[Path]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(int(process.name)) == leader:
                found.append(process)
    return found


def _status(process: Path, key: str) -> int:
    with contextlib.suppress(OSError):
        for line in (process / "status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1])
    return 0


@dataclass(frozen=True, slots=True)
class CpuOptions:
    """How to run the CPU benchmark. `llama` and `vllm` are the peers' interpreters, "" where not installed; `directory`
    holds the models. `weight_dtype` (of the 16-bit rows), `kv_cache_dtype` and `kv_gib` apply to our arms."""

    shape: str
    threads: int
    directory: Path
    llama: str = ""
    vllm: str = ""
    weight_dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    kv_gib: float = OUR_KV_GIB


@dataclass(slots=True)
class WorkerPool:
    """The workers of one comparison by the arm names that tables show, each started when first needed.

    `failed` has the reason for each worker that did not start.
    """

    options: CpuOptions
    workers: dict[str, PeerWorker] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def need(self, arm: str) -> PeerWorker:
        """Return the arm's worker. Raises WorkerError if it does not start."""
        if arm not in self.workers:
            self.workers[arm] = self._start(arm)
            print(f"started {arm}: {self.workers[arm].facts}", flush=True)
        return self.workers[arm]

    def get(self, arm: str) -> PeerWorker | None:
        """Return the arm's worker, or None if it does not start or did not before."""
        if arm in self.failed:
            return None
        try:
            return self.need(arm)
        except WorkerError as error:
            self.failed[arm] = str(error)
            print(f"without {arm}: {error}", flush=True)
            return None

    def close(self, keep: Collection[str] = ()) -> None:
        for arm in [arm for arm in self.workers if arm not in keep]:
            self.workers.pop(arm).close()

    def _start(self, arm: str) -> PeerWorker:
        options = self.options
        model = checkpoint(options.shape, directory=options.directory)
        common: dict[str, Any] = {"model": str(model), "threads": options.threads}
        ours: dict[str, Any] = common | {"kv_gib": options.kv_gib, "kv_cache_dtype": options.kv_cache_dtype}
        if arm == FP32:
            return PeerWorker(sys.executable, "baton", ours)
        if arm == BITS16:
            kv = options.kv_cache_dtype if options.kv_cache_dtype != "auto" else "float16"  # as llama.cpp's
            return PeerWorker(
                sys.executable, "baton", ours | {"weight_dtype": options.weight_dtype, "kv_cache_dtype": kv}
            )
        if arm == INT8:
            return PeerWorker(sys.executable, "baton", ours | {"quantization": "int8"})
        if arm == TRANSFORMERS:
            return PeerWorker(sys.executable, "transformers_generate", common)
        if arm == VLLM_FP32:
            return self._vllm(common)
        if not options.llama:
            raise WorkerError("llama.cpp: give its interpreter by --llama or BATON_PEER_LLAMA")
        return PeerWorker(options.llama, "llama_cpp_api", common | {"model": str(self._gguf(model, arm.split()[1]))})

    def _vllm(self, common: dict[str, Any]) -> PeerWorker:
        if not self.options.vllm:
            raise WorkerError("vLLM: give its interpreter by --vllm or BATON_PEER_VLLM")
        cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        env = {"VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GIB), "VLLM_CPU_OMP_THREADS_BIND": cpus}
        return PeerWorker(self.options.vllm, "vllm_offline", common, env)

    def _gguf(self, model: Path, kind: str) -> Path:
        out = model.with_name(f"{model.name}-{kind}.gguf")
        if not out.exists():
            making = out.with_suffix(".partial")
            command = [self.options.llama, "-m", "benchmarks.peers.gguf_file", str(model), kind, str(making)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                raise WorkerError(f"converting to {kind}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
            making.rename(out)
        return out
