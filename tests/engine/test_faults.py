"""Test faults inside an engine: slow steps, and requests that cause errors or NaN."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch

from benchmarks.random_model import random_decoder
from engine.engine import Engine
from engine.models.decoder import Decoder
from engine.models.spec import AttentionSpec, DeltaSpec, LayerSpec, MlpSpec
from engine.step_time_fit import FIRST_S, StepDeadline
from scheduler.cost import StepWork
from scheduler.request import Request, Step
from scheduler.scheduler import StepLimits
from shared.rpc.messages import SamplingParams
from tests.engine.build import CONFIG, CPU, GREEDY, model_fixture  # noqa: F401 - a fixture
from tests.engine.drive import Drive, answers, expected_of, runner_of, scheduler_of, workload
from tests.engine.nodes import Node
from tests.node.harness import quiet  # noqa: F401 - a fixture


def step_of(tokens: int, predicted_s: float = 0.0) -> Step:
    return Step(0, [], [], work=StepWork(1, tokens), predicted_s=predicted_s)


def test_the_deadline_of_a_step_follows_earlier_steps_and_has_a_minimum() -> None:
    deadline = StepDeadline(5.0)
    assert deadline.seconds(step_of(512)) == FIRST_S, "no step was observed"
    deadline.observe(1, 0.08)  # a decode on a laptop
    assert deadline.seconds(step_of(1)) == 5.0
    assert deadline.seconds(step_of(512)) == pytest.approx(10 * 512 * 0.08), "the first chunk after decodes may be slow"
    deadline.observe(512, 15.0)
    assert deadline.seconds(step_of(512)) == pytest.approx(150.0)
    deadline.observe(64, 0.01)
    assert deadline.seconds(step_of(512)) == 5.0
    assert deadline.seconds(step_of(512, predicted_s=2.0)) == 20.0, "a longer prediction extends the deadline"


def test_an_idle_engine_makes_progress_more_often_than_its_deadline() -> None:
    idle = Engine(scheduler_of(8), cast(Any, None), MagicMock(), stuck_s=0.4)
    idle.start()
    for _ in range(50):  # this process may stand still for some time
        before = idle.progress
        time.sleep(0.4)
        if is_often := idle.progress > before + 1:
            break
    assert is_often
    idle.stop()


# ---- faults of one request -----------------------------------------------------------------------------------------


class Raises:
    """A value that raises an error if it is compared, used in arithmetic or used as a container."""

    def fail(self, *_: object) -> Any:
        raise ValueError("injected")

    __lt__ = __gt__ = __eq__ = __float__ = __mul__ = __rmul__ = __contains__ = __iter__ = __bool__ = fail
    __hash__ = None


def break_draw(victim: Request) -> None:
    victim.sampling.temperature = Raises()


def break_logprobs(victim: Request) -> None:
    victim.needs_prompt_logprobs, victim.sampling.prompt_logprobs = True, Raises()


def break_update(victim: Request) -> None:
    victim.stop_tokens = Raises()


def break_tokens(victim: Request) -> None:
    class Tokens(list[int]):
        def append(self, token: int) -> None:
            raise ValueError("injected")

    victim.tokens = Tokens(victim.tokens)


@cache
def expected_once(model: Decoder) -> list[tuple[list[int], str | None]]:
    return expected_of(model, 8)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("breaks", [break_draw, break_logprobs, break_update, break_tokens, None])
def test_a_request_that_causes_an_error_or_broken_logits_fails_alone(
    model: Decoder, breaks: Callable[[Request], None] | None, ahead: bool
) -> None:
    expected, rows, runner = expected_once(model), workload(8), runner_of(model, 200)
    victim = rows[4]
    victim.tokens[:], victim.sampling = [60, *range(1, 13)], SamplingParams(seed=77)
    victim.num_prompt, victim.max_tokens = 13, 9
    runner.ahead = ahead
    if breaks is None:
        runner.spoils = victim.id
    else:
        breaks(victim)
    drive = Drive(scheduler_of(200), runner, {0: [("add", row) for row in rows]})
    drive.run()
    assert drive.failure is None
    assert victim.finish == "error"
    assert answers(rows[:4] + rows[5:]) == expected[:4] + expected[5:], "the others' tokens are unchanged"
    assert drive.scheduler.audit() == ""
    ledger = drive.scheduler.ledger()
    assert ledger.free + ledger.cached == ledger.total


@pytest.mark.usefixtures("quiet")
def test_the_failure_of_a_request_changes_no_recurrent_state_of_another_request() -> None:
    """The step of the failed request runs again, and reads the same states again. The next step was launched earlier.
    It must not overwrite these states."""
    layers = (LayerSpec(DeltaSpec(1, 2, 4, 8, 3), MlpSpec(20)), LayerSpec(AttentionSpec(4, 2, 16), MlpSpec(20)))
    model = random_decoder(replace(CONFIG, layers=layers), torch.float32, CPU, deviation=0.3)
    limits, found = StepLimits(12, long_prefill_token_threshold=8, max_num_partial_prefills=2), []
    for fails in (False, True):
        node = Node(model, limits, 5, 4)
        node.runner.ahead = True
        long = Request("long", list(range(40)), 40, 4, sampling=GREEDY)
        short = Request("short", [1, 2, 3], 3, 1, sampling=SamplingParams())
        if fails:
            break_draw(short)
        drive = Drive(node.scheduler, node.runner, {0: [("add", long)], 1: [("add", short)]})
        drive.run()
        assert (drive.failure, drive.errors) == (None, ["internal"] * fails)
        found.append(long.tokens)
    assert found[0] == found[1]
