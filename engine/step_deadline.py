"""The watchdog's deadline for a step, learnt from the steps before it."""

import math

from scheduler.request import Step

SLACK = 10.0  # times what is known: company on the machine, a first chunk among decodes
FIRST_S = 300.0  # for steps of which nothing is known yet


class StepDeadline:
    """How long a step may take: `least_s`, or `SLACK` times what the step-time model predicts or the fewest seconds a
    token has taken, by the step's tokens. A prompt's tokens are cheaper than decodes, which read all weights for each,
    so this holds also for the first long chunk of a node that has only decoded."""

    def __init__(self, least_s: float) -> None:
        self.least_s = least_s
        self._token_s = math.inf

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        self._token_s = min(self._token_s, seconds / max(1, tokens))

    def seconds(self, step: Step) -> float:
        if self._token_s == math.inf:
            return max(self.least_s, FIRST_S)
        return max(self.least_s, SLACK * max(step.predicted_s, step.work.tokens * self._token_s))
