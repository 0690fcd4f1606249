"""Test every metric with a few simple requests, whose expected figures were calculated by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest

from compare.load.outcome import LatencySlo, Outcome
from compare.stats.measures import (
    PHASES,
    busy_shares,
    ecdf,
    fluidity,
    gaps_s,
    inside,
    measure,
    miss_cause,
    miss_causes,
    misses,
    percentile,
    phases_ms,
    phases_of,
    tpot_s,
    ttft_s,
    ttst_s,
    values_ms,
)
from scheduler.cost import CostModel

STRICT = LatencySlo(ttft_ms=500, tbt_ms=50)


def request(scheduled_s: float, token_s: list[float], **fields: Any) -> Outcome:
    """Return a finished request that was sent 1 ms late. `fields` override its fields."""
    usual = {"sent_s": scheduled_s + 0.001, "finish": "length", "max_tokens": len(token_s), "id": f"cmpl-{scheduled_s}"}
    return Outcome(**{"index": 0, "scheduled_s": scheduled_s, "token_s": token_s} | usual | fields)


def failed(scheduled_s: float, token_s: list[float], max_tokens: int = 4, error: str = "timeout") -> Outcome:
    return request(scheduled_s, token_s, finish="", error=error, max_tokens=max_tokens)


def summary(**phases: float) -> dict[str, Any]:
    named = dict.fromkeys(PHASES[1:-1], 0.0)
    return {"phases_ms": named | phases, "transfer": None, "accepted_ms": 1000.0, "first_token_ms": 1100.0}


# ---- one request ---------------------------------------------------------------------------------------------------


def test_latencies_of_one_request() -> None:
    """TTFT counts from the due time. Simultaneous tokens have gaps of 0. One-token requests have no TPOT or TTST."""
    assert ttft_s(request(10.0, [10.5, 10.6], sent_s=10.4)) == pytest.approx(0.5)
    assert ttft_s(failed(10.0, [])) == math.inf
    whole, one, lost = request(0.0, [1.0, 1.5, 1.5, 3.1]), request(0.0, [1.0]), failed(0.0, [1.0], max_tokens=2)
    assert gaps_s(whole) == pytest.approx([0.5, 0.0, 1.6])
    assert [tpot_s(each) for each in (whole, one, lost)] == [pytest.approx(0.7), None, math.inf]
    assert [ttst_s(each) for each in (whole, one, lost)] == [0.5, None, math.inf]
    assert tpot_s(failed(0.0, [], max_tokens=1)) is None


def test_fluidity_counts_missing_tokens_as_late() -> None:
    # The deadlines are 0.5, 0.55, 0.6 and 0.65. Only the second token is late.
    assert fluidity(request(0.0, [0.4, 0.58, 0.59, 0.65]), STRICT) == (3, 4)
    assert fluidity(failed(0.0, [0.4], max_tokens=4), STRICT) == (1, 4)
    assert fluidity(request(0.0, [0.4, 9.0]), LatencySlo(ttft_ms=500)) == (2, 2)


@pytest.mark.parametrize(
    ("outcome", "missed"),
    [
        (request(0.0, [0.5, 0.549]), []),
        (request(0.0, [0.51, 0.55]), ["ttft"]),
        (request(0.0, [0.4, 0.46]), ["tbt"]),
        (request(0.0, [0.6, 0.7]), ["ttft", "tbt"]),
        (request(0.0, [0.4]), []),
        (failed(0.0, [0.4, 0.41]), ["failed"]),
        (request(0.0, [0.6, 0.7], slo=LatencySlo(ttft_ms=700, tbt_ms=200)), []),
    ],
)
def test_a_good_request_finished_and_met_every_slo(outcome: Outcome, missed: list[str]) -> None:
    assert misses(outcome, STRICT) == missed


@pytest.mark.parametrize(("tbt_of", "missed"), [("p99", []), ("max", ["tbt"]), ("mean", [])])
def test_the_figure_of_the_gaps_that_the_slo_limits(tbt_of: str, missed: list[str]) -> None:
    """One long gap in 200 does not change the 99th percentile."""
    times = [0.1 + 0.01 * index for index in range(200)]
    outcome = request(0.0, [*times, times[-1] + 0.2])
    assert misses(outcome, LatencySlo(500, 50, tbt_of)) == missed


# ---- one run -------------------------------------------------------------------------------------------------------

WINDOW = (10.0, 20.0)


def metrics_of(*outcomes: Outcome, summaries: dict[str, Any] | None = None, overloaded: bool = False) -> Any:
    return measure(outcomes, STRICT, summaries or {}, WINDOW, overloaded=overloaded).metrics


def test_attainment_and_goodput_count_all_arrivals_in_the_window() -> None:
    outcomes = [
        request(5.0, [5.1]),  # warm-up
        request(10.0, [10.1, 10.12]),
        request(12.0, [12.9, 12.95]),  # late
        failed(15.0, []),
        request(20.0, [20.1, 20.15]),  # arrives in the window and finishes after it
        request(21.0, [21.1]),
    ]
    found = measure(outcomes, STRICT, {}, WINDOW, overloaded=False)
    assert (found.arrived, found.finished, found.failed) == (4, 3, 1)
    assert found.metrics["attainment"] == 0.5
    assert found.metrics["goodput_rps"] == pytest.approx(0.2)
    assert found.metrics["fluidity"] == pytest.approx(4 / 10)
    assert inside(outcomes, WINDOW) == outcomes[1:5]
    assert metrics_of(outcomes[0])["attainment"] is None, "nothing arrived in the window"


def test_throughput_leaves_out_the_warm_up_and_the_drain() -> None:
    """20 tokens arrive in the window of 10 s, 10 before it, and 30 after it, while the run drains."""
    early = request(8.0, [9.0 + 0.1 * index for index in range(10)])
    steady = request(11.0, [11.0 + 0.4 * index for index in range(20)])
    drain = request(19.0, [20.5 + 0.1 * index for index in range(30)])
    assert metrics_of(early, steady, drain)["throughput_tps"] == pytest.approx(2.0)


def test_answers_of_one_token_do_not_improve_tpot_and_ttst() -> None:
    outcomes = [request(10.0 + index, [10.5 + index]) for index in range(9)] + [request(19.0, [19.1, 19.3, 19.5])]
    metrics = metrics_of(*outcomes)
    assert (metrics["tpot_p50_ms"], metrics["ttst_p50_ms"]) == (pytest.approx(200), pytest.approx(200))


def test_failures_count_in_percentiles_and_every_figure_is_a_number_or_none() -> None:
    """Without the 3 failed requests of 100, p99 would be 100 ms. With them, p99 is infinite. It is reported as None,
    because JSON cannot represent infinity."""
    metrics = metrics_of(*[request(10.0, [10.1]) for _ in range(97)], *[failed(10.0, []) for _ in range(3)])
    assert metrics["ttft_p50_ms"] == pytest.approx(100)
    assert metrics["ttft_p99_ms"] is None
    assert metrics["attainment"] == pytest.approx(0.97)
    metrics = metrics_of(request(10.0, [10.1, 10.2]), failed(10.0, [10.1, 10.3]), failed(11.0, [], max_tokens=1))
    assert metrics["tbt_max_ms"] is None
    assert all(value is None or math.isfinite(value) for value in metrics.values())


def test_the_last_gap_of_a_failed_request_is_infinite() -> None:
    values = values_ms([request(10.0, [10.1, 10.2]), failed(10.0, [10.1, 10.3])])
    assert values["tbt"] == pytest.approx([100, 200, math.inf])
    assert ecdf(values["tbt"]) == {"x": pytest.approx([100, 200]), "y": pytest.approx([1 / 3, 2 / 3])}


def test_a_curve_merges_equal_values_and_keeps_the_largest_separate() -> None:
    assert ecdf([1.0] * 1000 + [2.0] * 3, points=5) == {"x": [1.0, 2.0], "y": [1000 / 1003, 1.0]}
    found = ecdf([float(value) for value in range(100_000)])
    assert len(found["x"]) <= 400
    assert found["x"][-3:] == [99_997.0, 99_998.0, 99_999.0]
    assert all(y == (x + 1) / 100_000 for x, y in zip(found["x"], found["y"], strict=True))


def test_an_overloaded_run_has_no_latencies() -> None:
    metrics = metrics_of(request(10.0, [10.1, 10.2]), overloaded=True)
    assert "attainment" in metrics
    assert not [name for name in metrics if name.startswith(("ttft", "tbt", "tpot", "ttst", "e2e"))]


def test_latency_percentiles_of_known_values() -> None:
    metrics = metrics_of(request(10.0, [10.1, 10.2, 10.5]), request(11.0, [11.3, 11.4, 11.6], sent_s=11.004))
    expected = {"ttft_p50_ms": 200, "tbt_p50_ms": 150, "tbt_max_ms": 300, "tpot_p50_ms": 175, "e2e_p50_ms": 550}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert metrics["client_lag_p99_ms"] == pytest.approx(1 + 0.99 * 3)
    assert percentile([], 50) is None


# ---- with the router's records -------------------------------------------------------------------------------------


def test_transfers_are_hidden_and_exposed() -> None:
    outcomes = [request(10.0, [10.2, 10.3], id="a"), request(11.0, [11.2, 11.3], id="b"), request(12.0, [12.1], id="c")]
    summaries = {
        "a": summary(interference=30.0) | {"transfer": {"hidden_ms": 1.5, "exposed_ms": 0.5}},
        "b": summary(interference=12.0) | {"transfer": {"hidden_ms": 2.5, "exposed_ms": 3.5}},
        "c": summary(),
    }
    metrics = metrics_of(*outcomes, summaries=summaries)
    assert metrics["hidden_transfer_p50_ms"] == pytest.approx(2.0)
    assert metrics["exposed_transfer_p50_ms"] == pytest.approx(2.0)
    assert metrics["interference_s"] == pytest.approx(0.042)


def step(start_ms: float, duration_ms: float, prefill: int, decodes: int, **more: int) -> dict[str, float]:
    row = {"start_ms": start_ms, "duration_ms": duration_ms, "prefill_tokens": prefill, "num_decodes": decodes}
    return row | {"num_prefills": int(prefill > 0), "decode_context": 0, "waiting": 0} | more


def test_shares_of_a_device_sum_to_1_and_overlaps_count_once() -> None:
    passes = [step(0, 20, 10, 0), step(10, 20, 0, 4, waiting=3), step(40, 20, 5, 15), step(90, 20, 0, 1)]
    expected = {"busy": 0.6, "prefill": 0.2 + 0.05, "decode": 0.1 + 0.15 + 0.1, "idle_blocked": 0.1, "idle_empty": 0.3}
    assert busy_shares(passes, (0.0, 100.0), None) == pytest.approx(expected)
    model = CostModel(overhead=0.01, per_token=0.001, per_context=0.0001)
    mixed = step(0, 40, 10, 10, decode_context=200)  # predicted: 10 ms for the prompt, 30 ms for decodes
    assert busy_shares([mixed], (0.0, 40.0), model)["prefill"] == pytest.approx(0.25)
    model, mixed = replace(model, per_pair=1e-6), mixed | {"prefill_pairs": 20_000}  # 20 ms more for the prompt
    assert busy_shares([mixed], (0.0, 40.0), model)["prefill"] == pytest.approx(0.5)


def test_phases_and_client_lag_and_residual_sum_to_the_whole_time() -> None:
    outcome = request(10.0, [10.3, 10.6], sent_s=10.01)
    phases = phases_ms(outcome, summary(router=1, prefill_queue=90, prefill=180, transfer_exposed=20, decode=280))
    assert phases is not None
    assert phases["client"] == pytest.approx(10)
    assert phases["residual"] == pytest.approx(600 - 10 - 571)
    assert sum(phases.values()) == pytest.approx(600)
    assert phases_ms(failed(10.0, [10.3]), summary()) is None
    retried = summary(prefill=100)
    retried["phases_ms"]["retry"] = 50.0
    assert sum(phases_ms(outcome, retried).values()) == pytest.approx(600)


def test_phases_of_a_run_are_means_of_all_and_of_the_missed() -> None:
    outcomes = [request(10.0, [10.2], id="a"), request(11.0, [11.9], id="b")]
    summaries = {"a": summary(prefill=190), "b": summary(prefill_queue=600, prefill=290)}
    found = phases_of(outcomes, summaries, STRICT)
    assert found["mean"]["prefill"] == pytest.approx(240)
    assert found["missed"]["prefill_queue"] == pytest.approx(600)
    assert found["residual_ms"]["median"] == pytest.approx(9)
    assert phases_of(outcomes, {}, STRICT) is None


@pytest.mark.parametrize(
    ("outcome", "phases", "cause"),
    [
        (request(0.0, [0.9, 0.91]), {"prefill_queue": 600, "prefill": 200}, "TTFT: prefill queue"),
        (request(0.0, [0.9, 0.91]), {"prefill_queue": 100, "prefill": 700}, "TTFT: prefill compute"),
        (request(0.0, [0.9, 0.91], sent_s=0.8), {"prefill": 90}, "TTFT: client lag"),
        (request(0.0, [0.1, 0.2]), {"transfer_exposed": 60, "decode": 30}, "TBT: transfer"),
        (request(0.0, [0.1, 0.2]), {"decode_queue": 60}, "TBT: decode queue"),
        (request(0.0, [0.1, 0.2, 0.3]), {"interference": 80, "decode": 120}, "TBT: behind prompt chunks"),
        (request(0.0, [0.1, 0.2, 0.3]), {"interference": 5, "decode": 190}, "TBT: decode compute"),
        (request(0.0, [0.9, 0.91]), {"retry": 700, "prefill": 90}, "TTFT: failed attempts"),
        (request(0.0, [0.9, 0.91]), {"prefill": 90}, "TTFT: outside the router"),
        (request(0.0, [0.1, 0.5]), {"retry": 380, "prefill": 90}, "TBT: failed attempts"),
        (failed(0.0, []), {}, "failed: timeout"),
        (failed(0.0, [], error="HTTP 503: no node"), {}, "failed"),
        (request(0.0, [0.1, 0.14]), {"decode": 40}, None),
    ],
)
def test_every_miss_has_one_cause(outcome: Outcome, phases: dict[str, float], cause: str | None) -> None:
    assert miss_cause(outcome, summary(**phases), STRICT) == cause


def test_causes_are_counted_including_misses_without_records() -> None:
    outcomes = [request(0.0, [0.9]), request(0.0, [0.9]), failed(0.0, []), request(0.0, [0.1])]
    assert miss_causes(outcomes, {}, STRICT) == {"TTFT: unknown": 2, "failed: timeout": 1}
