"""What the engine's thread keeps of requests lasts no longer than they do."""

from engine.records import Recorder
from engine.runner import Output
from engine.teller import Progress, Teller
from scheduler.request import Request, Step
from scheduler.scheduler import Event, Limits, Scheduler
from shared.messages import Delta, Sampling


class Ear:
    """Hears nothing: what is handed over waits in an event loop that does not come to it."""

    def landing(self, request: Request) -> None: ...

    def admitted(self, identity: str) -> None: ...

    def told(self, deltas: list[Delta], progress: list[Progress], told_ns: int) -> None: ...

    def give_up(self, identity: str, reason: str, retry: bool) -> None: ...

    def ended(self, error: BaseException) -> None: ...


def scored(scheduler: Scheduler, tokens: int) -> tuple[Request, Step, Event]:
    """A prompt of which a step has just computed all."""
    request = Request("r", [5] * tokens, tokens, 1, every_logit=True, payload=Sampling(temperature=0.0))
    scheduler.add(request)
    return request, scheduler.schedule(), Event(request, 0, None, None)


async def test_prompt_logprobs_are_told_once_a_request_and_forgotten_with_it() -> None:
    scheduler = Scheduler(Limits(), 9, 4)
    teller = Teller(scheduler, Recorder(), Ear())
    first, step, event = scored(scheduler, 8)
    for expected in ([0.1, 0.2], []):  # the second time as after a preemption
        output = Output(None, prompt_logprobs=[0.1, 0.2])
        teller.step(step, [event], [output])
        assert output.prompt_logprobs == expected
        teller.turn(scheduler)
    scheduler.abort(first)
    _, step, event = scored(scheduler, 8)
    output = Output(None, prompt_logprobs=[0.3, 0.4])
    teller.step(step, [event], [output])
    assert output.prompt_logprobs == [0.3, 0.4], "another request of that name"
    scheduler.abort(event.request)
    teller.turn(scheduler)
    assert not teller._scored, "the step was told when the request was gone"
