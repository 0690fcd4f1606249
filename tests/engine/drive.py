"""Run an engine with a small torch model. Commands arrive at given steps, and steps may overlap."""

import threading
from collections.abc import Sequence
from functools import partial
from random import Random

import torch

from engine.engine import Engine, EngineListener
from engine.models.decoder import Decoder
from engine.models.kv_places import kv_places
from engine.runner import PendingStep, SliceOutput, TorchRunner
from engine.step_time_fit import StepTiming
from scheduler.policy import POLICIES
from scheduler.request import Request, RequestState, Step
from scheduler.scheduler import Scheduler, StepLimits, StepOutput
from shared.rpc.messages import SamplingParams
from tests.engine.build import CONFIG, CPU, GREEDY, VOCABULARY, device_code, torch_runner
from tests.engine.grammars import END_ID, GRAMMARS, matcher_of

torch.set_num_threads(1)
BLOCK_TOKENS = 4
SAMPLINGS = [
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, top_p=0.9, logprobs=2),
    SamplingParams(seed=3, top_k=8, frequency_penalty=0.6),  # the penalty depends on earlier tokens
    SamplingParams(temperature=0.0, logit_bias={7: 4.0}),
]


class Ahead(TorchRunner):
    """A runner that counts the steps that were launched while another step was pending. It makes chosen passes fail."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        self.ahead = True
        self.num_overlapped = self.passes = 0
        self.fails_at: set[int] = set()  # numbers of the passes that fail if their step has several slices
        self.fails_after = 10**9  # all passes after this number fail
        self.poison = ""  # id of a request whose passes all fail
        self.spoils = ""  # id of a request whose outputs have the error "numerical"

    def run(self, step: Step) -> list[SliceOutput]:
        if self._fails(step):
            raise RuntimeError("the device failed")
        return self._spoilt(step, super().run(step))

    def launch(self, step: Step, before: Step | None = None) -> PendingStep:
        if not self.ahead:
            return super().launch(step, before)  # calls `run`
        self.num_overlapped += before is not None
        fails, pending = self._fails(step), super().launch(step, before)

        def wait() -> list[SliceOutput]:
            outputs = pending()
            if fails:
                raise RuntimeError("the device failed")
            return self._spoilt(step, outputs)

        return wait

    def _fails(self, step: Step) -> bool:
        self.passes += 1
        once = self.passes in self.fails_at and len(step.slices) > 1
        return once or self.passes > self.fails_after or any(s.request.id == self.poison for s in step.slices)

    def _spoilt(self, step: Step, outputs: list[SliceOutput]) -> list[SliceOutput]:
        broken = SliceOutput(error="numerical")
        ids = [slice_.request.id for slice_ in step.slices]
        return [broken if id == self.spoils else output for id, output in zip(ids, outputs, strict=True)]


class Drive(EngineListener):
    """An engine whose commands are posted at given step numbers, so that a run does not depend on timing."""

    def __init__(self, scheduler: Scheduler, runner: TorchRunner, todo: dict[int, list[tuple[str, Request]]]) -> None:
        self.engine = Engine(scheduler, runner, self)
        self.runner = runner
        self.scheduler = scheduler
        self.todo = dict(sorted(todo.items()))  # commands by step number: ("add" or "abort", request)
        self.steps = 0
        self.timings: list[StepTiming] = []
        self.errors: list[str] = []
        self.left = sum(kind == "add" for items in todo.values() for kind, _ in items)
        self.over = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        self.engine.start()
        assert self.over.wait(120), "the engine hangs"
        self.engine.stop()
        assert not self.engine.is_running

    def _feed(self) -> None:
        """Post the commands that are due at this step. If no request is active, post the next commands at once."""
        idle = not self.scheduler.requests
        while self.todo and (idle or next(iter(self.todo)) <= self.steps):
            idle = False
            for kind, request in self.todo.pop(next(iter(self.todo))):
                self.engine.post(partial(self._abort if kind == "abort" else self._add, request))

    def _add(self, request: Request, scheduler: Scheduler) -> None:
        scheduler.add(request)

    def _abort(self, request: Request, scheduler: Scheduler) -> None:
        self.left -= request.state is not RequestState.DONE
        scheduler.abort(request)
        self._look()

    def _look(self) -> None:
        if not self.left:
            self.over.set()

    def on_turn(self, scheduler: Scheduler) -> None:
        assert scheduler.ledger().balances
        self._feed()

    def on_receiving(self, requests: list[Request]) -> None: ...

    def on_scheduled(self, step: Step) -> None: ...

    def on_step(self, step: Step, events: list[StepOutput], outputs: list[SliceOutput]) -> None:
        assert len(outputs) == len(step.slices)
        assert self.scheduler.ledger().balances
        self.steps += 1
        self.errors += [outputs[event.slice_index].error for event in events if event.finish == "error"]
        self.left -= sum(event.finish is not None for event in events)
        self._look()

    def on_timing(self, timing: StepTiming) -> None:
        self.timings.append(timing)

    def on_failure(self, error: BaseException) -> None:
        self.failure = error
        self.over.set()


def workload(seed: int) -> list[Request]:
    rng = Random(seed)
    stem = [rng.randrange(VOCABULARY) for _ in range(12)]
    rows = []
    for index in range(9):
        prompt = stem[: rng.choice([0, 12])] + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 14))]
        rows.append(
            Request(
                f"r{index}",
                prompt,
                len(prompt),
                rng.randrange(1, 14),
                min_tokens=rng.choice([0, 0, 4]),
                stop_tokens=frozenset(rng.sample(range(VOCABULARY), rng.choice([0, 8]))),
                needs_prompt_logprobs=rng.random() < 0.1,
                sampling=SAMPLINGS[rng.randrange(5 if seed % 2 else 3)],  # no penalties with an even seed
            )
        )
        if rng.random() < 0.3:
            rows[-1].matcher = matcher_of(rng.choice(GRAMMARS))
            rows[-1].stop_tokens = frozenset([END_ID])
    return rows


def driven(model: Decoder, rows: list[Request], seed: int, num_blocks: int, *, ahead: bool, aborts: bool) -> Drive:
    """Run the requests. The seed determines the steps at which they arrive and are aborted."""
    rng = Random(seed)
    todo: dict[int, list[tuple[str, Request]]] = {}
    for row in rows:
        at = rng.randrange(30)
        todo.setdefault(at, []).append(("add", row))
        if aborts and rng.random() < 0.4:
            todo.setdefault(at + rng.randrange(1, 12), []).append(("abort", row))
    drive = Drive(scheduler_of(num_blocks, rng.choice([6, 16, 64])), runner_of(model, num_blocks), todo)
    drive.runner.ahead = ahead
    drive.run()
    assert drive.failure is None
    ledger = drive.scheduler.ledger()
    assert (ledger.owned, ledger.reserved, ledger.free + ledger.cached) == (0, 0, ledger.total)
    assert not drive.scheduler.requests
    return drive


def scheduler_of(num_blocks: int, budget: int = 64) -> Scheduler:
    limits, groups = StepLimits(max_num_batched_tokens=budget), kv_places(CONFIG).groups
    return Scheduler(limits, 1 + (num_blocks - 1) * len(groups), BLOCK_TOKENS, POLICIES["stall_free"], groups=groups)


def runner_of(model: Decoder, num_blocks: int) -> Ahead:
    _, pool, _ = torch_runner(model, num_blocks, BLOCK_TOKENS)
    return Ahead(model, pool, *device_code(model, pool), CPU)


def answers(rows: Sequence[Request]) -> list[tuple[list[int], str | None]]:
    return [(row.tokens[row.num_prompt :], row.finish) for row in rows]


def expected_of(model: Decoder, seed: int) -> list[tuple[list[int], str | None]]:
    rows = workload(seed)
    driven(model, rows, seed, 200, ahead=False, aborts=False)
    return answers(rows)
