"""Random workloads for the CUDA runner, driven step by step on any device."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from engine.cuda.staging import StepCapacity
from engine.runner import PendingStep, Runner, SliceOutput, leads
from scheduler.request import Request, Slice, Step
from shared.rpc.messages import SamplingParams
from tests.engine.build import GREEDY, VOCABULARY, Blocks, States
from tests.engine.grammars import ENDLESS, matcher_of

NUM_BLOCKS, BLOCK_TOKENS = 240, 4

CAPACITY = StepCapacity(slices=9, tokens=40, blocks=16, block_tokens=BLOCK_TOKENS, tables=2)

SAMPLINGS = [
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, top_p=0.9),
    SamplingParams(seed=3, top_k=8, min_p=0.01, presence_penalty=0.4, frequency_penalty=0.2),
    replace(GREEDY, repetition_penalty=1.2, logit_bias={5: 3.0}),
    replace(GREEDY, logprobs=2),
    replace(GREEDY, prompt_logprobs=1),
]

SEEDS = range(3)


def requests_of(blocks: Blocks, seed: int, samplings: Sequence[SamplingParams] = SAMPLINGS) -> list[Request]:
    """Return a request for each of `samplings`. The first three have a grammar that no finite text completes."""
    random = Random(seed)
    requests = [
        blocks.request(
            [random.randrange(VOCABULARY) for _ in range(random.randrange(1, 45))],
            sampling,
            random.randrange(1, 18),
            needs_prompt_logprobs=sampling.prompt_logprobs is not None,
        )
        for sampling in samplings
    ]
    for request in requests[:3]:
        request.matcher = matcher_of(ENDLESS)
    return requests


def drive(
    runner: Runner, requests: Sequence[Request], seed: int, ahead: bool, states: States | None = None
) -> list[list[SliceOutput]]:
    """Run steps, each with random slices in random order, until the requests end. Return each request's outputs.

    With `ahead`, each step is launched before the previous one has ended. `states` are needed for recurrent layers.
    """
    random = Random(seed)
    outputs_of: dict[str, list[SliceOutput]] = {request.id: [] for request in requests}
    pending: tuple[Step, PendingStep] | None = None

    def finish(step: Step, of: PendingStep) -> None:
        for one, output in zip(step.slices, of(), strict=True):
            one.request.num_sampling -= one.samples
            outputs_of[one.request.id].append(output)
            one.request.tokens += output.tokens

    for number in range(1000):
        waits = pending is not None and not leads(pending[0])
        if pending is not None and (waits or not ahead):
            finish(*pending)
            pending = None
        slices, left = [], random.choice([3, 9, 40])
        for request in random.sample(list(requests), len(requests)):
            behind = min(left, request.num_tokens - request.num_scheduled)
            if behind > 0 and request.num_tokens - request.num_prompt < request.max_tokens:
                count = random.randrange(1, behind + 1)
                samples = request.num_scheduled + count == request.num_tokens
                slices.append(Slice(request, request.num_scheduled, count, samples, 0))
                request.num_scheduled += count
                request.num_sampling += samples
                left -= count
        before, pending = pending, None
        if states is not None:
            states.use(slices)
        if slices:
            step = Step(number, slices, [])
            pending = step, runner.launch(step, before[0] if before is not None else None)
        if before is not None:
            finish(*before)
        elif pending is None:
            return list(outputs_of.values())
    raise AssertionError("the requests did not end")


Answer = tuple[list[list[int]], list[list[float]]]  # the tokens of each request, and the logprobs of each request


def answer(requests: Sequence[Request], outputs: list[list[SliceOutput]]) -> Answer:
    assert not any(output.error for one in outputs for output in one)
    return [request.tokens for request in requests], [_logprobs(one) for one in outputs]


def _logprobs(outputs: list[SliceOutput]) -> list[float]:
    sampled = [entry.logprob for output in outputs for entry in output.logprobs]
    return sampled + [entry.logprob for output in outputs for entry in output.prompt_logprobs]
