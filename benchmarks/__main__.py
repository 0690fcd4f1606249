"""`python -m benchmarks NAME …`: one name per table. Each prints its table and writes benchmarks/results/NAME.json.

`python -m benchmarks NAME --help` says what it measures and what it takes.
"""

import importlib
import sys

ENTRIES = {
    "cpu": "everything on a CPU against llama.cpp, vLLM and transformers",
    "linear": "matrix products by weight format and number of rows",
    "attention": "paged attention and the small kernels on a CPU",
    "perplexity": "what int8 and 16-bit weights cost in quality",
    "step_overhead": "host time of a step: scheduling, building, sampling, telling",
    "transport": "shm and tcp channels: bytes a second and CPU",
    "handoff": "what a handoff adds to the first token",
    "router": "streamed tokens a second, latency and memory of the router",
    "overload": "goodput, refusals and recovery at one, two and ten times the peak",
    "scheduler": "microseconds per scheduled decode; hashing and placing",
    "stalls": "the worst gap of streams while a long prompt arrives",
    "slo_budget": "a time-between-tokens SLO against fixed budgets",
    "policies": "batching policies on a virtual clock; writes docs/policies.md",
    "records": "what recording every step costs",
    "gpu_first_run": "everything on a GPU: checks, kernels, a whole model, handoffs, a cluster",
    "models": "makes a checkpoint of random weights",
    "document": "writes the tables of docs/results/ from the results",
}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in ENTRIES:
        width = max(map(len, ENTRIES))
        print(__doc__, *(f"  {name:{width}}  {what}" for name, what in ENTRIES.items()), sep="\n")
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    name = sys.argv.pop(1)
    sys.argv[0] = f"python -m benchmarks {name}"
    importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()
