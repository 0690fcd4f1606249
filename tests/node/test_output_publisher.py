"""The output publisher: its state of a request does not outlive the request."""

from engine.runner import SliceOutput
from node.output_publisher import OutputPublisher
from node.recorder import StepRecorder
from scheduler.request import Request, Step
from scheduler.scheduler import Scheduler, StepLimits, StepOutput
from shared.rpc.messages import SamplingParams


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
    publisher.subscribe(*[lambda *_: None] * 4)
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
