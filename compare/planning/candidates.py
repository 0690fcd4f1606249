"""The candidates of a plan, and the result of one simulated run of a candidate."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf, nan
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from compare.arms import Arm, parse_arm, parse_settings
from compare.load.outcome import LatencySlo, Outcome
from compare.load.traces import TraceRow, read_trace
from compare.load.traffic import PRESET_NAMES, PromptVocabulary, TrafficSource, scaled
from compare.main import context_limit, vocab_size
from compare.options import CompareOptions, check_finite
from compare.planning.options import PlanOptions
from compare.playground.interactive import interpolated
from compare.run.simulated import UNLIMITED, cluster_plan, outcome_of, outcomes_of
from compare.stats.measures import miss_causes, misses, ttft_s
from dashboard.history import RequestHistory
from engine.emulation import Emulation, load_emulation
from scheduler.cost import StepWork
from scheduler.policy import POLICIES
from scheduler.prefix import DIGEST_BYTES, block_hashes
from shared.errors import ConfigError
from simulator.cluster import ClusterPlan, SimulatedCluster
from simulator.recorded import RecordedCluster
from simulator.routed import SimulatedRequest

REFERENCE_RATE = 1.0  # requests/s at which traffic is drawn; for other rates, the arrival times are scaled
MOST_REQUESTS = 20_000  # number of requests that are drawn for each seed; no run has more
LEAST_S = 1e-9  # minimum estimate of the GPU time of a prompt or an answer; it prevents a division by zero
DEFAULT_TRAFFIC = "chat"
PLACES = ("live", "emulated")  # values of --validate
# Settings in which candidates differ.
VARIED = {"policy": "--policies", "max_num_batched_tokens": "--budgets", "tbt_slo_ms": "--tbt-slo-ms"}
Latencies = NDArray[np.float64]
Lengths = tuple[float, float]  # factors for the lengths of prompts and for the lengths of answers
SAME: Lengths = (1.0, 1.0)


def candidates(options: PlanOptions) -> list[str]:
    """Return the arms to try: co-located nodes with each policy and budget, and every split into prefill and decode
    nodes, with each budget for the prefill nodes. Policies that cut prompts also get a budget derived from the SLO."""
    gpus, budgets = options.gpus, list(dict.fromkeys(options.budgets))
    found = [
        f"colocated:{gpus}@{'' if policy == 'stall_free' else policy + ','}{setting}"
        for policy in dict.fromkeys(options.policies)
        for setting in (
            *(f"max_num_batched_tokens={budget}" for budget in budgets),
            *([f"tbt_slo_ms={options.tbt_slo_ms:g}"] if POLICIES[policy].chunked else ()),
        )
    ]
    splits = [f"disaggregated:{prefill}p{gpus - prefill}d" for prefill in range(1, gpus)]
    return found + [f"{split}@max_num_batched_tokens={budget}" for split in splits for budget in budgets]


@dataclass(frozen=True, slots=True)
class Run:
    """The latencies of the second half of a run's requests, in milliseconds. A failed request has infinite latencies.

    A run is long enough that the load is steady in its second half. If the cluster is overloaded, the run is also long
    enough that requests miss the SLO.
    """

    ttft_ms: Latencies
    tbt_ms: Latencies  # for each request, the 99th percentile of the times between its tokens
    own: Latencies | float = nan  # for each request, 1 if it met its own SLO and 0 if not; NaN if it has none

    def attainment(self, slo: LatencySlo) -> float:
        """Return the share of requests that met their own SLO or, if they have none, `slo`."""
        is_met = (self.ttft_ms <= slo.ttft_ms) & (self.tbt_ms <= slo.tbt_ms)
        return float(np.where(np.isnan(self.own), is_met, self.own).mean())


class Simulations:
    """Simulates candidates with the plan's traffic. Each process has one instance, which caches the traffic by seed."""

    def __init__(self, source: TrafficSource, device: Emulation, settings: Sequence[str]) -> None:
        self._source, self.device = source, device
        self._common = parse_settings("--set", ",".join(settings))
        self.rows = lru_cache(maxsize=8)(self._draw)
        self._hashes = lru_cache(maxsize=8)(lambda *_: list[list[bytes]]())  # block hashes of the rows used so far

    def arm(self, name: str) -> Arm:
        return parse_arm(name, self._common)

    def plan(self, name: str) -> ClusterPlan:
        return cluster_plan(self.arm(name), self.device)

    def run(self, arm: str, rate: float, seed: int, count: int, lengths: Lengths = SAME) -> Run:
        """Simulate the first `count` requests of the traffic with this seed, at `rate` requests/s."""
        cluster, requests = self._served(arm, rate, seed, count, lengths)
        ends, answer_s, half = cluster.ends(), cluster.times.answer_s, len(requests) // 2
        judged = [
            _judged(outcome_of(0, request, request.token_s(answer_s, ends), slo))
            for request, slo in zip(requests[half:], self.slos(seed, count)[half:], strict=True)
        ]
        ttft_s, tbt_s, own = np.array(judged).T
        return Run(ttft_s * 1000, tbt_s * 1000, own)

    def outcomes(self, arm: str, rate: float, seed: int, count: int, timeout_s: float) -> list[Outcome]:
        """Simulate as `run` does, with a timeout. Return the outcomes of all requests."""
        cluster, requests = self._served(arm, rate, seed, count, SAME, timeout_s)
        return outcomes_of(cluster, requests, self.slos(seed, count))

    def _served(
        self, arm: str, rate: float, seed: int, count: int, lengths: Lengths, timeout_s: float = inf
    ) -> tuple[SimulatedCluster, list[SimulatedRequest]]:
        plan = self.plan(arm)
        cluster, requests = SimulatedCluster(plan, seed=seed), self.requests(plan, rate, seed, count, lengths)
        cluster.run(requests, timeout_s)
        return cluster, requests

    def slos(self, seed: int, count: int) -> list[LatencySlo | None]:
        """Return the SLO of each of the first `count` rows of the traffic, or None if a row has no SLO of its own."""
        return [row.slo for row in self.rows(seed)[:count]]

    def requests(
        self, plan: ClusterPlan, rate: float, seed: int, count: int, lengths: Lengths = SAME
    ) -> list[SimulatedRequest]:
        """Return the first `count` requests of the traffic with this seed, at `rate` requests/s. If the plan's nodes do
        not cache prefixes, no two requests share a block."""
        shares = plan.computing.enable_prefix_caching
        rows = [scaled(row, *lengths) for row in self.rows(seed)[:count]]
        hashes = self._hashes(seed, plan.block_tokens, lengths, shares)
        for index in range(len(hashes), len(rows)):
            hashes.append(list(block_names(rows[index], index, plan.block_tokens, shares=shares)))
        return [
            SimulatedRequest(f"r{index}", row.at_s * REFERENCE_RATE / rate, row.prompt_len, row.max_tokens, names)
            for index, (row, names) in enumerate(zip(rows, hashes, strict=False))
        ]

    @cached_property
    def kv_tokens(self) -> int:
        """The length of the longest request that a node can hold."""
        return self.plan("colocated:1").kv_tokens

    @cached_property
    def mean_lengths(self) -> tuple[float, float]:
        """The mean numbers of tokens of a prompt and of an answer."""
        rows = self.rows(0)
        return fmean(row.prompt_len for row in rows), fmean(row.max_tokens for row in rows)

    def longest(self, lengths: Lengths = SAME) -> float:
        """Return the number of tokens of the longest request."""
        return max(row.prompt_len * lengths[0] + row.max_tokens * lengths[1] for row in self.rows(0))

    def request_s(self, slo: LatencySlo, lengths: Lengths = SAME) -> tuple[float, float, float]:
        """Return three estimates in seconds: the GPU time of a prompt, the GPU time of an answer, and the duration of
        an answer. They assume as many decodes in a step as the SLO and the limits of a node allow."""
        prompt, answer = (mean * factor for mean, factor in zip(self.mean_lengths, lengths, strict=True))
        cost = self.device.cost
        prompt_s = max(LEAST_S, cost.per_token * prompt + cost.per_pair * prompt**2 / 2)

        def step_s(batch: int) -> float:
            work = StepWork(num_decodes=batch, decode_context=round(batch * (prompt + answer / 2)))
            return cost.seconds(work) + self.device.times.step_s + batch * self.device.times.slice_s

        plan = self.plan("colocated:1")
        most = min(plan.max_num_seqs, int(plan.kv_tokens / (prompt + answer)))
        batch = max((each for each in range(1, most + 1) if 1000 * step_s(each) <= slo.tbt_ms), default=1)
        return prompt_s, max(LEAST_S, answer * step_s(batch) / batch), answer * step_s(batch)

    def first_rate(self, arm: str, slo: LatencySlo, lengths: Lengths = SAME) -> float:
        """Return an estimate of an arm's capacity in requests/s, from which the search starts."""
        plan, (prompt_s, answer_s, _) = self.plan(arm), self.request_s(slo, lengths)
        if not plan.prefill:
            return 0.8 * plan.decode / (prompt_s + answer_s)
        return 0.8 * min(plan.prefill / prompt_s, plan.decode / answer_s)

    def split_for(self, arm: str, slo: LatencySlo, lengths: Lengths) -> str:
        """Return the split that suits `lengths`. `arm` is the best candidate for the traffic's own lengths.

        The ratio of prefill to decode nodes follows the ratio of their estimated work.
        """
        plan = self.plan(arm)
        if not plan.prefill:
            return arm
        (prompt_s, answer_s, _), (own_prompt_s, own_answer_s, _) = self.request_s(slo, lengths), self.request_s(slo)
        ratio = plan.prefill / plan.decode * (prompt_s / answer_s) / (own_prompt_s / own_answer_s)
        nodes = plan.prefill + plan.decode
        prefill = min(max(1, round(nodes * ratio / (1 + ratio))), nodes - 1)
        return f"disaggregated:{prefill}p{nodes - prefill}d" + "".join(arm.partition("@")[1:])

    def _draw(self, seed: int) -> list[TraceRow]:
        return [row for row in self._source.rows(seed, REFERENCE_RATE)[0] if row is not None]


