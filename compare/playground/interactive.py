"""One simulated run for the page `/simulator`. Uses only the standard library, so that it also runs in a browser."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from math import exp, inf, log
from pathlib import Path
from random import Random
from typing import Any

from compare.load.traces import read_trace
from engine.emulation import COSTS, Emulation, load_emulation
from scheduler.policy import POLICIES
from scheduler.request import Step
from shared.errors import ConfigError
from simulator.cluster import ClusterPlan, SimulatedCluster, paused_gc
from simulator.handoff import SimulatedHandoff
from simulator.node import SimulatedNode, Stretch, quantile
from simulator.routed import RoutedNode, SimulatedRequest

SPREAD = 0.8  # standard deviation of the logarithm of the lengths
MOST_REQUESTS, MOST_NODES = 2000, 16
MOST_PROMPT_TOKENS, MOST_TOKENS = 80_000_000, 1_000_000  # tokens of all prompts, and of all answers
MAX_TRACE = 200_000  # characters of a pasted trace
SLICES = 200  # number of slices into which the time until the last arrival is divided
MS = 1000.0
Document = dict[str, Any]
Row = tuple[float, int, int]  # the time of a request in seconds, and the tokens of its prompt and its answer


@dataclass(frozen=True, slots=True)
class PlayQuery:
    """The settings of a run, as the page sends them.

    `prompt` and `answer` are mean numbers of tokens. If `trace` is given, it replaces the rate and these lengths.
    """

    device: str = "h200-llama-3.1-8b"
    prefill: int = 0
    decode: int = 1
    policy: str = "stall_free"
    budget: int = 512
    rate: float = 8.0
    prompt: int = 1000
    answer: int = 200
    requests: int = 300
    seed: int = 1
    ttft_slo_ms: float = 500.0
    tbt_slo_ms: float = 50.0
    trace: str = ""

    @classmethod
    def read(cls, given: object) -> "PlayQuery":
        """Parse a query from a decoded JSON object. Raises ConfigError, which names the field and its limits."""
        if not isinstance(given, Mapping):
            raise ConfigError("the query must be a JSON object")
        if unknown := sorted(map(str, set(given) - {each.name for each in fields(cls)})):
            raise ConfigError(f"{unknown[0][:40]}: is not a setting of the simulator")
        values = {
            each.name: _value(each.name, given.get(each.name, each.default), type(each.default)) for each in fields(cls)
        }
        query = cls(**values)
        if query.prefill + query.decode > MOST_NODES:
            raise ConfigError(f"prefill, decode: must add up to at most {MOST_NODES} nodes")
        return query


LIMITS: dict[str, tuple[float, float]] = {
    "prefill": (0, MOST_NODES - 1),
    "decode": (1, MOST_NODES),
    "budget": (16, 65536),
    "rate": (0.01, 1000),
    "prompt": (1, 32768),
    "answer": (1, 4096),
    "requests": (1, MOST_REQUESTS),
    "seed": (0, 10**9),
    "ttft_slo_ms": (1, 10**6),
    "tbt_slo_ms": (1, 10**6),
}


def _value(name: str, value: Any, kind: type) -> Any:
    choices = {"policy": POLICIES, "device": devices()}.get(name)
    if choices is not None:
        if not isinstance(value, str) or value not in choices:
            raise ConfigError(f"{name}: must be {', '.join(choices)}")
        return value
    if kind is str:
        if not isinstance(value, str) or len(value) > MAX_TRACE:
            raise ConfigError(f"{name}: must be a text of at most {MAX_TRACE} characters")
        return value
    low, high = LIMITS[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (kind is int and value != int(value)):
        raise ConfigError(f"{name}: must be {'a whole number' if kind is int else 'a number'} from {low:g} to {high:g}")
    return kind(value)


def devices() -> list[str]:
    return sorted(path.stem for path in COSTS.glob("*.json"))


@dataclass(frozen=True, slots=True)
class PlaySettings:
    """The settings of the router and the nodes. Most defaults are those of `shared.config.settings`."""

    policy: str
    max_num_batched_tokens: int
    max_num_seqs: int = 0
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 1
    tbt_slo_ms: float = 0.0
    num_blocks: int = 0
    block_size: int = 0
    max_model_len: int = 0
    heartbeat_s: float = 0.5
    disaggregate: str = "always"
    ttft_slo_ms: float = 0.0
    max_queue_s: float = inf  # requests wait instead of being refused, so that the page shows the queue
    max_queued_tokens: int = 1 << 40


def traffic(query: PlayQuery, device: Emulation) -> list[SimulatedRequest]:
    """Return the requests of a query. Their prompts share no prefixes. Raises ConfigError if the trace is invalid or
    the requests are too large."""
    is_pasted = bool(query.trace.strip())
    rows = _pasted(query.trace)[: query.requests] if is_pasted else _drawn(query)
    if (longest := max(prompt + answer for _, prompt, answer in rows)) > device.kv_tokens:
        name = "trace" if is_pasted else "prompt, answer"
        held = f"{device.name} holds {device.kv_tokens}"
        raise ConfigError(f"{name}: a request has {longest} tokens, but {held}; give shorter requests")
    for what, place, most in (("prompts", 1, MOST_PROMPT_TOKENS), ("answers", 2, MOST_TOKENS)):
        if sum(row[place] for row in rows) > most:
            raise ConfigError(f"requests: their {what} have over {most} tokens together; give fewer requests")
    return [
        SimulatedRequest(
            f"r{number + 1}",
            at_s,
            prompt,
            answer,
            [b"%d %d" % (number, block) for block in range(prompt // device.block_tokens)],
        )
        for number, (at_s, prompt, answer) in enumerate(rows)
    ]


def _drawn(query: PlayQuery) -> list[Row]:
    random, rows, at_s = Random(query.seed), [], 0.0
    lengths = [(log(mean) - SPREAD**2 / 2, mean) for mean in (query.prompt, query.answer)]
    for _ in range(query.requests):
        at_s += random.expovariate(query.rate)
        prompt, answer = (max(1, min(round(exp(random.gauss(mu, SPREAD))), 8 * mean)) for mu, mean in lengths)
        rows.append((at_s, prompt, answer))
    return rows


def _pasted(text: str) -> list[Row]:
    """Return the rows of a pasted trace, with times since the first row."""
    with tempfile.NamedTemporaryFile("w", suffix=".trace", encoding="utf-8") as file:
        try:
            file.write(text.strip() + "\n")
            file.flush()
            rows = read_trace(Path(file.name))
            if any(row.slo for row in rows):
                raise ConfigError(": a row has an slo, but on this page, all requests have the same limits; remove it")
            return [(row.at_s - rows[0].at_s, row.prompt_len, row.max_tokens) for row in rows]
        except ConfigError as error:
            raise ConfigError("trace" + str(error).removeprefix(file.name)) from None
        except UnicodeError:
            raise ConfigError("trace: must be valid Unicode text") from None


class PlayedCluster(SimulatedCluster):
    """A simulated cluster that keeps the data that the page shows. For each entry of a node's log, `work` has the
    numbers of prompt tokens and decodes. `spans` has the chunks and transfers of each request."""

    def __init__(self, plan: ClusterPlan) -> None:
        super().__init__(plan)
        self.work: dict[SimulatedNode, list[tuple[int, int]]] = {node.node: [] for node in self.nodes}
        self.spans: dict[str, list[Document]] = {}

    def on_scheduled(self, node: SimulatedNode, step: Step) -> None:
        self.work[node].append((step.work.prefill_tokens, step.work.num_decodes))
        steps = node.log[-1]
        end_ms = MS * node.times.end(steps, 1)
        for slice_ in step.slices:
            if slice_.count > 1 or slice_.start < slice_.request.num_prompt:
                rows = self.spans.setdefault(slice_.request.sampling[0].id, [])
                rows.append(_span("chunk", node.name, MS * steps.begin_s, end_ms, slice_.count))
        super().on_scheduled(node, step)

    def on_stretch(self, node: SimulatedNode, steps: Stretch) -> None:
        self.work[node].append((0, len(node.scheduler.running)))
        super().on_stretch(node, steps)

    def on_handoff(self, handoff: SimulatedHandoff, kind: str, began_s: float, **fields: Any) -> None:
        if kind == "transfer":
            rows = self.spans.setdefault(handoff.request.id, [])
            end_ms = MS * self.events.now
            rows.append(_span("transfer", handoff.prefill.info.id, MS * began_s, end_ms, fields["count"]))


def _span(kind: str, node: str, start_ms: float, end_ms: float, tokens: int) -> Document:
    times = {"start_ms": round(start_ms, 2), "end_ms": round(end_ms, 2)}
    return {"kind": kind, "node": node, **times, "tokens": tokens}


def simulate(given: object) -> Document:
    """Run a query (see `PlayQuery`), and return the steps of each node, the requests, and the figures. Raises
    ConfigError, which names the field and the fix."""
    *_, found = slices(given)
    assert found is not None
    return found


def slices(given: object) -> Iterator[Document | None]:
    """Run a query in slices, so that a caller can do other work between two slices, or stop. Yield None after each
    slice, and finally the result."""
    query = PlayQuery.read(given)
    device = load_emulation(query.device)
    settings = PlaySettings(query.policy, query.budget)
    plan = ClusterPlan(query.prefill, query.decode, settings, settings, device)  # type: ignore[arg-type]
    requests = traffic(query, device)
    cluster = PlayedCluster(plan)
    slice_s, rows = max(requests[-1].at_s, 1.0) / SLICES, []
    with paused_gc():
        cluster.begin(requests)
        until_s = 0.0
        while cluster.num_open:
            until_s += slice_s
            cluster.events.run(until_s)
            yield None
        ends, answer_s = cluster.ends(), cluster.times.answer_s
        for number, each in enumerate(requests):
            rows.append(_row(each, each.token_s(answer_s, ends), cluster, query.tbt_slo_ms))
            if number % 100 == 0:
                yield None
    yield {
        "nodes": [_node(node, cluster) for node in cluster.nodes],
        "requests": rows,
        "figures": figures(rows, query, plan),
        "devices": devices(),
        "policies": list(POLICIES),
    }


def _node(node: RoutedNode, cluster: PlayedCluster) -> Document:
    """Return a node's steps. A row is (start, total duration, prompt tokens, decodes, number of steps in the row)."""
    times, work = node.node.times, cluster.work[node.node]
    steps = [
        (round(MS * each.begin_s, 2), round(MS * (times.end(each, each.length) - each.begin_s), 2), *own, each.length)
        for each, own in zip(node.node.log, work, strict=True)
    ]
    return {"name": node.info.id, "role": node.info.role, "steps": steps}


