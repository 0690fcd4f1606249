"""What stands against a verdict, and what has to be known beside one. Pure: lines of text made of a run's figures."""

from collections import Counter

from compare.endpoint import Document
from compare.figures import Figures
from compare.verdict import Standing, clear_winner

LEAST_PAIRS = 0.75  # of the seeds that must have a valid period in every arm
LEAST_LOST = 2  # invalid periods of one arm and of no other that are more than bad luck


def problems_told(figures: Figures, control: Document | None, found: Standing | None) -> list[str]:
    """What of the figures forbids a verdict. `found`: how the arms stand by the leading metric."""
    problems = []
    if not figures.findings.problems:
        problems += _beyond(figures) or _too_few(figures)
    if figures.findings.different:
        problems.append(f"{len(figures.findings.different)} requests were not answered alike by all arms")
    if control and control["comparisons"] and control["says"] != "no difference":
        problems.append(f"the control, an arm against itself, shows {control['says']}: these runs cannot be trusted")
    lost = _lost(figures)
    winner = clear_winner(found)
    if winner is not None and set(lost) == {winner} and lost[winner] >= LEAST_LOST:
        problems.append(
            f"{winner} would lead, but all {lost[winner]} invalid periods are its own: its load may be why, and then"
            " the seeds that are left are its easier ones"
        )
    return problems


def _too_few(figures: Figures) -> list[str]:
    wanted, had = len(figures.experiment.seeds), len(figures.pairs)
    if figures.experiment.finds_capacity:
        had = min(map(len, figures.capacities.values()), default=0)
    if had < 2:
        return [f"{had} paired runs are too few: give --seeds 2 or more, and see `runs` for what was wrong"]
    if had < LEAST_PAIRS * wanted and not figures.experiment.finds_capacity:
        return [f"only {had} of {wanted} seeds have a valid period in every arm; `runs` says what was wrong"]
    return []


def _beyond(figures: Figures) -> list[str]:
    """Arms whose capacity is known as a bound only: what they carry beyond it would decide."""
    problems = []
    for arm, found in figures.findings.capacities.items():
        if found.bounded == "above":
            problems.append(f"{arm} carries at least {found.rate:.3g} req/s, the highest rate that was measured")
        elif found.bounded == "below":
            problems.append(f"{arm} does not even carry {found.rate:.3g} req/s, the lowest rate that was measured")
        elif (row := figures.capacities.get(arm)) and None in row:
            problems.append(
                f"the capacity of {arm}, {found.rate:.3g} req/s or so, hangs on a single seed: without it, it lies"
                " beyond the rates that were measured; give more --seeds or a longer --duration"
            )
    return problems


def _lost(figures: Figures) -> Counter[str]:
    return Counter(period.turn.arm for period in figures.findings.periods if period.problems)


def notes_told(figures: Figures) -> list[str]:
    """What the figures leave out."""
    notes = list(figures.findings.notes)
    for arm in figures.arms:
        own = [period for period in figures.findings.periods if period.turn.arm == arm]
        if invalid := [period for period in own if period.problems]:
            told = Counter(period.problems[0] for period in invalid).most_common(1)[0][0]
            notes.append(f"{len(invalid)} of {len(own)} periods of {arm} are invalid and in no figure; mostly: {told}")
        if told_of := [period for period in own if period.notes]:
            more = f" (and so in {len(told_of) - 1} more of its periods)" if len(told_of) > 1 else ""
            notes.append(f"{arm}, seed {told_of[0].turn.seed}: {told_of[0].notes[0]}{more}")
        valid, steady = len(figures.of(arm)), len(figures.steady(arm))
        if steady < valid:
            notes.append(
                f"{arm} was overloaded in {valid - steady} of {valid} periods: its latency curves and phases are"
                f" {'of the others, its better ones' if steady else 'left out'}"
            )
    lost = _lost(figures)
    if len(lost) == 1 and lost.total() >= LEAST_LOST:
        arm = next(iter(lost))
        notes.append(f"all invalid periods are of {arm}: its load may be why, and what is left are its easier seeds")
    return notes
