"""What the figures say, in one sentence with its interval: who leads, why the others miss, and where that flips.

Pure. It never says more than the paired differences do: "too close to call" is a verdict.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from compare.statistics import CONFIDENCE, TOO_CLOSE, Comparison, compare, compare_arms, holm

CEILING = 0.99  # of attainment: above it, an arm leaves nothing to see
STEPS_AROUND = 12  # of a quarter octave each: SLOs from an eighth to eight times the one that was asked for

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
    others = compare_arms(leading.name, {arm: runs[arm] for arm in means}, best)
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


Winner = Callable[[float, float], str | None]  # (TTFT SLO, TBT SLO) in ms -> the arm that wins clearly, if one does


def flips(winner_at: Winner, ttft_ms: float, tbt_ms: float) -> list[str]:
    """Where another arm wins, the same outcomes being judged by other SLOs; what was looked at, if none does."""
    now = winner_at(ttft_ms, tbt_ms)
    told = []
    for name, slo_ms in (("TBT", tbt_ms), ("TTFT", ttft_ms)):
        for sign, word in ((-1, "at most"), (1, "at least")):
            for step in range(1, STEPS_AROUND + 1):
                value = slo_ms * 2.0 ** (sign * step / 4)
                winner = winner_at(ttft_ms, value) if name == "TBT" else winner_at(value, tbt_ms)
                if winner not in {None, now}:
                    told.append(f"{winner} wins if the {name} SLO is {word} {value:.3g} ms")
                    break
    span = 2.0 ** (STEPS_AROUND / 4)
    return told or [
        f"no {'other ' if now else ''}arm wins with a TBT SLO of {tbt_ms / span:.3g} to {tbt_ms * span:.3g} ms "
        f"or a TTFT SLO of {ttft_ms / span:.3g} to {ttft_ms * span:.3g} ms"
    ]


def held_to_itself(copy: str, original: str, figures: Mapping[str, Runs]) -> tuple[list[Comparison], str]:
    """The negative control over `figures` by metric, corrected for their number; and what it says."""
    found = [compare(metric, (copy, runs[copy]), (original, runs[original])) for metric, runs in figures.items()]
    corrected = holm([one.p for one in found])
    found = [
        replace(one, p=p, says=one.says if p <= 1 - CONFIDENCE else TOO_CLOSE)
        for one, p in zip(found, corrected, strict=True)
    ]
    differing = [one.metric for one in found if one.says != TOO_CLOSE]
    return found, f"a difference in {', '.join(differing)}" if differing else "no difference"