def _row(request: SimulatedRequest, token_s: Sequence[float], cluster: PlayedCluster, tbt_slo_ms: float) -> Document:
    spans = cluster.spans.get(request.id, [])
    row: Document = {
        "id": request.id,
        "at_ms": round(MS * request.at_s, 2),
        "prompt": request.num_prompt,
        "answer": request.max_tokens,
        "error": request.error,
        "begun_ms": min((each["start_ms"] for each in spans), default=round(MS * request.finish_s, 2)),
    }
    if request.error or not token_s:
        return row
    gaps = sorted(after - before for before, after in pairwise(token_s))
    end_ms, first_ms = MS * token_s[-1], MS * token_s[0]
    node = request.nodes[-1].info.id
    decoding = _span("decode", node, first_ms, end_ms, len(token_s))
    return row | {
        "end_ms": round(end_ms, 2),
        "ttft_ms": round(first_ms - MS * request.at_s, 2),
        "tbt_ms": round(MS * interpolated(gaps, 0.99), 2),
        "spans": [*spans, decoding, *_waits(node, token_s, tbt_slo_ms)] if len(token_s) > 1 else spans,
    }


def _waits(node: str, token_s: Sequence[float], tbt_slo_ms: float) -> list[Document]:
    """Return a span for each gap between two tokens that exceeds the limit. Merge adjacent spans."""
    waits: list[Document] = []
    for before, after in pairwise(token_s):
        if MS * (after - before) > tbt_slo_ms:
            wait = _span("wait", node, MS * before, MS * after, 1)
            if waits and waits[-1]["end_ms"] == wait["start_ms"]:
                waits[-1] |= {"end_ms": wait["end_ms"], "tokens": waits[-1]["tokens"] + 1}
            else:
                waits.append(wait)
    return waits


