"""The classes of vLLM 0.32 and 0.33 that Baton's plugin uses, with the fields that the plugin reads
(v1/metrics/stats.py)."""

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

PLUGIN = Path(__file__).parents[2] / "deploy" / "vllm_steps" / "baton_vllm_steps.py"
CONFIG = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=32, max_num_batched_tokens=4096))


class StatLoggerBase:
    pass


@dataclass
class PrefixCacheStats:
    requests: int = 0
    queries: int = 0
    hits: int = 0


@dataclass
class SchedulerIterationDetails:
    iteration_index: int
    num_ctx_requests: int
    num_ctx_tokens: int
    num_generation_requests: int
    num_generation_tokens: int
    elapsed_ms: float
    is_dummy: bool = False


@dataclass
class SchedulerStats:
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    iteration_details: SchedulerIterationDetails | None = None
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    connector_prefix_cache_stats: PrefixCacheStats | None = None


def step_logger() -> Any:
    """Return the plugin's class, as vLLM loads it."""
    loggers = ModuleType("vllm.v1.metrics.loggers")
    loggers.StatLoggerBase = StatLoggerBase  # type: ignore[attr-defined]
    names = ["vllm", "vllm.v1", "vllm.v1.metrics", "vllm.v1.metrics.loggers"]
    sys.modules |= dict(zip(names, [*map(ModuleType, names[:-1]), loggers], strict=True))
    try:
        spec = importlib.util.spec_from_file_location("baton_vllm_steps", PLUGIN)
        assert spec is not None and spec.loader is not None  # noqa: PT018
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        for name in names:
            del sys.modules[name]
    return module.StepLogger


def stats(number: int, prompts: tuple[int, int], decodes: int, elapsed_ms: float, cached: int = 0) -> SchedulerStats:
    """Return what the scheduler reports after a step. `prompts` has the numbers of prompts and of prompt tokens."""
    details = SchedulerIterationDetails(number, *prompts, decodes, decodes, elapsed_ms)
    return SchedulerStats(max(1, decodes), 0, details, PrefixCacheStats(hits=cached))
