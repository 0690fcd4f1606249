"""The verdict: which arm leads and by how much, why other arms miss the SLO, and under which other SLOs they win.

If the paired differences support no other verdict, it is "too close to call".
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from compare.arms import Arm
from compare.stats.statistics import (
    CONFIDENCE,
    TOO_CLOSE,
    Comparison,
    Runs,
    compare,
    compare_with_best,
    corrected,
    holm,
)

CEILING = 0.99  # arms with a higher attainment cannot be distinguished
STEPS_AROUND = 6  # number of SLOs to try in each direction, in steps of sqrt(2): from 1/8 to 8 times the given SLO
MIN_STEPS = 2  # a win at other SLOs is reported if the arm wins at this many consecutive SLOs
LATENCIES = {
    "ttft_p50_ms": "TTFT p50",
    "ttft_p99_ms": "TTFT p99",
    "tbt_p50_ms": "TBT p50",
    "tbt_p99_ms": "TBT p99",
    "e2e_p50_ms": "E2E p50",
}  # latencies to compare if the leading metric does not decide; more metrics would lower the significance of each


@dataclass(frozen=True, slots=True)
class LeadingMetric:
    """The metric that decides the verdict, and its format. Higher values are better."""

    name: str
    scale: float  # factor from the metric's unit to the printed unit
    unit: str
    unit_of_gap: str
    what: str

    def value(self, row: Sequence[float | None]) -> str:
        mean = _mean(row)
        return "unknown" if mean is None else f"{mean * self.scale:.1f}{self.unit}"

    def gap(self, behind: Comparison) -> str:
        """Return how far the best arm leads `behind.arm`, with the interval."""
        if behind.difference is None or behind.low is None or behind.high is None:
            return "no interval"
        # Adding 0 converts -0.0 to 0.0.
        lead, low, high = (0 - value * self.scale + 0 for value in (behind.difference, behind.high, behind.low))
        return f"{lead:+.1f}{self.unit_of_gap} [{low:+.1f}, {high:+.1f}]"


ATTAINMENT = LeadingMetric("attainment", 100.0, " %", " points", " of requests met the SLO")
CAPACITY = LeadingMetric("capacity_rps", 1.0, " req/s", " req/s", " are possible within the SLO")


@dataclass(frozen=True, slots=True)
class Ranking:
    """The arm with the best mean, and the comparisons of the other arms with it, best mean first."""

    leading: LeadingMetric
    runs: Runs
    best: str
    others: tuple[Comparison, ...]

    @property
    def close(self) -> list[Comparison]:
        return [other for other in self.others if other.says != "worse"]

    @property
    def beaten(self) -> list[Comparison]:
        return [other for other in self.others if other.says == "worse"]

    @property
    def winner(self) -> str | None:
        """The best arm, or None if another arm is close."""
        return None if self.close else self.best

    @property
    def p(self) -> float:
        """The largest p-value of the best arm's leads over the other arms."""
        return max((other.p for other in self.others), default=1.0)


def rank(leading: LeadingMetric, runs: Runs) -> Ranking | None:
    """Rank the arms. Return None if fewer than two arms have a figure for every seed."""
    means = {arm: mean for arm, row in runs.items() if (mean := _mean(row)) is not None}
    if len(means) < 2:
        return None
    best = max(means, key=means.__getitem__)
    others = compare_with_best(leading.name, {arm: runs[arm] for arm in means}, best)
    return Ranking(leading, runs, best, tuple(sorted(others, key=lambda other: -means[other.arm])))


def _mean(row: Sequence[float | None]) -> float | None:
    known = [value for value in row if value is not None]
    return sum(known) / len(known) if known and len(known) == len(row) else None


def sentence(ranking: Ranking, arms: Sequence[Arm]) -> str:
    """Return the verdict in one plain sentence. `arms` are all compared arms; the first is the baseline."""
    form, best = ranking.leading, ranking.best
    values = {arm: form.value(row) for arm, row in ranking.runs.items()}
    if ranking.close:
        *first, last = [f"{values[arm]} ({arm})" for arm in (best, *(other.arm for other in ranking.close))]
        return f"{TOO_CLOSE.capitalize()}: {', '.join(first)} and {last}{form.what}."
    modes = Counter(arm.mode for arm in arms)
    winner = next(arm for arm in arms if arm.name == best)
    mode = "Disaggregate" if winner.prefill else "Do not disaggregate"
    advice = f"Use {best}" if winner.url or modes[winner.mode] > 1 else mode
    # Compare with the baseline, or with the runner-up if the baseline itself is the best arm.
    other = next((other for other in ranking.others if other.arm == arms[0].name), ranking.others[0])
    low, high = ((0 - (value or 0.0)) * form.scale for value in (other.high, other.low))
    named = f", compared with {other.arm}" if len(arms) > 2 else ""
    certain = f"95 % interval: {low:.1f} to {high:.1f}{form.unit_of_gap}"
    return f"{advice}: {values[best]} instead of {values[other.arm]}{form.what}{named} ({certain})."


def figures_of(ranking: Ranking) -> str:
    """Return a text with the figure of every arm, best first, and the lead of the best arm over each other arm."""
    form, best = ranking.leading, ranking.best
    others = [f"{other.arm} {form.value(ranking.runs[other.arm])} ({form.gap(other)})" for other in ranking.others]
    return f"{best} {form.value(ranking.runs[best])}; {', '.join(others)}; {len(ranking.runs[best])} paired runs"


