"""Runs `baton plan`: checks the options, searches, prints the recommendation, and writes the plan."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from compare.endpoint import EndpointError
from compare.planning.candidates import Simulations, candidates, prepare
from compare.planning.options import PlanOptions
from compare.planning.page import page_of
from compare.planning.report import Document, document, show, slo_of
from compare.planning.search import Measured, PlanSearch, SearchResult
from compare.planning.validation import validate
from scheduler.policy import POLICIES
from shared.errors import ConfigError

ESTIMATE_SHARE = 0.5  # the search begins at this share of the estimated capacity, and then raises the rate


def run_plan(options: PlanOptions) -> int:
    """Search for the best cluster, then print and write the plan. Return 0, or 1 if the best candidates could not be
    measured. Raises ConfigError for invalid options."""
    began = time.monotonic()
    if unknown := sorted(set(options.policies) - set(POLICIES)):
        raise ConfigError(f"--policies {unknown[0]}: must be {', '.join(POLICIES)}")
    simulations, say = prepare(options), partial(print, flush=True)
    arms = candidates(options)
    for arm in arms:
        simulations.plan(arm)  # raises ConfigError for a wrong setting
    out = options.out or Path(time.strftime("baton-plan-%Y%m%d-%H%M%S"))
    try:
        (out / "kubernetes").mkdir(parents=True, exist_ok=True)  # before the search, which takes minutes
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from None
    slo = slo_of(options)
    with PlanSearch(options, slo, simulations.request_s(slo)[2], say) as search:
        result = asyncio.run(_search(search, arms, simulations))
    plan = document(options, simulations, result)
    show(plan)
    say(f"  simulated in {time.monotonic() - began:.0f} s")
    _write(out, plan, say)
    return add_validation(plan, options, simulations, result.found[:2], out, say) if options.validate else 0


def add_validation(
    plan: Document, options: PlanOptions, simulations: Simulations, best: Sequence[Measured], out: Path, say: Any
) -> int:
    """Measure the best candidates, add the results to the plan, and write the plan. Return 0, or 1 if a measurement
    failed."""
    (out / "validation" / "logs").mkdir(parents=True, exist_ok=True)
    (out / "validation" / "requests.jsonl").write_text("")  # discard the requests of an earlier validation
    try:
        plan["validation"] = asyncio.run(validate(options, simulations, best, out / "validation", say))
    except EndpointError as error:
        print(f"baton plan: --validate {options.validate}: {error}", file=sys.stderr)
        return 1
    _write(out, plan, say)
    return int(len(plan["validation"]) < len(best))


async def _search(search: PlanSearch, arms: Sequence[str], simulations: Simulations) -> SearchResult:
    estimate = max(simulations.first_rate(arm, search.slo) for arm in arms)
    found = await search.best(arms, ESTIMATE_SHARE * estimate)
    best = {one.is_split: one for one in reversed(found)}  # the best finalist of each mode
    pair = {one.arm: one.capacity.rate for one in found if best[one.is_split] is one}
    varied = await asyncio.gather(*(search.varied(arm, rate) for arm, rate in pair.items()))
    causes = await asyncio.gather(*(search.causes(one.arm, found[0].capacity.rate) for one in found))
    lengths = await search.by_lengths(pair, simulations)
    by_arm = {one.arm: each for one, each in zip(found, causes, strict=True)}
    return SearchResult(search.scores, search.points, found, by_arm, dict(zip(pair, varied, strict=True)), lengths)


def _write(out: Path, plan: Document, say: Any) -> None:
    try:
        (out / "plan.json").write_text(json.dumps(plan, indent=1) + "\n")
        (out / "plan.html").write_text(page_of(plan))
        (out / "compose.override.yml").write_text(plan["compose"])
        (out / "kubernetes" / "kustomization.yaml").write_text(plan["kustomize"])
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from None
    say(f"  plan:       {out}/plan.html, plan.json, compose.override.yml, kubernetes/")
