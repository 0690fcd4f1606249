"""Run all text-generating classes of transformers with Baton's KV pool, and write the list for docs/models.md.

For each class, a separate process runs a tiny random model. The class passes if a node's check accepts the model, and
if its answers, computed in chunks and together with others, equal those of transformers. Otherwise, the node must
refuse the model with a reason. The exit status is 1 if an answer is wrong, or if a process fails in another way.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import transformers

from cluster.models import SWEPT
from tests.cluster.harness import FORK_SERVER
from tests.sweep.sweep import WRONG, classes, isolated

PRELOAD = ["tests.sweep.sweep", "engine.foreign.load", "transformers.models.llama.modeling_llama"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("names", nargs="*", help="classes to run; default: all, and the list is written")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes at a time")
    options = parser.parse_args()
    FORK_SERVER.set_forkserver_preload(PRELOAD)  # so that each process starts quickly
    names = options.names or classes()
    found: dict[str, str] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for name, reason in zip(names, pool.map(isolated, names), strict=True):
            found[name] = reason
            print(f"{name}: {reason or 'passes'}", flush=True)
    wrong = [name for name, reason in found.items() if reason.startswith(WRONG)]
    if not options.names and not wrong:
        SWEPT.write_text(json.dumps({"transformers": transformers.__version__, "classes": found}, indent=1) + "\n")
    passed = sum(not reason for reason in found.values())
    print(
        f"{len(found)} classes: {passed} pass, {len(found) - passed - len(wrong)} are refused, {len(wrong)} are wrong"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
