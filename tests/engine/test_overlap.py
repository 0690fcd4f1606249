"""A step is decided and launched while the one before runs: nobody's tokens change, no block is lost, and a failing
step still takes down only its culprit."""

import threading
from collections.abc import Sequence
from functools import partial
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from engine.batch import Batch, build
from engine.engine import Engine, EngineListener
from engine.hash_model import HashRunner
from engine.models.decoder import Decoder, load_model
from engine.runner import PendingStep, SliceOutput, TorchRunner, leads, set_ahead
from node.recorder import StepTiming
from scheduler.policy import POLICIES
from scheduler.request import Request, RequestState, Slice, Step
from scheduler.scheduler import Scheduler, StepLimits, StepOutput
from shared.rpc.messages import SamplingParams
from tests.engine.build import CPU, GREEDY, Blocks, torch_runner

torch.set_num_threads(1)
VOCABULARY, BLOCK_TOKENS = 61, 4
SAMPLINGS = [
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, top_p=0.9, logprobs=2),
    SamplingParams(seed=3, top_k=8, frequency_penalty=0.6),  # its draws read its tokens
    SamplingParams(temperature=0.0, logit_bias={7: 4.0}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    where = tmp_path_factory.mktemp("model")
    torch.manual_seed(5)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(
        LlamaConfig(**shape, num_key_value_heads=1, vocab_size=VOCABULARY, initializer_range=0.4)
    ).save_pretrained(where)
    return load_model(where, torch.float32, CPU)


class Ahead(TorchRunner):
    """Notes which steps were launched behind a pending one; fails as it is told to."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        self.ahead = True
        self.carried = self.behind = self.passes = 0
        self.fails_at: set[int] = set()  # passes over several slices, once
        self.dies_after = 10**9  # passes
        self.poison = ""  # a request with which no pass succeeds

    def launch(self, step: Step, before: Step | None = None) -> PendingStep:
        self.behind += before is not None
        return super().launch(step, before)

    def _pass(self, step: Step, batch: Batch) -> list[SliceOutput]:
        self.carried += len(batch.carried)
        self.passes += 1
        once = self.passes in self.fails_at and len(step.slices) > 1
        poisoned = any(piece.request.id == self.poison for piece in step.slices)
        if once or poisoned or self.passes > self.dies_after:
            self._carry(batch)  # a pass that fails has begun
            raise RuntimeError("the device failed")
        return super()._pass(step, batch)


class Drive(EngineListener):
    """An engine that is fed by its own steps: what comes when is a matter of their number, not of time."""

    def __init__(self, scheduler: Scheduler, runner: TorchRunner, todo: dict[int, list[tuple[str, Request]]]) -> None:
        self.engine = Engine(scheduler, runner, self)
        self.scheduler = scheduler
        self.todo = dict(sorted(todo.items()))
        self.steps = 0
        self.rans: list[StepTiming] = []
        self.errors: list[str] = []
        self.left = sum(kind == "add" for items in todo.values() for kind, _ in items)
        self.over = threading.Event()
        self.death: BaseException | None = None

    def run(self) -> None:
        self.engine.start()
        assert self.over.wait(30), "it hangs"
        self.engine.stop()
        assert not self.engine._thread.is_alive()

    def _feed(self) -> None:
        """What is due; with nobody here, what comes next."""
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

    def on_ran(self, ran: StepTiming) -> None:
        self.rans.append(ran)

    def on_failure(self, error: BaseException) -> None:
        self.death = error
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
                sampling=SAMPLINGS[rng.randrange(5 if seed % 2 else 3)],  # every other load has nobody with penalties
            )
        )
    return rows


def driven(model: Decoder, rows: list[Request], seed: int, num_blocks: int, *, ahead: bool, aborts: bool) -> Drive:
    """Arrivals and aborts at steps that the seed says."""
    rng = Random(seed)
    todo: dict[int, list[tuple[str, Request]]] = {}
    for row in rows:
        at = rng.randrange(30)
        todo.setdefault(at, []).append(("add", row))
        if aborts and rng.random() < 0.4:
            todo.setdefault(at + rng.randrange(1, 12), []).append(("abort", row))
    drive = Drive(scheduler_of(num_blocks, rng.choice([6, 16, 64])), runner_of(model, num_blocks), todo)
    drive.engine._runner.ahead = ahead
    drive.run()
    assert drive.death is None
    ledger = drive.scheduler.ledger()
    assert (ledger.owned, ledger.reserved, ledger.free + ledger.cached) == (0, 0, ledger.total)
    assert not drive.scheduler.requests
    return drive


def scheduler_of(num_blocks: int, budget: int = 64) -> Scheduler:
    return Scheduler(StepLimits(max_num_batched_tokens=budget), num_blocks, BLOCK_TOKENS, POLICIES["stall_free"])


def runner_of(model: Decoder, num_blocks: int) -> Ahead:
    plain, pool, _ = torch_runner(model, num_blocks, BLOCK_TOKENS)
    return Ahead(model, pool, plain._backend, plain._kernels, CPU)


def answers(rows: Sequence[Request]) -> list[tuple[list[int], str | None]]:
    return [(row.tokens[row.num_prompt :], row.finish) for row in rows]


def expected_of(model: Decoder, seed: int) -> list[tuple[list[int], str | None]]:
    rows = workload(seed)
    driven(model, rows, seed, 200, ahead=False, aborts=False)
    return answers(rows)


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), tight=st.booleans(), aborts=st.booleans())
def test_tokens_are_the_same_with_and_without_overlap(model: Decoder, seed: int, tight: bool, aborts: bool) -> None:
    """A tight pool holds one request and a half, so that running ones are preempted with a step in flight."""
    expected = expected_of(model, seed)
    for ahead in (False, True):
        rows = workload(seed)
        drive = driven(model, rows, seed, 18 if tight else 200, ahead=ahead, aborts=aborts)
        for row, (tokens, finish) in zip(rows, expected, strict=True):
            found = row.tokens[row.num_prompt :]
            assert found == tokens[: len(found)]
            assert row.finish == finish if len(found) == len(tokens) else aborts
        assert len(drive.rans) == drive.steps
        starts = [ran.start_ns for ran in drive.rans]
        assert starts == sorted(starts)
        assert all(ran.device_ns >= 0 <= ran.host_ns for ran in drive.rans)


def test_steps_are_launched_behind_pending_ones_and_their_tokens_carried(model: Decoder) -> None:
    rows = [Request(f"r{index}", [index, 2, 3], 3, 12, sampling=GREEDY) for index in range(3)]
    drive = driven(model, rows, 1, 200, ahead=True, aborts=False)
    runner = drive.engine._runner
    assert isinstance(runner, Ahead)
    assert runner.behind > 10
    assert runner.carried > 25
    assert drive.scheduler.counters.generated_tokens == 36


def test_a_tight_pool_really_preempts_with_a_step_in_flight(model: Decoder) -> None:
    rows = workload(4)
    for row in rows:
        row.stop_tokens, row.max_tokens = frozenset(), 30
    drive = driven(model, rows, 4, 18, ahead=True, aborts=False)
    assert drive.scheduler.counters.preemptions > 0


def test_a_step_with_penalties_leads_no_other(model: Decoder) -> None:
    rows = [Request("r", [1, 2, 3], 3, 12, sampling=SAMPLINGS[3])]
    drive = driven(model, rows, 1, 200, ahead=True, aborts=False)
    runner = drive.engine._runner
    assert isinstance(runner, Ahead)
    assert runner.behind == 0
    request = rows[0]
    assert leads(Step(0, [Slice(request, 0, 2, False, 0)], []))
    assert not leads(Step(0, [Slice(request, 0, 3, True, 0)], []))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("fails_at", [{1}, {7}, {8, 9}, {5, 12, 20}])
def test_a_step_that_fails_once_costs_nobody_anything(model: Decoder, ahead: bool, fails_at: set[int]) -> None:
    expected = expected_of(model, 6)
    rows = workload(6)
    runner = runner_of(model, 18)
    runner.ahead, runner.fails_at = ahead, fails_at
    drive = Drive(scheduler_of(18), runner, {0: [("add", row) for row in rows]})
    drive.run()
    assert drive.death is None
    assert answers(rows) == expected
    assert runner.passes > max(fails_at)
    assert not drive.errors


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_that_fails_every_pass_fails_alone(model: Decoder, ahead: bool) -> None:
    expected = expected_of(model, 8)
    rows = workload(8)
    runner = runner_of(model, 200)
    runner.ahead, runner.poison = ahead, "r4"
    drive = Drive(scheduler_of(200), runner, {0: [("add", row) for row in rows]})
    drive.run()
    assert drive.death is None
    assert drive.errors == ["internal"]
    assert [found for found in answers(rows) if found[1] != "error"] == expected[:4] + expected[5:]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_device_on_which_every_pass_fails_is_the_engines_death(
    model: Decoder, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    rows = [Request(f"r{index}", [1, 2, index], 3, 12, sampling=GREEDY) for index in range(6)]
    runner = runner_of(model, 200)
    runner.ahead, runner.dies_after = ahead, 2
    drive = Drive(scheduler_of(200), runner, {2 * at: [("add", row)] for at, row in enumerate(rows)})
    drive.run()
    assert "the device fails with any work" in str(drive.death)
    assert not drive.errors, "nobody is told to have failed: all go on elsewhere"


def test_a_request_that_leaves_is_not_scheduled_beyond_its_first_token(model: Decoder) -> None:
    rows = [Request(f"r{index}", [index, 2, 3], 3, 12, sampling=GREEDY) for index in range(2)]
    rows[0].send_kv = True
    runner = runner_of(model, 200)
    drive = Drive(scheduler_of(200), runner, {0: [("add", row) for row in rows]})
    drive.left = 1
    drive.run()
    assert rows[0].state is RequestState.SENDING_KV
    assert (rows[0].num_scheduled, rows[0].num_generated) == (3, 1)


def test_a_batch_says_which_draws_of_the_pending_step_its_tokens_are() -> None:
    blocks = Blocks(64, 4)
    first, second, chunk = (blocks.request([5, 6, 7, index], GREEDY) for index in range(3))
    before = [Slice(chunk, 0, 2, False, 0), Slice(first, 3, 1, True, 0), Slice(second, 3, 1, True, 0)]
    after = [Slice(second, 4, 1, True, 0), Slice(chunk, 2, 2, True, 0), Slice(first, 4, 1, True, 0)]
    batch = build(after, 4, CPU, before)
    assert batch.carried == [(0, 1), (3, 0)]
    assert batch.tokens.tolist() == [0, 7, 2, 0]
    assert batch.positions.tolist() == [4, 2, 3, 4]
    with pytest.raises(ValueError, match="no tokens or no blocks"):
        build(after, 4, CPU, before[:2])


def test_async_scheduling_is_as_the_user_says_where_the_runner_can(model: Decoder) -> None:
    runner, _, _ = torch_runner(model)
    for mode, ahead in (("on", True), ("auto", True), ("off", False), ("auto", False)):
        set_ahead(runner, mode)
        assert runner.ahead is ahead
    hashing = HashRunner(torch.zeros(4, 1024, dtype=torch.uint8).numpy(), 4, 2, 100)
    set_ahead(hashing, "off")
    with pytest.raises(ValueError, match="--async-scheduling on"):
        set_ahead(hashing, "on")
