"""Runs `baton profile`: measures steps, fits the cost model, and writes the cost file."""

import asyncio
import json
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from compare.arms import ArmSettings, parse_settings
from compare.endpoint import Endpoint, EndpointError
from compare.options import check_finite
from compare.profiling.grid import StepGrid
from compare.profiling.options import ProfileOptions
from engine.emulation import VERSION, load_emulation
from engine.options import BuildOptions
from engine.step_time_fit import FIRST_FIT, fit_cost
from scheduler.budget import budget_of
from scheduler.cost import CostModel, StepWork
from shared.config.settings import resolve
from shared.errors import ConfigError
from shared.model_files import DEMO_MODEL
from shared.model_files import resolve as resolve_model

QUANTILES = np.linspace(0.0, 1.0, 201)
CLASSES, ENOUGH = 4, 20  # number of classes of steps with prompts, and the minimum number of steps in each
HOST_BYTES_PER_S = 5e9  # assumed speed of a link that was not measured
ASSUMED = "assumed: the profile ran no cluster; `baton profile --from URL` measures it"
Document = dict[str, Any]


def run_profile(options: ProfileOptions) -> int:
    """Measure steps, or read the records of a running cluster, and write the cost file. Return 0. Raises
    ConfigError."""
    check_finite(options)
    say = partial(print, flush=True)
    default = ProfileOptions()
    for name in ("model", "set", "cases", "seconds"):
        if options.from_url and getattr(options, name) != getattr(default, name):
            raise ConfigError(f"--{name} and --from: give only one of them")
    if options.out and options.out.is_dir():
        raise ConfigError(f"--out {options.out}: is a directory; give a file")
    try:
        found = asyncio.run(from_cluster(options)) if options.from_url else from_grid(options, say)
    except (ValueError, EndpointError) as error:
        raise ConfigError(str(error)) from None
    out = options.out or Path(f"{found['name']}.json")
    try:
        out.write_text(json.dumps({key: value for key, value in found.items() if key != "name"}, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from None
    load_emulation(str(out))  # check that other commands accept the file
    errors, fit = found["errors_percent"], found["cost"]
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in fit.items())
    say(f"{found['steps']} steps: mean error {errors['mean']:.1f} %, p95 {errors['p95']:.1f} %; {numbers}")
    say(f"written: {out}; use it with --cost {out} or --emulate {out}")
    return 0


def fitted(works: Sequence[StepWork], durations: Sequence[Sequence[float]]) -> Document:
    """Return the fields of a cost file that describe step times. `durations` has the seconds of the repetitions of
    each step. The model is fitted to the median of the repetitions, because other processes delay some of them."""
    seconds = [float(np.median(own)) for own in durations]
    model = fit_cost(works, seconds)
    predicted = [model.seconds(work) for work in works]
    ratios = [[each / expected for each in own] for own, expected in zip(durations, predicted, strict=True)]
    prompts = [number for number in np.argsort(predicted) if works[number].num_prefills]
    decodes = [number for number in range(len(works)) if not works[number].num_prefills]
    found: Document = {"residuals": _quantiles(ratios)}
    if min(len(prompts) // CLASSES, len(decodes)) >= ENOUGH:
        found["residuals"] = _quantiles([ratios[number] for number in decodes])
        found["prefill_residuals"] = [
            {"up_to_s": predicted[own[-1]], "quantiles": _quantiles([ratios[number] for number in own])}
            for own in np.array_split(prompts, CLASSES)
        ]
    errors = 100 * np.abs(np.array(predicted) / seconds - 1)
    return {
        "cost": {name: getattr(model, name) for name in CostModel.__dataclass_fields__},
        **found,
        "steps": sum(map(len, durations)),
        "errors_percent": {"mean": float(errors.mean()), "p95": float(np.percentile(errors, 95))},
    }


def _quantiles(ratios: Sequence[Sequence[float]]) -> list[float]:
    found: list[float] = np.quantile(np.concatenate(ratios), QUANTILES).round(4).tolist()
    return found


# ---- on this machine -----------------------------------------------------------------------------------------------


def from_grid(options: ProfileOptions, say: Any) -> Document:
    """Measure the grid on this machine. Raises ConfigError or ValueError."""
    settings: Any = resolve(ArmSettings, parse_settings("--set", ",".join(options.set)), {})[0]
    model = resolve_model(options.model) if options.model else DEMO_MODEL
    ceiling = budget_of(settings.max_num_batched_tokens, settings.tbt_slo_ms / 1000).ceiling
    build = BuildOptions.from_settings(settings, model=str(model), max_step_tokens=ceiling)
    kept = (options.out or Path(f"{model.name}.json")).with_suffix(".partial")
    if not (kept.parent.is_dir() and os.access(kept.parent, os.W_OK)):
        raise ConfigError(f"--out: cannot write {kept}: choose a directory that exists and is writable")
    grid = StepGrid(build, options.cases, options.seconds, kept)
    grid.run(say)
    layout = grid.components.layout
    found = {
        "name": model.name,
        "about": f"{model.name} on {grid.components.attributes.get('device', settings.device)}",
        "version": VERSION,
        **fitted([case.work for case in grid.measured], list(grid.measured.values())),
        "serving": dict.fromkeys(("step_s", "slice_s", "request_s", "rpc_s", "answer_s", "push_s"), 0.0),
        "kv_bytes_per_token": (layout.num_blocks - 1) * layout.block_bytes // grid.kv_tokens,
        "block_tokens": layout.block_tokens,
        "max_num_seqs": build.most_requests,
        "kv_tokens": grid.kv_tokens,
        "link": "local",
        "links": {"local": {"latency_s": 0.0, "bytes_per_s": HOST_BYTES_PER_S, "source": ASSUMED}},
        "sources": {"cost": f"{len(grid.measured)} cases on {time.strftime('%Y-%m-%d')}", "serving": ASSUMED},
    }
    kept.unlink(missing_ok=True)
    return found


# ---- from a running cluster ----------------------------------------------------------------------------------------


async def from_cluster(options: ProfileOptions) -> Document:
    """Fit the cost model to the records of a running cluster. Raises ConfigError or EndpointError."""
    endpoint = Endpoint(options.from_url, options.api_key)
    try:
        await endpoint.connect()
        if not endpoint.is_baton:
            reasons = "it is not a Baton router, it needs an admin's --api-key, or it has an --admin-port"
            raise ConfigError(f"--from {options.from_url}: cannot read its records: {reasons}")
        return await from_records(endpoint)
    finally:
        await endpoint.close()


async def from_records(endpoint: Endpoint) -> Document:
    """Return a cost file for the nodes of a connected cluster. Raises ConfigError if there are too few records."""
    nodes = (await endpoint.status())["nodes"]
    steps = [step for node in nodes for step in await endpoint.steps(node["id"], 0.0)]
    requests = [each for each in await endpoint.requests() if each["phases_ms"]]
    steps = [step for step in steps if step["duration_ms"] > 0 and not step["draft_tokens"]]
    if len(steps) < FIRST_FIT or not requests:
        found = f"has records of {len(steps)} steps and {len(requests)} requests"
        raise ConfigError(f"--from {endpoint.url}: {found}, which are too few; send it traffic first")
    node, names = nodes[0], ("num_prefills", "prefill_tokens", "prefill_pairs", "num_decodes", "decode_context")
    works = [StepWork(*(step[name] for name in names)) for step in steps]
    slices = [(1.0, work.num_prefills + work.num_decodes) for work in works]
    step_s, slice_s = (nnls(np.array(slices), np.array([step["host_ms"] for step in steps]))[0] / 1000).tolist()
    transfer = [each["transfer"] for each in requests if each["transfer"]]
    router_s = float(np.median([each["phases_ms"]["router"] for each in requests])) / 1000
    link, source, push_s = {"latency_s": 0.0, "bytes_per_s": HOST_BYTES_PER_S}, ASSUMED, 0.0
    if transfer:
        rows = np.array([(1.0, each["bytes"]) for each in transfer])
        scale = rows.max(axis=0)
        latency_ms, byte_ms = nnls(rows / scale, np.array([each["busy_ms"] for each in transfer]))[0] / scale
        link = {"latency_s": latency_ms / 1000, "bytes_per_s": min(1e12, 1000 / max(byte_ms, 1e-12))}
        source = f"{len(transfer)} requests; the latency is the sum over all pushes of a request"
        # After the rest of the last push, the commit of a handoff also waits for checksums and for one message.
        waits_ms = [each["exposed_ms"] - each["busy_ms"] + each["hidden_ms"] for each in transfer]
        push_s = max(0.0, float(np.median(waits_ms)) / 1000 - router_s / 4)
    size = node["block_tokens"]
    kv_tokens = (node["num_blocks"] - 1) * size
    return {
        "name": endpoint.model.rpartition("/")[2],
        "about": f"{endpoint.model}, from the records of {endpoint.url}",
        "version": VERSION,
        **fitted(works, [[step["duration_ms"] / 1000] for step in steps]),
        # The router records only the sum of two times: the time before a request is queued on its node, and the time
        # after its last step.
        "serving": {
            "step_s": step_s,
            "slice_s": slice_s,
            "request_s": router_s / 4,
            "rpc_s": router_s / 4,
            "answer_s": router_s / 2,
            "push_s": push_s,
        },
        "kv_bytes_per_token": node["blocks"]["total"] * node["block_bytes"] // kv_tokens,
        "block_tokens": size,
        "max_num_seqs": int(node["facts"]["max_num_seqs"]),
        "kv_tokens": kv_tokens,
        "link": "local",
        "links": {"local": link | {"source": source}},
        "sources": {
            "cost": f"{len(steps)} steps of {len(nodes)} nodes on {time.strftime('%Y-%m-%d')}",
            "serving": f"medians of {len(requests)} requests, seen from the router",
        },
    }
