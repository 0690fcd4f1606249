"""One request's journey, top to bottom: place it, send it, stream what comes back, go on elsewhere when a node dies.

The router owns the request: the prompt and the tokens so far are here, so any node may be lost at any moment.
"""

import asyncio
import logging
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial

from router.attempt import Attempt, Lost, Sample
from router.fleet import Fleet
from router.generation import Generation, Piece
from router.link import Link
from router.records import Records
from scheduler.placement import Placement
from shared.errors import Rejected, Unavailable
from shared.messages import Submit, pack_ids
from shared.serve import Tasks

log = logging.getLogger("baton.dispatch")
WAIT_NEW_S = 1.0  # for a node, before a new request is turned away
WAIT_UNDER_WAY_S = 30.0  # for a node, before a request that already runs is given up
RETRY_PAUSE_S = 0.05  # times the attempts so far
MAX_RETRY_AFTER_S = 60.0
SEED_STEP = 0x9E3779B97F4A7C15  # spreads the seeds of samples (the golden ratio, as in splitmix64)


@dataclass(slots=True)
class Counts:
    """Requests by how they ended; one sample is one request here."""

    running: int = 0
    total: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0  # their first token was predicted too late
    moved: int = 0  # attempts that went on elsewhere


@dataclass(frozen=True, slots=True)
class Rules:
    """`disaggregate`: see `scheduler.placement.place`. `ttft_slo_s`: a request whose first token is predicted later
    is refused; 0: none is."""

    max_attempts: int = 5
    disaggregate: str = "auto"
    ttft_slo_s: float = 0.0


class Refused(Unavailable):
    """Its first token would come later than the SLO allows."""


