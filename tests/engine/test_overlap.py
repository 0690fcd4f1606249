"""Test steps that are scheduled and launched while the previous step runs: tokens do not change, no block is lost, and
a failing step fails only the request that caused it."""

import threading
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import build
from engine.hash_model import HashRunner
from engine.models.decoder import Decoder
from engine.runner import leads, set_ahead
from scheduler.request import Request, RequestState, Slice, Step
from shared.rpc.messages import ThinkingBudget, pack_ids
from tests.engine.build import CPU, GREEDY, Blocks, model_fixture, thinned, torch_runner  # noqa: F401
from tests.engine.drive import SAMPLINGS, Drive, answers, driven, expected_of, runner_of, scheduler_of, workload


@settings(max_examples=8)
@given(seed=st.integers(0, 10_000), tight=st.booleans(), aborts=st.booleans())
def test_tokens_are_the_same_with_and_without_overlap(model: Decoder, seed: int, tight: bool, aborts: bool) -> None:
    """A tight pool has room for one and a half requests, so that requests are preempted while a step is in flight."""
    expected = expected_of(model, seed)
    for ahead in (False, True):
        rows = workload(seed)
        drive = driven(model, rows, seed, 18 if tight else 200, ahead=ahead, aborts=aborts)
        for row, (tokens, finish) in zip(rows, expected, strict=True):
            found = row.tokens[row.num_prompt :]
            assert found == tokens[: len(found)]
            assert row.finish == finish if len(found) == len(tokens) else aborts
        assert len(drive.timings) == drive.steps
        starts = [timing.start_ns for timing in drive.timings]
        assert starts == sorted(starts)
        assert all(timing.device_ns >= 0 <= timing.host_ns for timing in drive.timings)


def test_steps_are_launched_while_another_is_pending(model: Decoder) -> None:
    rows = [Request(f"r{index}", [index, 2, 3], 3, 12, sampling=GREEDY) for index in range(3)]
    drive = driven(model, rows, 1, 200, ahead=True, aborts=False)
    runner = drive.runner
    assert runner.num_overlapped > 10
    assert drive.scheduler.counters.generated_tokens == 36


def test_a_tight_pool_really_preempts_with_a_step_in_flight(model: Decoder) -> None:
    rows = workload(4)
    for row in rows:
        row.stop_tokens, row.max_tokens = frozenset(), 30
    drive = driven(model, rows, 4, 18, ahead=True, aborts=False)
    assert drive.scheduler.counters.preemptions > 0


def test_a_step_with_penalties_ends_before_the_next_is_launched(model: Decoder) -> None:
    rows = [Request("r", [1, 2, 3], 3, 12, sampling=SAMPLINGS[3])]
    drive = driven(model, rows, 1, 200, ahead=True, aborts=False)
    runner = drive.runner
    assert runner.num_overlapped == 0
    request = rows[0]
    assert leads(Step(0, [Slice(request, 0, 2, False, 0)], []))
    assert not leads(Step(0, [Slice(request, 0, 3, True, 0)], []))


