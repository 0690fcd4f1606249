"""The workers of one comparison by the names that tables show, each started when it is first asked for."""

import os
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.models import checkpoint
from benchmarks.peers.session import ROOT, PeerError, Worker

FP32, BITS16, INT8 = "Baton fp32", "Baton 16-bit weights", "Baton int8"
LLAMA_F32, LLAMA_BF16, LLAMA_F16, LLAMA_Q8 = (f"llama.cpp {kind}" for kind in ("F32", "BF16", "F16", "Q8_0"))
VLLM_FP32, TRANSFORMERS = "vLLM fp32", "transformers fp32"
OUR_KV_GIB, VLLM_KV_GIB = 0.5, 1  # our default; vLLM takes whole ones, and touches what it uses


@dataclass(frozen=True, slots=True)
class Options:
    """Interpreters of the peers, "" where one is not installed; `directory` holds the models.
    Weights in 16 bits, the KV's dtype and its GiB are of our arms."""

    shape: str
    threads: int
    directory: Path
    llama: str = ""
    vllm: str = ""
    weight_dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    kv_gib: float = OUR_KV_GIB


@dataclass(slots=True)
class Fleet:
    """`failed` says of each worker that could not be had why."""

    options: Options
    workers: dict[str, Worker] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def need(self, arm: str) -> Worker:
        """Raises PeerError when it cannot be had."""
        if arm not in self.workers:
            self.workers[arm] = self._start(arm)
            print(f"started {arm}: {self.workers[arm].facts}", flush=True)
        return self.workers[arm]

    def get(self, arm: str) -> Worker | None:
        """None when it cannot be had, this time or before."""
        if arm in self.failed:
            return None
        try:
            return self.need(arm)
        except PeerError as error:
            self.failed[arm] = str(error)
            print(f"without {arm}: {error}", flush=True)
            return None

    def close(self, keep: Collection[str] = ()) -> None:
        for arm in [arm for arm in self.workers if arm not in keep]:
            self.workers.pop(arm).close()

    def _start(self, arm: str) -> Worker:
        options = self.options
        model = checkpoint(options.shape, directory=options.directory)
        common: dict[str, Any] = {"model": str(model), "threads": options.threads}
        ours: dict[str, Any] = common | {"kv_gib": options.kv_gib, "kv_cache_dtype": options.kv_cache_dtype}
        if arm == FP32:
            return Worker(sys.executable, "baton", ours)
        if arm == BITS16:
            kv = options.kv_cache_dtype if options.kv_cache_dtype != "auto" else "float16"  # as llama.cpp's
            return Worker(sys.executable, "baton", ours | {"weight_dtype": options.weight_dtype, "kv_cache_dtype": kv})
        if arm == INT8:
            return Worker(sys.executable, "baton", ours | {"quantization": "int8"})
        if arm == TRANSFORMERS:
            return Worker(sys.executable, "transformers_generate", common)
        if arm == VLLM_FP32:
            return self._vllm(common)
        if not options.llama:
            raise PeerError("llama.cpp: give its interpreter by --llama or BATON_PEER_LLAMA")
        return Worker(options.llama, "llama_cpp_api", common | {"model": str(self._gguf(model, arm.split()[1]))})

    def _vllm(self, common: dict[str, Any]) -> Worker:
        if not self.options.vllm:
            raise PeerError("vLLM: give its interpreter by --vllm or BATON_PEER_VLLM")
        cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        env = {"VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GIB), "VLLM_CPU_OMP_THREADS_BIND": cpus}
        return Worker(self.options.vllm, "vllm_offline", common, env)

    def _gguf(self, model: Path, kind: str) -> Path:
        out = model.with_name(f"{model.name}-{kind}.gguf")
        if not out.exists():
            making = out.with_suffix(".partial")
            command = [self.options.llama, "-m", "benchmarks.peers.gguf_file", str(model), kind, str(making)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                raise PeerError(f"converting to {kind}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
            making.rename(out)
        return out
