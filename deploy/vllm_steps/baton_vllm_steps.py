"""A plugin for vLLM that sends the contents and the duration of each step to the Unix socket named by BATON_STEPS.

vLLM loads it by the entry point `vllm.stat_logger_plugins`. The server needs `--enable-logging-iteration-details`.
"""

import json
import os
import socket
import time
from contextlib import suppress
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class StepLogger(StatLoggerBase):  # type: ignore[misc]
    """Sends one datagram for each step. It never waits: a datagram is lost if the socket is full or has no reader."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._path = os.environ.get("BATON_STEPS", "")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        limits = vllm_config.scheduler_config
        self._limits = {"max_num_seqs": limits.max_num_seqs, "max_step_tokens": limits.max_num_batched_tokens}

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        details = getattr(scheduler_stats, "iteration_details", None)
        if not self._path or details is None or details.is_dummy:
            return
        found = (scheduler_stats.prefix_cache_stats, getattr(scheduler_stats, "connector_prefix_cache_stats", None))
        step = self._limits | {
            "number": details.iteration_index,
            "end_ns": time.time_ns(),
            "elapsed_us": round(1000 * details.elapsed_ms),
            "num_prefills": details.num_ctx_requests,  # only older proxies read it
            "prefill_tokens": details.num_ctx_tokens,
            "num_decodes": details.num_generation_requests,
            "decode_tokens": details.num_generation_tokens,
            "running": scheduler_stats.num_running_reqs,
            "waiting": scheduler_stats.num_waiting_reqs,
            "cached_tokens": sum(stats.hits for stats in found if stats is not None),
        }
        with suppress(OSError):
            self.socket.sendto(json.dumps(step).encode(), self._path)

    def log_engine_initialized(self) -> None:
        pass
