"""In which order the arms take their turns, and how long all of it will take."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

START_S = 6.0  # of an arm's processes, each, on a busy machine
BETWEEN_S = 3.0  # of one period: the last answers, the cool-down, asking for the records
REPORT_S = 10.0


class Turn(NamedTuple):
    """One period: an arm under a seed's traffic; `position` counts all periods of the run from 0.

    `rate`, where one is looked for, is in place of the traffic's own.
    """

    arm: str
    seed: int
    position: int
    rate: float | None = None

    @property
    def traffic(self) -> tuple[int, float | None]:
        """The same for all turns under the same requests."""
        return self.seed, self.rate


def turns(arms: Sequence[str], seed: int, number: int) -> list[Turn]:
    """Of the `number`-th seed from 0. ABBA: forwards and backwards in turn, so that a drift meets all arms alike."""
    order = arms if number % 2 == 0 else arms[::-1]
    return [Turn(arm, seed, number * len(arms) + place) for place, arm in enumerate(order)]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is run, as announced before it starts."""

    num_arms: int
    num_turns: int  # of each arm
    duration_s: float
    num_devices: int  # of one arm
    keeps_all: bool  # all arms stay up, or each is started anew for its period

    @property
    def predicted_s(self) -> float:
        periods = self.num_arms * self.num_turns
        starts = self.num_arms * (1 if self.keeps_all else 1 + self.num_turns)
        return periods * (self.duration_s + BETWEEN_S) + starts * (self.num_devices + 1) * START_S + REPORT_S

    def __str__(self) -> str:
        return (
            f"plan: {self.num_arms} arms x {self.num_turns} periods x {self.duration_s:g} s of traffic, "
            f"about {self.predicted_s / 60:.0f} min in all"
        )
