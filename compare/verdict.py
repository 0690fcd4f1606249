"""What the figures say, in one sentence with its interval: who leads, why the others miss, and where that flips.

Pure. It never says more than the paired differences do: "too close to call" is a verdict.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from compare.statistics import CONFIDENCE, TOO_CLOSE, Comparison, compare, compare_with_best, corrected, holm

CEILING = 0.99  # of attainment: above it, an arm leaves nothing to see
STEPS_AROUND = 6  # of half an octave each: SLOs from an eighth to eight times the one that was asked for
LEAST_STEPS = 2  # in a row that an arm must win: one alone is no range
LATENCIES = {
    "ttft_p50_ms": "TTFT p50",
    "ttft_p99_ms": "TTFT p99",
    "tbt_p50_ms": "TBT p50",
    "tbt_p99_ms": "TBT p99",
    "e2e_p50_ms": "E2E p50",
}  # that are told where nothing else decides; few, because each costs the others some of their sureness

Runs = Mapping[str, Sequence[float | None]]  # by arm, the figure of every seed, in one order of the seeds


@dataclass(frozen=True, slots=True)
class Leading:
    """The metric that decides, more of it being better, and how it is told."""

    name: str
    scale: float  # from the metric's unit to the one that is printed
    unit: str
    unit_of_gap: str

    def value(self, row: Sequence[float | None]) -> str:
        mean = _mean(row)
        return "unknown" if mean is None else f"{mean * self.scale:.1f}{self.unit}"

    def gap(self, behind: Comparison) -> str:
        """The lead over the arm that is behind, with its interval."""
        if behind.difference is None or behind.low is None or behind.high is None:
            return "no interval"
        # Adding 0 makes 0 of -0.
        lead, low, high = (0 - value * self.scale + 0 for value in (behind.difference, behind.high, behind.low))
        return f"{lead:+.1f}{self.unit_of_gap} [{low:+.1f}, {high:+.1f}]"


ATTAINMENT = Leading("attainment", 100.0, " %", " points")
CAPACITY = Leading("capacity_rps", 1.0, " req/s", " req/s")


@dataclass(frozen=True, slots=True)
class Standing:
    """The arm with the best mean, and the others held against it, the closest first."""

    leading: Leading
    runs: Runs
    best: str
    others: tuple[Comparison, ...]

    @property
    def close(self) -> list[Comparison]:
        return [other for other in self.others if other.says != "worse"]

    @property
    def beaten(self) -> list[Comparison]:
        return [other for other in self.others if other.says == "worse"]

    def listed(self, others: Sequence[Comparison]) -> str:
        told = self.leading
        return ", ".join(f"{other.arm} {told.value(self.runs[other.arm])} ({told.gap(other)})" for other in others)


def standing(leading: Leading, runs: Runs) -> Standing | None:
    """None where fewer than two arms have a figure for every seed."""
    means = {arm: mean for arm, row in runs.items() if (mean := _mean(row)) is not None}
    if len(means) < 2:
        return None
    best = max(means, key=means.__getitem__)
    others = compare_with_best(leading.name, {arm: runs[arm] for arm in means}, best)
    return Standing(leading, runs, best, tuple(sorted(others, key=lambda other: -means[other.arm])))


def _mean(row: Sequence[float | None]) -> float | None:
    known = [value for value in row if value is not None]
    return sum(known) / len(known) if known and len(known) == len(row) else None


def sentence(what: str, found: Standing | None) -> tuple[str, str | None]:
    """The verdict, and the interval it stands on. `what`: the devices, the traffic and the SLO."""
    if found is None:
        return f"{what}: no verdict, there are no two arms with valid runs", None
    num_pairs = len(found.runs[found.best])
    if num_pairs < 2:
        return f"{what}: no verdict from one pair of runs: give --seeds 2 or more", None
    lead = f"{found.best} {found.leading.value(found.runs[found.best])}"
    if found.close:
        told = f"{TOO_CLOSE} between {lead} and {found.listed(found.close)}"
        told += f"; behind: {found.listed(found.beaten)}" if found.beaten else ""
    else:
        told = f"{lead} leads {found.listed(found.beaten)}"
    return f"{what}: {told}, {num_pairs} paired runs", found.leading.gap(found.others[0])


def cause(found: Standing | None, miss_causes: Mapping[str, Mapping[str, int]]) -> str | None:
    """Why the arm that is furthest behind misses, by its most common cause; None when nobody is behind."""
    if found is None:
        return None
    if found.beaten and (counts := miss_causes.get(found.beaten[-1].arm)):
        top = max(counts, key=counts.__getitem__)
        total = sum(counts.values())
        return f"{counts[top] / total:.0%} of the {total} misses of {found.beaten[-1].arm} are {top}"
    means = [_mean(row) for row in found.runs.values()]
    if not found.beaten and found.leading is ATTAINMENT and all(mean is None or mean >= CEILING for mean in means):
        return "every arm meets the SLO nearly always: a higher --rate or a tighter SLO would tell them apart"
    return None


def clear_winner(found: Standing | None) -> str | None:
    return found.best if found is not None and not found.close else None


StandingAt = Callable[[float, float], Standing | None]  # (TTFT SLO, TBT SLO) in ms -> how the arms stand under them


def flips(standing_at: StandingAt, ttft_ms: float, tbt_ms: float) -> list[str]:
    """Where another arm wins, the same outcomes being judged by other SLOs; what was looked at, if none does.

    Of so many looks one in twenty would show a winner by chance: their probabilities are corrected over all of them
    (Holm), and a win is told as the range in which it holds at every look.
    """
    now = clear_winner(standing_at(ttft_ms, tbt_ms))
    factors = [[2.0 ** (way * step / 2) for step in range(1, STEPS_AROUND + 1)] for way in (-1, 1)]
    limits = (("TBT", tbt_ms), ("TTFT", ttft_ms))
    ways = [(name, [slo_ms * factor for factor in row]) for name, slo_ms in limits for row in factors]
    looks = [standing_at(*((ttft_ms, at) if name == "TBT" else (at, tbt_ms))) for name, values in ways for at in values]
    sure = iter(p <= 1 - CONFIDENCE for p in holm([_p_of(look) for look in looks]))
    winners = iter([clear_winner(look) if next(sure) else None for look in looks])
    told = []
    for name, values in ways:
        for winner, own in groupby(((next(winners), at) for at in values), key=lambda pair: pair[0]):
            reach = [at for _, at in own]
            if winner not in {None, now} and len(reach) >= LEAST_STEPS:
                told.append(f"{winner} wins with a {name} SLO of {_read(min(reach))} to {_read(max(reach))} ms")
    span = 2.0 ** (STEPS_AROUND / 2)
    return told or [
        f"no {'other ' if now else ''}arm wins clearly with a TBT SLO of {_read(tbt_ms / span)} to "
        f"{_read(tbt_ms * span)} ms or a TTFT SLO of {_read(ttft_ms / span)} to {_read(ttft_ms * span)} ms"
    ]


def _read(value_ms: float) -> str:
    return f"{value_ms:,.0f}" if value_ms >= 100 else f"{value_ms:.3g}"


def _p_of(found: Standing | None) -> float:
    """That the best arm is ahead of every other one."""
    return max((other.p for other in found.others), default=1.0) if found else 1.0


def latencies_told(found: Standing | None, figures: Mapping[str, Runs]) -> str | None:
    """What differs clearly where the leading metric is too close to call; None elsewhere, and without latencies.

    `figures`: by metric of LATENCIES. Corrected over all metrics and pairs that are told of.
    """
    if found is None or not found.close or len(found.runs[found.best]) < 2:
        return None
    close = {found.best, *(other.arm for other in found.close)}
    first, *rest = (arm for arm in found.runs if arm in close)
    rows = [compare(name, (arm, runs[arm]), (first, runs[first])) for name, runs in figures.items() for arm in rest]
    if all(one.difference is None for one in rows):
        return None
    clear = [one for one in corrected(rows) if one.says != TOO_CLOSE]
    told = "; ".join(_lower(clear, figures, several=len(close) > 2))
    if any((_mean(found.runs[arm]) or 0.0) < CEILING for arm in close):
        return told or None
    return f"{'Both' if len(close) == 2 else 'All of these'} keep the SLO; {told or 'no latency differs clearly'}"


def _lower(clear: Sequence[Comparison], figures: Mapping[str, Runs], *, several: bool) -> Iterator[str]:
    """For each pair, what is lower in the one than in the other, in percent of the other."""
    ahead = [(one.arm, one.against) if one.says == "better" else (one.against, one.arm) for one in clear]
    for arm, behind in dict.fromkeys(ahead):
        parts = []
        for one, pair in zip(clear, ahead, strict=True):
            if pair == (arm, behind):
                runs = figures[one.metric]
                less = compare(one.metric, (arm, runs[arm]), (behind, runs[behind]))
                percent, low, high = (value or 0.0 for value in (less.percent, less.percent_low, less.percent_high))
                parts.append(f"{-percent:.0f} % lower {LATENCIES[one.metric]} [{low:+.0f}, {high:+.0f}]")
        listed = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
        yield f"{arm} has {listed}" + (f" than {behind}" if several else "")


def held_to_itself(copy: str, original: str, figures: Mapping[str, Runs]) -> tuple[list[Comparison], str]:
    """The negative control over `figures` by metric, corrected for their number; and what it says."""
    found = corrected(
        [compare(metric, (copy, runs[copy]), (original, runs[original])) for metric, runs in figures.items()]
    )
    differing = [one.metric for one in found if one.says != TOO_CLOSE]
    return found, f"a difference in {', '.join(differing)}" if differing else "no difference"