def leading_cause(ranking: Ranking, miss_causes: Mapping[str, Mapping[str, int]]) -> str | None:
    """Return the last arm's main cause of misses if it is clearly behind, a hint if all arms meet the SLO, or None."""
    if ranking.beaten and (counts := miss_causes.get(ranking.beaten[-1].arm)):
        top = max(counts, key=counts.__getitem__)
        total = sum(counts.values())
        return f"{counts[top] / total:.0%} of the {total} misses of {ranking.beaten[-1].arm} are {top}"
    means = [_mean(row) for row in ranking.runs.values()]
    if not ranking.beaten and ranking.leading is ATTAINMENT and all(mean is None or mean >= CEILING for mean in means):
        return "every arm meets the SLO nearly always: give a higher --rate or a tighter SLO to distinguish them"
    return None


RankAt = Callable[[float, float], Ranking | None]  # returns the ranking under a TTFT SLO and a TBT SLO in ms


def flips(rank_at: RankAt, ttft_ms: float, tbt_ms: float) -> list[str]:
    """Return a line for each range of SLOs under which the same outcomes would make another arm the winner. If there is
    no such range, return one line that says so.

    Without correction, one SLO in twenty would have a winner by chance. Therefore, the p-values are corrected for all
    SLOs (Holm), and a win counts only if it holds at several consecutive SLOs.
    """
    winner_now = current.winner if (current := rank_at(ttft_ms, tbt_ms)) else None
    factors = [[2.0 ** (way * step / 2) for step in range(1, STEPS_AROUND + 1)] for way in (-1, 1)]
    limits = (("TBT", tbt_ms), ("TTFT", ttft_ms))
    ways = [(name, [slo_ms * factor for factor in row]) for name, slo_ms in limits for row in factors]
    rankings = [rank_at(*((ttft_ms, at) if name == "TBT" else (at, tbt_ms))) for name, values in ways for at in values]
    p_values = holm([ranking.p if ranking else 1.0 for ranking in rankings])
    winners = iter(
        ranking.winner if ranking and p <= 1 - CONFIDENCE else None
        for ranking, p in zip(rankings, p_values, strict=True)
    )
    found = []
    for name, values in ways:
        for winner, own in groupby(((next(winners), at) for at in values), key=lambda pair: pair[0]):
            reach = [at for _, at in own]
            if winner not in {None, winner_now} and len(reach) >= MIN_STEPS:
                slos = f"{_format_ms(min(reach))} to {_format_ms(max(reach))} ms"
                found.append(f"{winner} wins with a {name} SLO of {slos}")
    span = 2.0 ** (STEPS_AROUND / 2)
    ranges = [f"a {name} SLO of {_format_ms(at / span)} to {_format_ms(at * span)} ms" for name, at in limits]
    return found or [f"no {'other ' if winner_now else ''}arm wins clearly with {' or '.join(ranges)}"]


def _format_ms(value_ms: float) -> str:
    return f"{value_ms:,.0f}" if value_ms >= 100 else f"{value_ms:.3g}"


def latency_differences(ranking: Ranking, figures: Mapping[str, Runs]) -> str | None:
    """If the leading metric is too close to call, return a text that says which latencies differ clearly, else None.

    `figures` has the runs of each metric of LATENCIES. P-values are adjusted for the number of metrics and pairs.
    """
    if not ranking.close or len(ranking.runs[ranking.best]) < 2:
        return None
    close = {ranking.best, *(other.arm for other in ranking.close)}
    first, *rest = (arm for arm in ranking.runs if arm in close)
    rows = [compare(name, (arm, runs[arm]), (first, runs[first])) for name, runs in figures.items() for arm in rest]
    if all(row.difference is None for row in rows):
        return None
    clear = [row for row in corrected(rows) if row.says != TOO_CLOSE]
    text = "; ".join(_lower(clear, figures, several=len(close) > 2))
    if any((_mean(ranking.runs[arm]) or 0.0) < CEILING for arm in close):
        return text or None
    return f"{'Both' if len(close) == 2 else 'All of these'} keep the SLO; {text or 'no latency differs clearly'}"


def _lower(clear: Sequence[Comparison], figures: Mapping[str, Runs], *, several: bool) -> Iterator[str]:
    """Yield a text for each pair of arms that says which latencies are lower in one arm, and by how many percent."""
    ahead = [(row.arm, row.against) if row.says == "better" else (row.against, row.arm) for row in clear]
    for arm, behind in dict.fromkeys(ahead):
        parts = []
        for row, pair in zip(clear, ahead, strict=True):
            if pair == (arm, behind):
                runs = figures[row.metric]
                less = compare(row.metric, (arm, runs[arm]), (behind, runs[behind]))
                percent, low, high = (value or 0.0 for value in (less.percent, less.percent_low, less.percent_high))
                parts.append(f"{-percent:.0f} % lower {LATENCIES[row.metric]} [{low:+.0f}, {high:+.0f}]")
        listed = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
        yield f"{arm} has {listed}" + (f" than {behind}" if several else "")


def compare_control(copy: str, original: str, figures: Mapping[str, Runs]) -> tuple[list[Comparison], str]:
    """Compare an arm with its copy in all metrics, with p-values corrected for the number of metrics. Return the
    comparisons and a summary."""
    pairs = [(metric, (copy, runs[copy]), (original, runs[original])) for metric, runs in figures.items()]
    found = corrected([compare(*pair) for pair in pairs])
    differing = [row.metric for row in found if row.says != TOO_CLOSE]
    return found, f"a difference in {', '.join(differing)}" if differing else "no difference"
