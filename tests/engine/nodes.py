"""Nodes with a scheduler and a torch runner, which run requests together, with or without a handoff of their KV."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from engine.models.decoder import Decoder
from engine.models.kv_places import kv_places
from engine.runner import TorchRunner
from engine.speculation import expanded, verified
from prefill_node.sender import OutgoingHandoff
from scheduler.drafters import Speculation, TextDrafter
from scheduler.geometry import Geometry
from scheduler.policy import STALL_FREE, Policy
from scheduler.request import Request, RequestState
from scheduler.scheduler import Scheduler, StepLimits
from shared.rpc.messages import Logprobs, SamplingParams, SubmitRequest
from tests.engine.build import CPU, VOCABULARY, device_code, layout_of, pool_of

SUBMIT = SubmitRequest("", "", b"", 0, 0, SamplingParams())
MAX_ITERATIONS = 5000


def requests_of(seed: int, shared: bool, samplings: Sequence[SamplingParams]) -> list[Request]:
    """Return a request with a random prompt for each sampling. With `shared`, all prompts have the same beginning."""
    rng = Random(seed)
    stem = [rng.randrange(VOCABULARY) for _ in range(16)]
    rows = []
    for index, sampling in enumerate(samplings):
        prompt = stem[: 16 * shared] + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 16))]
        rows.append(Request(f"r{index}", prompt, len(prompt), 12, sampling=sampling))
        rows[-1].needs_prompt_logprobs = sampling.prompt_logprobs is not None
    return rows


class Guesses(TextDrafter):
    """A drafter that knows the answers. Each token that it guesses is right with the probability `rightness`."""

    def __init__(self, seed: int, rightness: float, rows: Sequence[Sequence[int]]) -> None:
        """Each of `rows` is a prompt followed by its answer."""
        self._rng, self._rightness, self._rows = Random(seed), rightness, [list(row) for row in rows]

    def propose(self, request: Request, limit: int) -> list[int]:
        known = len(request.tokens)
        following = next((row[known:] for row in self._rows if row[:known] == request.tokens), [])
        return [
            token if self._rng.random() < self._rightness else self._rng.randrange(VOCABULARY)
            for token in following[:limit]
        ]


class Node:
    """A scheduler, a runner, and a pool whose unwritten memory is NaN. The pool has room for `num_requests` requests of
    `longest` tokens."""

    def __init__(
        self,
        model: Decoder,
        limits: StepLimits,
        num_requests: float,
        block_tokens: int,
        policy: Policy = STALL_FREE,
        speculation: Speculation | None = None,
        longest: int = 44,
    ) -> None:
        one = layout_of(model, 2, block_tokens)
        groups = kv_places(model.config, one.block_bytes).groups
        rows = Geometry(block_tokens, groups).rows_for(longest, min(longest, limits.max_num_batched_tokens))
        layout = replace(one, num_blocks=2 + int(num_requests * rows))
        self.scheduler = Scheduler(
            limits, layout.num_blocks, block_tokens, policy, groups=groups, state_interval=8, speculation=speculation
        )
        self.pool = pool_of(model, layout, kv_places(model.config, layout.block_bytes))
        self.runner = TorchRunner(model, self.pool, *device_code(model, self.pool), CPU)
        self.logprobs: dict[str, list[Logprobs]] = {}  # by request id

    def step(self) -> None:
        step = self.scheduler.schedule()
        if not step.slices:
            return
        outputs = verified(step.slices, self.runner.run(expanded(step)))
        for event in self.scheduler.update(step, [output.tokens for output in outputs]):
            entries = outputs[event.slice_index].logprobs[: len(event.tokens)]
            self.logprobs.setdefault(event.request.id, []).extend(entries)


def answers(rows: Sequence[Request]) -> list[list[int]]:
    assert all(row.state is RequestState.DONE for row in rows)
    return [row.tokens[row.num_prompt :] for row in rows]


def run_together(rows: Sequence[Request], here: Node, there: Node | None = None) -> list[list[int]]:
    """Run all requests on `here`. If `there` is given, compute the prompts on `there` and copy their KV to `here`."""
    pending: list[tuple[Request, Request]] = []
    for row in rows:
        if there is None:
            here.scheduler.add(row)
        else:
            sending = Request(row.id, list(row.tokens), row.num_prompt, row.max_tokens, row.min_tokens, row.stop_tokens)
            sending.sampling, sending.needs_prompt_logprobs = row.sampling, row.needs_prompt_logprobs
            sending.media, sending.images, row.images = row.media, row.images, None
            sending.send_kv = row.receive_kv = True
            there.scheduler.add(sending)
            here.scheduler.add(row)
            pending.append((sending, row))
    for _ in range(MAX_ITERATIONS):
        if there is not None:
            there.step()
        here.step()
        for pair in list(pending):
            sending, row = pair
            if sending.state is RequestState.SENDING_KV and row.state is RequestState.RECEIVING_KV:
                assert there is not None
                _hand_over(sending, row, there, here)
                pending.remove(pair)
            elif sending.state is RequestState.DONE:
                here.scheduler.abort(row)
                row.tokens, row.finish = sending.tokens, sending.finish
                pending.remove(pair)
        if all(row.state is RequestState.DONE for row in rows):
            break
    return answers(rows)


def _hand_over(sending: Request, row: Request, there: Node, here: Node) -> None:
    handoff = OutgoingHandoff(SUBMIT, sending, row.num_prompt, here.scheduler.geometry)
    handoff.grant(row.num_computed // here.scheduler.block_tokens, row.reserved)
    for source, target in zip(handoff.sources(len(row.reserved)), row.reserved, strict=True):
        here.pool.tensor[target] = there.pool.tensor[source]
    here.scheduler.kv_received(row, sending.tokens[-1])
    there.scheduler.release(sending)
