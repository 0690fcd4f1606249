"""Run every batching policy over the same requests, with the real scheduler and a virtual clock.

    python -m benchmarks policies

Draws docs/policies/*.svg and writes the table in docs/policies.md. The output is deterministic.
"""

import random
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import dataclass, field
from pathlib import Path

from scheduler.cost import CostModel
from scheduler.policy import POLICIES, Policy
from scheduler.request import Request, Step
from scheduler.scheduler import Scheduler, StepLimits

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "policies.md"
# An invented device: a step takes 10 ms for up to 200 tokens, plus 40 µs for each further token, plus attention.
COST = CostModel(
    overhead=2e-3, per_token=4e-5, knee_tokens=200, per_pair=1e-9, per_context=2e-8, per_decode=2e-5, margin=0.0
)
BUDGET_TOKENS = 512
WHOLE_BUDGET_TOKENS = 4096  # for policies without chunked prefill: a step must have room for the longest prompt
TBT_SLO_S = 0.05
NUM_REQUESTS, GAP_S, SEED = 50, 0.07, 2
BEGIN, END = "<!-- table: python -m benchmarks policies -->\n", "<!-- end of table -->\n"
WIDTH, HEIGHT, TOP = 960, 96, 18
SHOWN_S = 6.0
COLOURS = {"prefill": "#e69f00", "decode": "#0e86d4", "late": "#d7263d"}  # the colours of the dashboard


@dataclass(slots=True)
class PolicyRun:
    """One policy's run. Times are seconds on the virtual clock, which starts at 0."""

    steps: list[tuple[float, float, Step]] = field(default_factory=list)  # (start, duration, step)
    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # times between two tokens of one request
    ended: float = 0.0


def arrivals() -> list[tuple[float, Request]]:
    """Return Poisson arrivals; prompts have tens to thousands of tokens and no shared prefixes."""
    rng = random.Random(SEED)
    now_s, found = 0.0, []
    for index in range(NUM_REQUESTS):
        now_s += rng.expovariate(1 / GAP_S)
        num_prompt = min(4000, max(16, int(rng.lognormvariate(6, 1.3))))
        prompt = [index, *range(100, 99 + num_prompt)]
        found.append((now_s, Request(f"r{index}", prompt, num_prompt, rng.randrange(20, 120))))
    return found


def serve(policy: Policy) -> PolicyRun:
    """Serve all arrivals with `policy`. Requests are added only between two steps, as in the engine's loop."""
    limits = StepLimits(BUDGET_TOKENS if policy.chunked else WHOLE_BUDGET_TOKENS, max_num_seqs=32)
    scheduler = Scheduler(limits, num_rows=4000, block_tokens=16, policy=policy)
    run, now_s = PolicyRun(), 0.0
    last_token: dict[str, float] = {}
    todo = arrivals()[::-1]
    arrived = {request.id: at_s for at_s, request in todo}
    while todo or scheduler.has_work:
        if not scheduler.has_work:
            now_s = max(now_s, todo[-1][0])
        while todo and todo[-1][0] <= now_s:
            scheduler.add(todo.pop()[1])
        step = scheduler.schedule()
        duration_s = COST.seconds(step.work)
        run.steps.append((now_s, duration_s, step))
        now_s += duration_s
        for event in scheduler.update(step, [[7] if piece.samples else [] for piece in step.slices]):
            name = event.request.id
            if event.tokens:
                if name in last_token:
                    run.gaps.append(now_s - last_token[name])
                else:
                    run.ttft.append(now_s - arrived[name])
                last_token[name] = now_s
    run.ended = now_s
    return run


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def table(runs: dict[str, PolicyRun]) -> str:
    """Return the Markdown table, with latencies in milliseconds."""
    lines = [
        "| policy | TTFT p50 | TTFT p99 | TBT p50 | TBT p99 | longest TBT | gaps over the SLO | all done after |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, run in runs.items():
        times = [quantile(run.ttft, 0.5), quantile(run.ttft, 0.99), quantile(run.gaps, 0.5), quantile(run.gaps, 0.99)]
        shown = " | ".join(f"{1000 * seconds:.0f}" for seconds in [*times, max(run.gaps)])
        late = sum(gap > TBT_SLO_S for gap in run.gaps) / len(run.gaps)
        lines.append(f"| `{name}` | {shown} | {late:.1%} | {run.ended:.1f} s |")
    return "\n".join(lines) + "\n"


def strip(name: str, run: PolicyRun, max_tokens: int) -> str:
    """Return an SVG with one rectangle per step. The lower part of each rectangle stands for the step's decodes. The
    height of a rectangle grows with the square root of the number of tokens."""
    pixels, name = WIDTH / SHOWN_S, name + (f" (continues until {run.ended:.1f} s)" if run.ended > SHOWN_S else "")
    paths: dict[str, list[str]] = {kind: [] for kind in COLOURS}
    bottom = TOP + HEIGHT
    for start_s, duration_s, step in run.steps:
        if start_s >= SHOWN_S:
            break
        x, width = pixels * start_s, pixels * duration_s
        height = HEIGHT * (step.work.tokens / max_tokens) ** 0.5
        decodes = height * step.work.num_decodes / step.work.tokens
        late = duration_s > TBT_SLO_S
        parts = [("decode", bottom, decodes), ("late" if late else "prefill", bottom - decodes, height - decodes)]
        for kind, base, tall in parts:
            if tall > 0:
                paths[kind].append(f"M{x:.1f} {base:.1f}h{width:.1f}v{-tall:.1f}h{-width:.1f}z")
    drawn = "\n".join(f'<path fill="{COLOURS[kind]}" d="{"".join(path)}"/>' for kind, path in paths.items() if path)
    seconds = "\n".join(
        f'<path stroke="#888" d="M{pixels * second:.1f} {bottom}v5"/>'
        f'<text x="{pixels * second:.1f}" y="{bottom + 17}">{second} s</text>'
        for second in range(int(SHOWN_S))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 24}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="#888">\n'
        f"<title>{name}: every step over time; prompts orange, red where longer than "
        f"{1000 * TBT_SLO_S:.0f} ms, decodes blue</title>\n"
        f'<text x="0" y="12">{name}</text>\n{drawn}\n<path stroke="#888" d="M0 {bottom}h{WIDTH}"/>\n{seconds}\n</svg>\n'
    )


def pages() -> dict[Path, str]:
    """Return the content of the generated files under docs/."""
    runs = {name: serve(policy) for name, policy in POLICIES.items()}
    max_tokens = max(step.work.tokens for run in runs.values() for *_, step in run.steps)
    found = {DOCS / "policies" / f"{name}.svg": strip(name, run, max_tokens) for name, run in runs.items()}
    before, rest = PAGE.read_text().split(BEGIN)
    return found | {PAGE: before + BEGIN + table(runs) + END + rest.split(END)[1]}


def main() -> None:
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    (DOCS / "policies").mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)
    print(PAGE.read_text().split(BEGIN)[1].split(END)[0])
