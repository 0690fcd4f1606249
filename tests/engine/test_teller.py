"""What the engine's thread keeps of requests lasts no longer than they do."""

from engine.runner import SliceOutput
from node.output_publisher import OutputPublisher, PrefillProgress
from node.recorder import StepRecorder
from scheduler.request import Request, Step
from scheduler.scheduler import Scheduler, StepLimits, StepOutput
from shared.rpc.messages import SamplingParams, TokenDelta


class Ear:
    """Hears nothing: what is handed over waits in an event loop that does not come to it."""

    def on_receiving(self, request: Request) -> None: ...

    def on_admitted(self, identity: str) -> None: ...

    def on_outputs(self, deltas: list[TokenDelta], progress: list[PrefillProgress], told_ns: int) -> None: ...

    def fail(self, identity: str, reason: str, retry: bool) -> None: ...

    def on_engine_failed(self, error: BaseException) -> None: ...


def scored(scheduler: Scheduler, tokens: int) -> tuple[Request, Step, StepOutput]:
    """A prompt of which a step has just computed all."""
    request = Request(
        "r", [5] * tokens, tokens, 1, needs_prompt_logprobs=True, sampling=SamplingParams(temperature=0.0)
    )
    scheduler.add(request)
    return request, scheduler.schedule(), StepOutput(request, 0, None, None)


async def test_prompt_logprobs_are_told_once_a_request_and_forgotten_with_it() -> None:
    scheduler = Scheduler(StepLimits(), 9, 4)
    teller = OutputPublisher(scheduler, StepRecorder(), Ear())
    first, step, event = scored(scheduler, 8)
    for expected in ([0.1, 0.2], []):  # the second time as after a preemption
        output = SliceOutput(None, prompt_logprobs=[0.1, 0.2])
        teller.on_step(step, [event], [output])
        assert output.prompt_logprobs == expected
        teller.on_turn(scheduler)
    scheduler.abort(first)
    _, step, event = scored(scheduler, 8)
    output = SliceOutput(None, prompt_logprobs=[0.3, 0.4])
    teller.on_step(step, [event], [output])
    assert output.prompt_logprobs == [0.3, 0.4], "another request of that name"
    scheduler.abort(event.request)
    teller.on_turn(scheduler)
    assert not teller._scored, "the step was told when the request was gone"
