"""Faults inside an engine: slow steps, and requests whose code raises or whose logits are NaN."""

import time
from collections.abc import Callable
from functools import cache
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

import engine.runner
import scheduler.scheduler
from engine.engine import Engine
from engine.models.decoder import Decoder
from engine.runner import SliceOutput
from engine.step_time_fit import FIRST_S, StepDeadline
from scheduler.cost import StepWork
from scheduler.request import Request, Step
from shared.rpc.messages import SamplingParams
from tests.engine.build import CPU, torch_runner
from tests.engine.drive import (
    BLOCK_TOKENS,
    Ahead,
    Drive,
    answers,
    expected_of,
    model_fixture,  # noqa: F401
    runner_of,
    scheduler_of,
    workload,
)
from tests.node.harness import quiet  # noqa: F401 - a fixture


def step_of(tokens: int, predicted_s: float = 0.0) -> Step:
    return Step(0, [], [], work=StepWork(1, tokens), predicted_s=predicted_s)


def test_the_deadline_of_a_step_follows_earlier_steps_and_has_a_minimum() -> None:
    deadline = StepDeadline(5.0)
    assert deadline.seconds(step_of(512)) == FIRST_S, "no step was observed"
    deadline.observe(1, 0.08)  # a decode on a laptop
    assert deadline.seconds(step_of(1)) == 5.0
    assert deadline.seconds(step_of(512)) == pytest.approx(10 * 512 * 0.08), "its first chunk may take 20 s"
    deadline.observe(512, 15.0)
    assert deadline.seconds(step_of(512)) == pytest.approx(150.0)
    deadline.observe(64, 0.01)
    assert deadline.seconds(step_of(512)) == 5.0
    assert deadline.seconds(step_of(512, predicted_s=2.0)) == 20.0, "the step-time model counts, too"


def test_an_idle_engine_makes_progress_more_often_than_its_deadline() -> None:
    idle = Engine(scheduler_of(8), cast(Any, None), MagicMock(), stuck_s=0.4)
    idle.start()
    before = idle.progress
    time.sleep(0.4)
    assert idle.progress > before + 1
    idle.stop()


# ---- faults of one request -----------------------------------------------------------------------------------------

VICTIM = "r4"


def raising_for(function: Callable[..., Any], is_victims: Callable[..., bool]) -> Callable[..., Any]:
    def call(*given: Any, **more: Any) -> Any:
        if is_victims(*given):
            raise ValueError("planted")
        return function(*given, **more)

    return call


def marked(sampling: SamplingParams) -> SamplingParams:
    """Return sampling parameters for the victim that make a draw run every branch."""
    return SamplingParams(
        seed=77,
        temperature=0.9,
        top_p=0.9,
        logprobs=13,
        logit_bias={7: 1.0},
        frequency_penalty=0.5,
        prompt_logprobs=sampling.prompt_logprobs,
    )


HOOKS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "row": (engine.runner, "row_of", lambda piece: piece.request.id == VICTIM),
    "prompt logprobs": (engine.runner, "describe", lambda _logits, _tokens, tops: 12 in tops),
    "update": (scheduler.scheduler, "extend_hashes", lambda _h, tokens, *_: tokens[:1] == [60] and len(tokens) > 14),
    "end": (Request, "finish_reason", lambda request: request.id == VICTIM),
}


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_request_whose_code_raises_fails_alone(
    model: Decoder,
    hook: str,
    ahead: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = expected_once(model)
    rows = workload(8)
    victim = rows[4]
    victim.tokens[:] = [60, *range(1, 13)]
    victim.num_prompt, victim.max_tokens, victim.stop_tokens = 13, 9, frozenset()
    victim.sampling = marked(victim.sampling)
    if hook == "prompt logprobs":
        victim.sampling.prompt_logprobs, victim.needs_prompt_logprobs = 12, True
    owner, name, is_victims = HOOKS[hook]
    runner = runner_of(model, 200)
    runner.ahead = ahead
    drive = Drive(scheduler_of(200), runner, {0: [("add", row) for row in rows]})
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, raising_for(getattr(owner, name), is_victims))
        drive.run()
    assert drive.death is None
    assert victim.finish == "error"
    assert answers(rows[:4] + rows[5:]) == expected[:4] + expected[5:], "the others' tokens are unchanged"
    assert drive.scheduler.audit() == ""
    ledger = drive.scheduler.ledger()
    assert ledger.free + ledger.cached == ledger.total


@cache
def expected_once(model: Decoder) -> list[tuple[list[int], str | None]]:
    return expected_of(model, 8)


class Broken(Ahead):
    """A runner that makes the victim's logits NaN."""

    def _pass(self, step: Step, batch: Any) -> list[SliceOutput]:
        places = [at for at, index in enumerate(batch.sampled) if step.slices[index].request.id == VICTIM]
        plain, self._model = self._model, _WithNan(self._model, places)
        try:
            return super()._pass(step, batch)
        finally:
            self._model = plain


class _WithNan:
    def __init__(self, inner: Decoder, places: list[int]) -> None:
        self._inner, self._places = inner, places
        self.forward, self.config = inner.forward, inner.config

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._inner.logits(hidden).clone()
        logits[self._places] = torch.nan
        return logits


@pytest.mark.parametrize("ahead", [False, True])
def test_nan_logits_end_their_request_alone(model: Decoder, ahead: bool) -> None:
    expected = expected_once(model)
    rows = workload(8)
    plain, pool, _ = torch_runner(model, 200, BLOCK_TOKENS)
    runner = Broken(model, pool, plain._backend, plain._kernels, CPU)
    runner.ahead = ahead
    drive = Drive(scheduler_of(200), runner, {0: [("add", row) for row in rows]})
    drive.run()
    assert drive.errors == ["numerical"]
    assert answers(rows[:4] + rows[5:]) == expected[:4] + expected[5:]
    assert drive.scheduler.audit() == ""