class Dispatch:
    def __init__(self, fleet: Fleet, model: str, rules: Rules, records: Records) -> None:
        self._fleet = fleet
        self._model = model
        self._rules = rules
        self._records = records
        self._counts = Counts()
        self._placements: dict[str, int] = {}  # reason -> how many

    async def submit(self, generation: Generation) -> "Run":
        """Raises Unavailable when no node takes requests."""
        await self._some_node(WAIT_NEW_S)
        return Run(self, generation)

    def ready(self) -> bool:
        return any(self._fleet.usable())

    def status(self) -> dict[str, object]:
        counts = self._counts
        requests = {name: getattr(counts, name) for name in Counts.__dataclass_fields__}
        return {
            "model": self._model,
            "router": self._fleet.router,
            **self._fleet.status(),
            "requests": requests,
            "placements": dict(self._placements),
        }

    async def _some_node(self, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                while not self.ready():
                    await self._fleet.change()
        except TimeoutError:
            raise Unavailable("No node of this cluster takes requests right now.", retry_after_s=2.0) from None

    # ---- one sample ---------------------------------------------------------------------------------------------

    async def carry(self, run: "Run", sample: Sample) -> None:
        """Attempts until the sample is finished. Raises Unavailable or Rejected."""
        counts = self._counts
        counts.total += 1
        counts.running += 1
        ended = ""
        try:
            avoid: set[str] = set()
            number = failures = 0
            while failures < self._rules.max_attempts:
                await self._some_node(WAIT_UNDER_WAY_S)
                told = len(sample.tokens)
                is_new = number == 0 and sample.index == 0
                attempt = Attempt(sample, f"{run.generation.id}.{sample.index}.{number}", is_new)
                try:
                    self._start(run, attempt, avoid)
                    await attempt.over
                    return
                except Lost as lost:
                    # A node that lives, and moves what it has begun, has done its part: not so one that died of it.
                    failures += not (lost.is_moved and len(sample.tokens) > told)
                    counts.moved += 1
                    self._records.moved(attempt.id, str(lost))
                    avoid.add(lost.node)
                    if str(lost).startswith("handoff: ") and attempt.decode is not None:
                        avoid.add(attempt.decode.info.id)  # which of the two is at fault is not known
                    await asyncio.sleep(RETRY_PAUSE_S * min(number, self._rules.max_attempts))
                    log.warning("request %s goes on elsewhere: %s", attempt.id, lost)
                finally:
                    self._end(attempt)
                number += 1
            raise Unavailable(f"The request was given up after {self._rules.max_attempts} attempts.")
        except (Unavailable, Rejected) as error:
            ended = "refused" if isinstance(error, Refused) else "failed"
            raise
        finally:
            counts.running -= 1
            ended = ended or ("finished" if sample.is_finished or sample.is_enough else "cancelled")
            setattr(counts, ended, getattr(counts, ended) + 1)

    def _start(self, run: "Run", attempt: Attempt, avoid: set[str]) -> None:
        """Places the attempt and sends it. Sent to P, it names D; sent to D alone, it names nobody."""
        generation, sample = run.generation, attempt.sample
        tokens = generation.prompt + sample.tokens
        row = array("i", tokens)  # as it is hashed, and as it is sent
        prefill, decode = self._place(run, attempt, row, avoid)
        attempt.prefill, attempt.decode = prefill, decode
        submit = Submit(
            attempt.id,
            self._fleet.router,
            row.tobytes(),
            len(generation.prompt),
            generation.max_tokens,
            replace(generation.sampling, seed=(generation.sampling.seed + sample.index * SEED_STEP) % 2**63),
            generation.min_tokens,
            pack_ids(sorted(generation.stop_tokens)),
            generation.salt,
            generation.priority,
            decode.info.address if prefill is not None else "",
            generation.share_prefix,
            generation.traceparent,
        )
        if sample.index or sample.tokens:  # told once
            submit.sampling.prompt_logprobs = None
        attempt.charge(len(tokens), generation.max_tokens - len(sample.tokens))
        if prefill is not None:
            decode.listen(attempt.id, attempt)
            prefill.submit(submit, attempt)
        else:
            decode.submit(submit, attempt)

    def _place(self, run: "Run", attempt: Attempt, row: "array[int]", avoid: set[str]) -> tuple[Link | None, Link]:
        sibling = run.home
        if attempt.sample.index and sibling in self._fleet.usable()[1] and sibling.info.id not in avoid:
            self._note(attempt, Placement(None, sibling.info.id, "sibling"))
            return None, sibling  # the prompt's KV is there already
        proposal = self._fleet.place(attempt.id, row, run.generation.salt, avoid, self._rules.disaggregate)
        if proposal is None:
            raise Lost("no node is left", "")
        found = proposal.placement
        if attempt.is_new:
            self._admit(found)
        self._note(attempt, found)
        self._fleet.prefixes.record(proposal.hashes, *filter(None, (found.prefill, found.decode)))
        attempt.cached_tokens = proposal.cached_tokens
        return (None if found.prefill is None else self._fleet.link(found.prefill)), self._fleet.link(found.decode)

    def _admit(self, found: Placement) -> None:
        """Raises Refused when the first token is predicted later than the SLO. Without a prediction all may come, and
        with one that is stale one may: else a node once taken for too slow would refuse everybody for ever."""
        slo_s, estimate = self._rules.ttft_slo_s, found.estimate
        if not slo_s or estimate is None or estimate.first_token_s <= slo_s:
            return
        if self._fleet.link(found.prefill or found.decode).is_stale:
            return
        late_s = min(estimate.first_token_s - slo_s, MAX_RETRY_AFTER_S)
        raise Refused(
            f"The first token is predicted in {estimate.first_token_s * 1000:.0f} ms, later than the "
            f"{slo_s * 1000:.0f} ms that this cluster promises; try again later.",
            retry_after_s=late_s,
            status=429,
        )

    def _note(self, attempt: Attempt, found: Placement) -> None:
        self._placements[found.reason] = self._placements.get(found.reason, 0) + 1
        local_s, remote_s = (
            estimate.ready_s if estimate is not None and estimate.keeps_tbt else 0.0
            for estimate in (found.local, found.remote)
        )
        self._records.placed(attempt.id, found.prefill, found.decode, found.reason, local_s, remote_s)

    @staticmethod
    def _end(attempt: Attempt) -> None:
        """Nothing of the attempt goes on anywhere."""
        attempt.uncharge()
        for link in (attempt.prefill, attempt.decode):
            if link is None:
                continue
            if attempt.sample.is_finished:
                link.forget(attempt.id)
            else:
                link.abort(attempt.id)


class Run:
    """All samples of one generation: the rim's `Answers`."""

    def __init__(self, dispatch: Dispatch, generation: Generation) -> None:
        self.generation = generation
        self.home: Link | None = None  # the decode node that has the prompt's KV
        self._dispatch = dispatch
        self._pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self._tasks = Tasks()
        self._at_home = asyncio.Event()
        self._samples = [Sample(index, self) for index in range(generation.n)]
        self._running = {sample.index: self._tasks.start(self._carry(sample)) for sample in self._samples}
        for index, task in self._running.items():  # not by the task itself: one cancelled at once never begins
            task.add_done_callback(partial(self._ended, index))

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        if not self._running and self._pieces.empty():
            raise StopAsyncIteration
        piece = await self._pieces.get()
        if isinstance(piece, StopAsyncIteration):
            raise StopAsyncIteration
        if isinstance(piece, Exception):
            await self.close()
            raise piece
        return piece

    def cancel(self, index: int) -> None:
        task = self._running.get(index)
        if task is not None:
            self._samples[index].is_enough = True
            task.cancel()

    async def close(self) -> None:
        await self._tasks.close()

    def tell(self, piece: Piece) -> None:
        self._pieces.put_nowait(piece)

    def settle(self, home: Link | None) -> None:
        """The first sample's prompt is computed: the others may start, where its KV is."""
        self.home = home
        self._at_home.set()

    def _ended(self, index: int, _: asyncio.Task[None]) -> None:
        if index == 0:
            self._at_home.set()
        del self._running[index]
        if not self._running:
            self._pieces.put_nowait(StopAsyncIteration())

    async def _carry(self, sample: Sample) -> None:
        try:
            if sample.index:
                await self._at_home.wait()
            await self._dispatch.carry(self, sample)
        except (Unavailable, Rejected) as error:
            self._pieces.put_nowait(error)