def interpolated(values: Sequence[float], share: float) -> float:
    """Return a percentile of sorted values, interpolated linearly, or 0 if there are no values."""
    return quantile(values, share) if values else 0.0


def figures(rows: Sequence[Document], query: PlayQuery, plan: ClusterPlan) -> Document:
    """Return the figures of a run. Leave out its first tenth of requests, because they find the cluster almost idle."""
    counted = rows[len(rows) // 10 :]
    done = [row for row in counted if "ttft_ms" in row]
    good = [row for row in done if row["ttft_ms"] <= query.ttft_slo_ms and row["tbt_ms"] <= query.tbt_slo_ms]
    late = sum(row["ttft_ms"] > query.ttft_slo_ms for row in done)
    stalled = sum(row["tbt_ms"] > query.tbt_slo_ms for row in done)
    found: Document = {
        "attainment": len(good) / len(counted),
        "late": late,
        "stalled": stalled,
        "counted": len(counted),
    }
    for name in ("ttft_ms", "tbt_ms"):
        values = sorted(row[name] for row in done)
        found[name] = {f"p{share}": round(interpolated(values, share / 100), 1) for share in (50, 90, 99)}
    last_ms = max((row.get("end_ms", 0.0) for row in rows), default=0.0)
    gpus = plan.prefill + plan.decode
    tokens = sum(row["answer"] for row in rows if "end_ms" in row)
    return found | {"span_s": last_ms / MS, "tokens_per_s_per_gpu": tokens / max(last_ms, 1.0) * MS / gpus}
