"""The flags of `baton plan`."""

# ruff: noqa: RUF009 - `flag` returns a field of a dataclass

from dataclasses import dataclass
from pathlib import Path

from compare.options import DEFAULT_EMULATED, TBT_SLO, TTFT_SLO, flag


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of the command line; each field is a flag."""

    trace: Path | None = flag("FILE", None, "Traffic from a file, of which only lengths and prefixes are used.")
    trace_format: str = flag("FORMAT", "auto", "azure, burstgpt, mooncake or own.")
    preset: str = flag("NAME", "", "Traffic without a file: chat, code, rag-long, agentic or mix. Default: chat.")
    scale_tokens: float = flag("FACTOR", 1.0, "Factor for all token counts.", min=0.001)
    burstiness: float = flag("SHAPE", 1.0, "1: Poisson arrivals; less is burstier.", min=0.01)
    gpus: int = flag("NUMBER", 8, "Number of GPUs, with one node each.", min=0, max=64)
    cost: str = flag("NAME", DEFAULT_EMULATED, "Cost file of the model and GPU: a name or a file (see baton profile).")
    ttft_slo_ms: float = flag("MS", 450.0, "Limit of the time to first token.", *TTFT_SLO, min=0.001)
    tbt_slo_ms: float = flag("MS", 40.0, "Limit of a request's p99 time between tokens.", *TBT_SLO, min=0.001)
    attainment: float = flag("SHARE", 0.9, "Share of the requests that must meet both limits.", min=0.01, max=0.999)
    price: float = flag("DOLLARS", 0.0, "Price of a GPU per hour, to show the cost of tokens.", min=0.0)
    policies: list[str] = flag("POLICY", ["stall_free", "prefill_first"], "Policies of co-located nodes; repeatable.")
    budgets: list[int] = flag(
        "TOKENS", [256, 512, 1024, 2048, 8192], "Values of max_num_batched_tokens; repeatable.", min=1, max=1 << 20
    )
    set: list[str] = flag("SETTING=VALUE", [], "A setting of all nodes, such as max_num_seqs=128; repeatable.")
    seeds: int = flag("NUMBER", 5, "Number of seeds for the best candidates.", min=2, max=20)
    requests: int = flag("NUMBER", 800, "Minimum requests in each run of the best candidates.", min=100, max=20_000)
    workers: int = flag("NUMBER", 0, "Number of processes that simulate. Default: one per CPU.", min=0, max=1024)
    validate: str = flag("PLACE", "", "Afterwards, measure the two best candidates: live or emulated.")
    model: str = flag("MODEL", "", "With --validate: the model, whose tokenizer is used. Default: the demo's.")
    out: Path | None = flag("DIRECTORY", None, "Directory of the plan. Default: baton-plan-TIME.")
