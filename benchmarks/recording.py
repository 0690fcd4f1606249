"""Record live runs of one co-located node in tests/data/recordings, for tests that replay them in the simulator.

A recording has the settings of the node's scheduler, the requests and the steps. Requests are in the order in which the
scheduler received them, and numbers identify the blocks of their prompts. A step has the number of requests added since
the previous step, its durations, the numbers of free, cached and owned blocks, and its members (request, start, count).
"""

import asyncio
import gzip
import itertools
import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from compare.arms import ArmSettings, parse_arm
from compare.load.client import LoadSpec, drive
from compare.load.outcome import LoadRecording
from compare.load.traffic import Arrival, TrafficSource
from compare.main import vocabulary_of
from compare.options import CompareOptions
from compare.run.deployments import LaunchOptions, LocalStack
from scheduler.prefix import block_hashes
from shared.config.settings import resolve
from shared.model_files import DEMO_MODEL

DIRECTORY = Path(__file__).resolve().parents[1] / "tests" / "data" / "recordings"
SETTINGS = (
    *("policy", "max_num_batched_tokens", "max_num_seqs", "long_prefill_token_threshold"),
    "max_num_partial_prefills",
)
STEP = ("num_added", "device_us", "host_us", "free", "cached", "owned", "members")  # the columns of steps
RUNS = {
    "stall_free": ("colocated:1", CompareOptions(preset="agentic", scale_tokens=0.05, rate=5.0, duration=30.0)),
    "scarce_blocks": (
        "colocated:1@prefill_first,num_blocks=140,max_num_seqs=24",
        CompareOptions(preset="chat", scale_tokens=0.4, rate=9.0, duration=15.0),
    ),
}
Document = dict[str, Any]


async def record(name: str) -> Document:
    """Run a cluster with this run's traffic, and return the recording."""
    arm, options = parse_arm(RUNS[name][0]), RUNS[name][1]
    vocabulary, limit = vocabulary_of(DEMO_MODEL, Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")))
    arrivals = TrafficSource(options, vocabulary, [], limit).draw(1).arrivals
    stack = LocalStack(arm, LaunchOptions(str(DEMO_MODEL), cpus=(1,)), Path(f"/tmp/recording-{name}.log"))
    recording = LoadRecording()
    try:
        await stack.start()
        await drive(LoadSpec(stack.endpoint.url, stack.endpoint.model, arrivals), recording)
        await stack.endpoint.until_idle(30.0)
        (node,) = (await stack.endpoint.status())["nodes"]
        steps = await stack.endpoint.steps(node["id"], 0.0)
        async with httpx.AsyncClient(base_url=stack.endpoint.url) as client:
            urls = [f"/v1/steps/{node['id']}/{step['number']}" for step in steps]
            members = [(await client.get(url)).json()["members"] for url in urls]
    finally:
        await stack.end()
    settings: Any = resolve(ArmSettings, arm.settings, {})[0]
    scheduler = {each: getattr(settings, each) for each in SETTINGS} | {"block_tokens": node["block_tokens"]}
    return {"settings": scheduler} | document(
        {one.id: arrivals[one.index] for one in recording.outcomes}, steps, members, node["block_tokens"]
    )


def document(
    arrivals: dict[str, Arrival], steps: Sequence[Document], members: Sequence[Sequence[Document]], size: int
) -> Document:
    """Return the requests and the steps of a recording. `arrivals` has the requests by id, and `members` has the
    slices of each step."""
    order = list(dict.fromkeys(each["id"] for own in members for each in own))
    number = {request_id: place for place, request_id in enumerate(order)}
    last = {each["id"]: place for place, own in enumerate(members) for each in own}
    names: dict[bytes, int] = {}
    requests = []
    for request_id in order:
        hashes = block_hashes(arrivals[request_id].prompt, size, b"")
        blocks = [names.setdefault(each, len(names)) for each in hashes]
        requests.append((len(arrivals[request_id].prompt), arrivals[request_id].max_tokens, blocks))
    rows, num_added = [], 0
    ended = list(itertools.accumulate(list(last.values()).count(place) for place in range(len(steps))))
    for step, own, num_ended in zip(steps, members, ended, strict=True):
        known = step["running"] + step["waiting"] + num_ended
        slices = [(number[each["id"]], each["start"], each["count"]) for each in own]
        times = [round(1000 * step[name]) for name in ("duration_ms", "host_ms")]
        rows.append([known - num_added, *times, step["free"], step["cached"], step["owned"], slices])
        num_added = known
    return {"requests": requests, "columns": STEP, "steps": rows}


def names_of(arguments: Sequence[str] | None = None) -> list[str]:
    """Return the names of the runs to record: those in the arguments, or all if there are no arguments."""
    options = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", choices=[*RUNS, []])  # argparse also checks an empty list
    return options.parse_args(arguments).names or list(RUNS)


def main() -> None:
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for name in names_of():
        found = asyncio.run(record(name))
        path = DIRECTORY / f"{name}.json.gz"
        path.write_bytes(gzip.compress(json.dumps(found, separators=(",", ":")).encode(), mtime=0))
        print(f"{path}: {len(found['steps'])} steps, {len(found['requests'])} requests, {path.stat().st_size} bytes")