def miss_counts(simulations: Simulations, arm: str, rate: float, count: int, slo: LatencySlo) -> dict[str, int]:
    """Simulate `count` requests. Return the number of misses in the second half of the requests, by main cause."""
    plan = simulations.plan(arm)
    history = RequestHistory(now=lambda: round(1e9 * cluster.events.now), limits=UNLIMITED)
    cluster = RecordedCluster(plan, history, epoch_ns=0)
    requests = simulations.requests(plan, rate, 0, count)
    cluster.run(requests)
    outcomes = outcomes_of(cluster, requests, simulations.slos(0, count))[len(requests) // 2 :]
    summaries = {outcome.id: history.summary(outcome.id) or {} for outcome in outcomes}
    return miss_causes(outcomes, summaries, slo)


def prepare(options: PlanOptions) -> Simulations:
    """Return the simulations of the plan's traffic. Raises ConfigError, which names the flag."""
    _check_choices(options)
    try:
        device = load_emulation(options.cost)
    except ValueError as error:
        raise ConfigError(str(error).replace("--emulate", "--cost")) from None
    traffic = traffic_options(options)
    slo = LatencySlo(options.ttft_slo_ms, options.tbt_slo_ms)
    limit, size = (context_limit(traffic), vocab_size(traffic)) if options.validate else (0, 0)
    trace = read_trace(options.trace, options.trace_format, slo=slo, vocab_size=size) if options.trace else []
    source = TrafficSource(traffic, PromptVocabulary(1), trace, limit)
    step_ms = 1000 * (device.cost.seconds(StepWork(num_decodes=1, decode_context=1)) + device.times.step_s)
    for flag, limit_ms in (("--tbt-slo-ms", options.tbt_slo_ms), ("--ttft-slo-ms", options.ttft_slo_ms)):
        if limit_ms < step_ms:
            raise ConfigError(f"{flag} {limit_ms:g}: one step of {device.name} takes {step_ms:.1f} ms; give more")
    simulations = Simulations(source, device, options.set)
    if (longest := simulations.longest()) > (held := simulations.kv_tokens):
        remedy = f"give --scale-tokens {held / longest * options.scale_tokens:.2g} or less"
        if simulations.plan("colocated:1").computing.num_blocks:
            remedy = "give a larger num_blocks"
        raise ConfigError(f"a request has {longest:.0f} tokens, but a node holds the KV of {held}: {remedy}")
    return simulations


def _check_choices(options: PlanOptions) -> None:
    check_finite(options)
    if options.trace and options.preset:
        raise ConfigError("--trace and --preset: give only one of them")
    if options.trace_format != "auto" and not options.trace:
        raise ConfigError("--trace-format: has no effect without --trace; give --trace, or leave out --trace-format")
    if options.preset and options.preset not in PRESET_NAMES:
        raise ConfigError(f"--preset {options.preset}: must be {', '.join(PRESET_NAMES)}")
    if options.gpus < 2:
        raise ConfigError(f"--gpus {options.gpus}: there is nothing to split; give 2 or more")
    if options.validate and options.validate not in PLACES:
        raise ConfigError(f"--validate {options.validate}: must be {' or '.join(PLACES)}")
    if options.model and not options.validate:
        raise ConfigError("--model: has no effect without --validate; give --validate, or leave out --model")
    if varied := [name for name in VARIED if name in parse_settings("--set", ",".join(options.set))]:
        raise ConfigError(f"--set {varied[0]}: the plan tries several values; give {VARIED[varied[0]]} instead")


def traffic_options(options: PlanOptions) -> CompareOptions:
    """Return the options of the plan's traffic at REFERENCE_RATE."""
    return CompareOptions(
        trace=options.trace,
        trace_format=options.trace_format,
        preset=options.preset or ("" if options.trace else DEFAULT_TRAFFIC),
        scale_tokens=options.scale_tokens,
        burstiness=options.burstiness,
        rate=REFERENCE_RATE,
        duration=MOST_REQUESTS / REFERENCE_RATE,
        too_long="cut",
        model=options.model,
    )


def block_names(row: TraceRow, index: int, block_tokens: int, *, shares: bool = True) -> Iterator[bytes]:
    """Yield a name for each full block of a row's prompt. If `shares` is set, two blocks have the same name if their
    prompts have the same tokens up to the ends of these blocks. Otherwise, all names differ.

    Pieces with the same key have the same tokens at the same positions. `index` is the number of the row.
    """
    num_blocks = row.prompt_len // block_tokens
    if shares and row.prompt is not None:
        yield from block_hashes(row.prompt, block_tokens, b"")
        return
    if not shares or not any(key for key, _ in row.pieces):
        yield from (b"%d %d" % (index, number) for number in range(num_blocks))
        return
    name, place, offset = b"", 0, 0  # `offset` is a position in `row.pieces[place]`
    for _ in range(num_blocks):
        parts, left = [], block_tokens
        while left:
            key, length = row.pieces[place]
            taken = min(left, length - offset)
            parts.append((key or index, offset, taken))
            left, offset = left - taken, offset + taken
            if offset == length and place + 1 < len(row.pieces):
                place, offset = place + 1, 0
        name = hashlib.blake2b(name + repr(parts).encode(), digest_size=DIGEST_BYTES).digest()
        yield name


def _judged(outcome: Outcome) -> tuple[float, float, float]:
    """Return a request's TTFT, the 99th percentile of its times between tokens, and whether it met its own SLO (NaN if
    it has none). The latencies of a failed request are infinite."""
    own = nan if outcome.slo is None else float(not misses(outcome, outcome.slo))
    if outcome.error:
        return inf, inf, own
    return ttft_s(outcome), interpolated(np.sort(np.diff(outcome.token_s)).tolist(), 0.99), own