def test_only_steps_near_the_end_of_a_budget_for_reasoning_wait(model: Decoder) -> None:
    plain = Request("plain", [1, 2, 3], 3, 60, sampling=GREEDY)
    driven(model, [plain], 1, 200, ahead=True, aborts=False)
    start, end = [token for token in range(9) if token not in plain.tokens][:2]
    limited = Request("limited", [1, 2, 3], 3, 60)
    limited.sampling = replace(GREEDY, thinking=ThinkingBudget(20, start, pack_ids([end]), 3))
    drive = driven(model, [limited], 1, 200, ahead=True, aborts=False)
    assert limited.tokens[:24] == [*plain.tokens[:23], end]
    assert end not in limited.tokens[24:28]
    assert 30 < drive.runner.num_overlapped < 45


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("fails_at", thinned([{1}, {7}, {8, 9}, {5, 12, 20}], 2))
def test_a_step_that_fails_once_changes_no_request(model: Decoder, ahead: bool, fails_at: set[int]) -> None:
    expected = expected_of(model, 6)
    rows = workload(6)
    runner = runner_of(model, 18)
    runner.ahead, runner.fails_at = ahead, fails_at
    drive = Drive(scheduler_of(18), runner, {0: [("add", row) for row in rows]})
    drive.run()
    assert drive.failure is None
    assert answers(rows) == expected
    assert runner.passes > max(fails_at)
    assert not drive.errors


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_that_fails_every_pass_fails_alone(
    model: Decoder, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of the device does not run the whole warm-up. On a GPU, that takes seconds, and all requests wait."""
    expected = expected_of(model, 8)
    rows = workload(8)
    runner = runner_of(model, 200)
    monkeypatch.setattr(runner, "warm_up", Mock(side_effect=RuntimeError("a warm-up while requests run")))
    runner.ahead, runner.poison = ahead, "r4"
    drive = Drive(scheduler_of(200), runner, {0: [("add", row) for row in rows]})
    drive.run()
    assert drive.failure is None
    assert drive.errors == ["internal"]
    assert [found for found in answers(rows) if found[1] != "error"] == expected[:4] + expected[5:]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_device_on_which_every_pass_fails_ends_the_engine(
    model: Decoder, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    rows = [Request(f"r{index}", [1, 2, index], 3, 12, sampling=GREEDY) for index in range(6)]
    runner = runner_of(model, 200)
    runner.ahead, runner.fails_after = ahead, 2
    drive = Drive(scheduler_of(200), runner, {2 * at: [("add", row)] for at, row in enumerate(rows)})
    drive.run()
    assert "the device fails even in a warm-up step" in str(drive.failure)
    assert not drive.errors, "no request is blamed: all are retried on other nodes"


def test_a_request_that_sends_kv_is_not_scheduled_beyond_its_first_token(model: Decoder) -> None:
    rows = [Request(f"r{index}", [index, 2, 3], 3, 12, sampling=GREEDY) for index in range(2)]
    rows[0].send_kv = True
    runner = runner_of(model, 200)
    drive = Drive(scheduler_of(200), runner, {0: [("add", row) for row in rows]})
    drive.left = 1
    drive.run()
    assert rows[0].state is RequestState.SENDING_KV
    assert (rows[0].num_scheduled, rows[0].num_generated) == (3, 1)


def test_a_batch_lists_the_pending_draws_that_it_reads() -> None:
    blocks = Blocks(64, 4)
    first, second, chunk = (blocks.request([5, 6, 7, index], GREEDY) for index in range(3))
    before = [Slice(chunk, 0, 2, False, 0), Slice(first, 3, 1, True, 0), Slice(second, 3, 1, True, 0)]
    after = [Slice(second, 4, 1, True, 0), Slice(chunk, 2, 2, True, 0), Slice(first, 4, 1, True, 0)]
    batch = build(after, 4, CPU, before)
    assert batch.carried == [(0, 1), (3, 0)]
    assert batch.tokens.tolist() == [0, 7, 2, 0]
    assert batch.positions.tolist() == [4, 2, 3, 4]
    with pytest.raises(ValueError, match="beyond the request's tokens or blocks"):
        build(after, 4, CPU, before[:2])


def test_async_scheduling_follows_the_setting_if_the_runner_supports_it(model: Decoder) -> None:
    runner, _, _ = torch_runner(model)
    for mode, ahead in (("on", True), ("auto", True), ("off", False), ("auto", False)):
        set_ahead(runner, mode)
        assert runner.ahead is ahead
    set_ahead(runner, "on")
    set_ahead(runner, "auto", speculates=True)
    assert not runner.ahead
    hashing = HashRunner(torch.zeros(4, 1024, dtype=torch.uint8).numpy(), 4, 100)
    set_ahead(hashing, "off")
    with pytest.raises(ValueError, match="--async-scheduling on"):
        set_ahead(hashing, "on")
