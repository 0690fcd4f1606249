"""Run one benchmark, print its tables and write benchmarks/results/NAME.json: `python -m benchmarks NAME …`.

`python -m benchmarks NAME --help` describes the flags of a benchmark and what it measures.
"""

import sys
from collections.abc import Callable
from importlib import import_module

BENCHMARKS = {
    "cpu": "Baton on a CPU, compared with llama.cpp, vLLM and transformers",
    "four_bit": "4-bit codes on a CPU, compared with bfloat16 weights",
    "speculation": "speculative decoding by prompt lookup, on text that repeats its prompt and on text that does not",
    "grammar": "the cost of grammars, in tokens per second of a batch",
    "layers": "recurrences and experts on a CPU",
    "handoff": "the time that a handoff adds to the time to first token",
    "footprint": "start-up time to the first token, and memory of the router and a node",
    "router": "streamed tokens per second, latency and memory of the router",
    "fleet": "the router's CPU time, loop turns and join time with up to 1,000 emulated nodes",
    "policies": "batching policies on a virtual clock; writes docs/policies.md",
    "recording": "live runs that tests replay in the simulator",
    "step_times": "the demo model's steps, measured in CPU time, for a test of the cost model",
    "simulator": "requests that the simulator serves in a CPU second",
    "agreement": "verdicts of simulated and of measured comparisons",
    "validation": "the simulator, compared with published measurements",
    "gpu_first_run": "experimental: checks, kernels, a whole model and handoffs on a GPU",
    "document": "write the tables of docs/results/ from the results",
}


PLACES = {  # the module and the function of each benchmark that is not `main` of the module with its name
    "footprint": ("benchmarks.handoff", "footprint"),
    "gpu_first_run": ("benchmarks.gpu.first_run", "main"),
    "document": ("benchmarks.result", "main"),
}


def load(name: str) -> Callable[[], None]:
    """Import only this benchmark, without the others and their libraries, and return its function."""
    module, function = PLACES.get(name, (f"benchmarks.{name}", "main"))
    found: Callable[[], None] = getattr(import_module(module), function)
    return found


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHMARKS:
        print(__doc__, *(f"  {name:{14}}  {what}" for name, what in BENCHMARKS.items()), sep="\n")
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    name = sys.argv.pop(1)
    sys.argv[0] = f"python -m benchmarks {name}"
    load(name)()


if __name__ == "__main__":
    main()
