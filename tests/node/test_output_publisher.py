"""What the output publisher keeps of requests on the engine's thread lasts no longer than they do."""

from engine.runner import SliceOutput
from node.output_publisher import OutputListener, OutputPublisher, PrefillProgress
from node.recorder import StepRecorder
from scheduler.request import Request, Step
from scheduler.scheduler import Scheduler, StepLimits, StepOutput
from shared.rpc.messages import SamplingParams, TokenDelta


class NoListener(OutputListener):
    """Is never called: the test does not return to the event loop."""

    def on_admitted(self, request: Request) -> None: ...

    def on_outputs(self, deltas: list[TokenDelta], progress: list[PrefillProgress], at_ns: int) -> None: ...

    def on_request_failed(self, request_id: str) -> None: ...

    def on_engine_failed(self, error: BaseException) -> None: ...


def scored(scheduler: Scheduler, tokens: int) -> tuple[Request, Step, StepOutput]:
    """Return a request, and a step that computed all of its prompt."""
    request = Request(
        "r", [5] * tokens, tokens, 1, needs_prompt_logprobs=True, sampling=SamplingParams(temperature=0.0)
    )
    scheduler.add(request)
    return request, scheduler.schedule(), StepOutput(request, 0, None, None)


async def test_prompt_logprobs_are_published_once_for_each_request() -> None:
    scheduler = Scheduler(StepLimits(), 9, 4)
    publisher = OutputPublisher(scheduler, StepRecorder())
    publisher.subscribe(NoListener())
    first, step, event = scored(scheduler, 8)
    for expected in ([0.1, 0.2], []):  # the second time as after a preemption
        output = SliceOutput(None, prompt_logprobs=[0.1, 0.2])
        publisher.on_step(step, [event], [output])
        assert output.prompt_logprobs == expected
        publisher.on_turn(scheduler)
    scheduler.abort(first)
    _, step, event = scored(scheduler, 8)
    output = SliceOutput(None, prompt_logprobs=[0.3, 0.4])
    publisher.on_step(step, [event], [output])
    assert output.prompt_logprobs == [0.3, 0.4], "another request with that id"
