"""The settings that determine when the dispatcher retries or refuses a request."""

from dataclasses import dataclass

from router.dispatch.admission import AdmissionRefusedError
from scheduler.placement import Placement
from shared.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class DispatchRules:
    """The settings of the dispatcher. `scheduler.placement.place` documents `disaggregate`. A request is refused if its
    first token is predicted to take more than `ttft_slo_s` seconds; 0 means no limit. With `exact_retries`, a request
    fails if its next attempt might continue with different tokens."""

    max_attempts: int = 5
    disaggregate: str = "auto"
    ttft_slo_s: float = 0.0
    exact_retries: bool = False

    def check_exact(self, why: str) -> None:
        """Raise UnavailableError if `exact_retries` is set. `why` is the `inexact_reason` of the next attempt."""
        if self.exact_retries:
            text = "A node was lost, and another node might continue the answer with different tokens"
            raise UnavailableError(f"{text} ({why}); send the request again.", code="not_resumable")

    def check_slo(self, placement: Placement, *, is_stale: bool) -> None:
        """Raise AdmissionRefusedError if the first token is predicted to miss the SLO.

        A request is admitted if it has no prediction or a stale prediction. If stale predictions counted, a node that
        was once measured as too slow would get no more requests, and would never be measured again.
        """
        slo_s, estimate = self.ttft_slo_s, placement.estimate
        if not slo_s or estimate is None or estimate.first_token_s <= slo_s or is_stale:
            return
        raise AdmissionRefusedError(
            f"The predicted time to the first token is {estimate.first_token_s * 1000:.0f} ms, over the limit of "
            f"{slo_s * 1000:.0f} ms (--ttft-slo-ms); try again later.",
            estimate.first_token_s - slo_s,
        )
