"""Run one benchmark, print its tables and write benchmarks/results/NAME.json: `python -m benchmarks NAME …`.

`python -m benchmarks NAME --help` describes the flags of a benchmark and what it measures.
"""

import sys
from collections.abc import Callable

BENCHMARKS = {
    "cpu": "Baton on a CPU, compared with llama.cpp, vLLM and transformers",
    "four_bit": "4-bit weights on a CPU, compared with bfloat16 weights",
    "speculation": "speculative decoding by prompt lookup, on text that repeats its prompt and on text that does not",
    "grammar": "the cost of grammars, in tokens per second of a batch",
    "layers": "recurrences and experts on a CPU",
    "handoff": "the time that a handoff adds to the time to first token",
    "footprint": "start-up time to the first token, and memory of the router and a node",
    "router": "streamed tokens per second, latency and memory of the router",
    "router_workers": "the CPU time per streamed token in routers with one worker and with two workers",
    "fleet": "the router's CPU time, loop turns and join time with up to 1,000 emulated nodes",
    "policies": "batching policies on a virtual clock; writes docs/policies.md",
    "recording": "live runs that tests replay in the simulator",
    "step_times": "the demo model's steps, measured in CPU time, for a test of the cost model",
    "simulator": "requests that the simulator serves in a CPU second",
    "agreement": "how often simulated and measured comparisons reach the same verdict",
    "live_simulation": "live runs of the demo model, and simulations of the same traffic",
    "validation": "the simulator, compared with published measurements",
    "gpu_first_run": "experimental: checks, kernels, a whole model and handoffs on a GPU",
    "document": "write the tables of docs/results/ from the results",
}


def load(name: str) -> Callable[[], None]:  # noqa: C901, PLR0912 - one case for each benchmark
    """Import only this benchmark, without the others and their libraries, and return its `main`."""
    match name:
        case "cpu":
            from benchmarks.cpu import main
        case "four_bit":
            from benchmarks.four_bit import main
        case "speculation":
            from benchmarks.speculation import main
        case "grammar":
            from benchmarks.grammar import main
        case "layers":
            from benchmarks.layers import main
        case "handoff":
            from benchmarks.handoff import main
        case "footprint":
            from benchmarks.handoff import footprint as main
        case "router":
            from benchmarks.router import main
        case "router_workers":
            from benchmarks.router_workers import main
        case "fleet":
            from benchmarks.fleet import main
        case "policies":
            from benchmarks.policies import main
        case "recording":
            from benchmarks.recording import main
        case "step_times":
            from benchmarks.step_times import main
        case "simulator":
            from benchmarks.simulator import main
        case "live_simulation":
            from benchmarks.live_simulation import main
        case "agreement":
            from benchmarks.agreement import main
        case "validation":
            from benchmarks.validation import main
        case "gpu_first_run":
            from benchmarks.gpu.first_run import main
        case _:
            from benchmarks.result import main
    return main


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHMARKS:
        print(__doc__, *(f"  {name:{15}}  {what}" for name, what in BENCHMARKS.items()), sep="\n")
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    name = sys.argv.pop(1)
    sys.argv[0] = f"python -m benchmarks {name}"
    load(name)()


if __name__ == "__main__":
    main()
