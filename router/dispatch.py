"""One request's journey, top to bottom: place it, send it, stream what comes back, go on elsewhere when a node dies.

The router owns the request: the prompt and the tokens so far are here, so any node may be lost at any moment.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial

from router.fleet import Fleet, Link
from router.generation import Generation, Piece
from scheduler.placement import Placement, place
from scheduler.prefix import block_hashes
from shared.errors import Rejected, Unavailable
from shared.messages import Delta, Logprobs, Submit, pack_ids, unpack_ids
from shared.serve import Tasks

log = logging.getLogger("baton.dispatch")
WAIT_NEW_S = 1.0  # for a node, before a new request is turned away
WAIT_UNDER_WAY_S = 30.0  # for a node, before a request that already runs is given up
RETRY_PAUSE_S = 0.05  # times the attempts so far
SEED_STEP = 0x9E3779B97F4A7C15  # spreads the seeds of samples (the golden ratio, as in splitmix64)


@dataclass(slots=True)
class Counts:
    """Requests by how they ended; one sample is one request here."""

    running: int = 0
    total: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    moved: int = 0  # attempts that went on elsewhere


class Dispatch:
    def __init__(self, fleet: Fleet, model: str, max_attempts: int) -> None:
        self._fleet = fleet
        self._model = model
        self._max_attempts = max_attempts
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

    async def carry(self, run: "Run", sample: "Sample") -> None:
        """Attempts until the sample is finished. Raises Unavailable or Rejected."""
        counts = self._counts
        counts.total += 1
        counts.running += 1
        ended = ""
        try:
            avoid: set[str] = set()
            for number in range(self._max_attempts):
                await self._some_node(WAIT_UNDER_WAY_S)
                attempt = Attempt(sample, f"{run.generation.id}.{sample.index}.{number}")
                try:
                    self._start(run, attempt, avoid)
                    await attempt.over
                    return
                except Lost as lost:
                    counts.moved += 1
                    avoid.add(lost.node)
                    if str(lost).startswith("handoff: ") and attempt.decode is not None:
                        avoid.add(attempt.decode.info.id)  # which of the two is at fault is not known
                    await asyncio.sleep(RETRY_PAUSE_S * number)
                    log.warning("request %s goes on elsewhere: %s", attempt.id, lost)
                finally:
                    self._end(attempt)
            raise Unavailable(f"The request was given up after {self._max_attempts} attempts.")
        except (Unavailable, Rejected):
            ended = "failed"
            raise
        finally:
            counts.running -= 1
            ended = ended or ("finished" if sample.is_finished or sample.is_enough else "cancelled")
            setattr(counts, ended, getattr(counts, ended) + 1)

    def _start(self, run: "Run", attempt: "Attempt", avoid: set[str]) -> None:
        """Places the attempt and sends it. Sent to P, it names D; sent to D alone, it names nobody."""
        generation, sample = run.generation, attempt.sample
        tokens = generation.prompt + sample.tokens
        prefill, decode = self._place(run, attempt, tokens, avoid)
        attempt.prefill, attempt.decode = prefill, decode
        submit = Submit(
            attempt.id,
            self._fleet.router,
            pack_ids(tokens),
            len(generation.prompt),
            generation.max_tokens,
            replace(generation.sampling, seed=(generation.sampling.seed + sample.index * SEED_STEP) % 2**63),
            generation.min_tokens,
            pack_ids(sorted(generation.stop_tokens)),
            generation.salt,
            generation.priority,
            decode.info.address if prefill is not None else "",
            generation.share_prefix,
        )
        if sample.index or sample.tokens:  # told once
            submit.sampling.prompt_logprobs = None
        attempt.charge(len(tokens), generation.max_tokens - len(sample.tokens))
        if prefill is not None:
            decode.listen(attempt.id, attempt)
            prefill.submit(submit, attempt)
        else:
            decode.submit(submit, attempt)

    def _place(self, run: "Run", attempt: "Attempt", tokens: list[int], avoid: set[str]) -> tuple[Link | None, Link]:
        prefill, decode = self._fleet.usable()
        sibling = run.home
        if attempt.sample.index and sibling in decode and sibling.info.id not in avoid:
            self._note("sibling")
            return None, sibling  # the prompt's KV is there already
        prefill = [link for link in prefill if link.info.id not in avoid]  # none left: the decode node alone
        decode = [link for link in decode if link.info.id not in avoid] or decode
        links = prefill + decode
        if not links:
            raise Lost("no node is left", "")
        hashes = block_hashes(tokens, links[0].info.block_tokens, run.generation.salt)
        overlap = self._fleet.prefixes.overlap(hashes)
        cached = {name: depth * links[0].info.block_tokens for name, depth in overlap.items()}
        found: Placement | None = place(
            attempt.id, len(tokens), [p.view() for p in prefill], [d.view() for d in decode], cached
        )
        assert found is not None
        self._note(found.reason)
        for name in (found.prefill, found.decode):
            if name is not None:
                self._fleet.prefixes.record(hashes, name)
        attempt.cached_tokens = cached.get(found.prefill or found.decode, 0)
        return (None if found.prefill is None else self._fleet.link(found.prefill)), self._fleet.link(found.decode)

    def _note(self, reason: str) -> None:
        self._placements[reason] = self._placements.get(reason, 0) + 1

    @staticmethod
    def _end(attempt: "Attempt") -> None:
        """Nothing of the attempt goes on anywhere."""
        attempt.uncharge()
        for link in (attempt.prefill, attempt.decode):
            if link is None:
                continue
            if attempt.sample.is_finished:
                link.forget(attempt.id)
            else:
                link.abort(attempt.id)


class Lost(Exception):
    """The attempt cannot go on; another may. `node` had better be avoided, "" if none."""

    def __init__(self, reason: str, node: str) -> None:
        super().__init__(reason)
        self.node = node


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

    async def _carry(self, sample: "Sample") -> None:
        try:
            if sample.index:
                await self._at_home.wait()
            await self._dispatch.carry(self, sample)
        except (Unavailable, Rejected) as error:
            self._pieces.put_nowait(error)


@dataclass(slots=True)
class Sample:
    """What one sample has generated so far, over all attempts."""

    index: int
    run: Run
    tokens: list[int] = field(default_factory=list)
    is_finished: bool = False
    is_enough: bool = False  # for the client: a stop string was found


class Attempt:
    """One sample on one placement, until it is over or lost. Deltas of the two nodes may come in any order."""

    def __init__(self, sample: Sample, identity: str) -> None:
        self.sample = sample
        self.id = identity
        self.prefill: Link | None = None
        self.decode: Link | None = None
        self.cached_tokens = 0  # that the prefix index expects
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._start = len(sample.tokens)
        self._landed = False
        self._early: dict[int, Delta] = {}
        self._prompt_logprobs: list[Logprobs] = []
        self._charges: list[tuple[Link, int, int]] = []

    def delta(self, link: Link, delta: Delta) -> None:
        if self.over.done():
            return
        self._landed = self._landed or delta.landed or (link is self.decode and bool(delta.tokens))
        if delta.error:
            if link is not self.decode and self._landed:
                return  # the prefill node did not hear that its commit succeeded
            self._fail(link, delta)
            return
        if self._landed or self.prefill is None or delta.finish:
            self._uncharge_prompt()
            if self.sample.index == 0:
                self.sample.run.settle(self.decode if self._landed or self.prefill is None else None)
        self._prompt_logprobs += delta.prompt_logprobs
        if not delta.tokens and not delta.finish:
            return
        self._early[delta.position] = delta
        while (ready := self._early.pop(len(self.sample.tokens), None)) is not None:
            self._tell(ready)
            if ready.finish:
                self.sample.is_finished = True
                self.over.set_result(None)
                return

    def lost(self, link: Link) -> None:
        # Landed, and its first token is here: the prefill node has nothing left to say.
        if self.over.done() or (link is self.prefill and self._landed and len(self.sample.tokens) > self._start):
            return
        self.over.set_exception(Lost(f"node {link.info.id} is gone", link.info.id))

    def _tell(self, delta: Delta) -> None:
        tokens = unpack_ids(delta.tokens)
        is_first = not self.sample.tokens
        self.sample.tokens += tokens
        self.sample.run.tell(
            Piece(
                self.sample.index,
                tokens,
                delta.logprobs,
                self._prompt_logprobs if is_first else [],
                delta.finish or None,
                delta.cached_tokens if is_first else 0,
            )
        )
        self._prompt_logprobs = []  # told whole with the first token, so an attempt before it leaves no trace

    def _fail(self, link: Link, delta: Delta) -> None:
        if delta.retry:
            self.over.set_exception(Lost(delta.error, link.info.id))
        elif delta.error in {"internal", "numerical", "no_token"}:
            self.over.set_exception(Unavailable(f"The model failed on this request ({delta.error}).", status=500))
        else:
            self.over.set_exception(Rejected(delta.error))

    # ---- the router's own ledger of load, for placement ----------------------------------------------------------

    def charge(self, num_tokens: int, max_new_tokens: int) -> None:
        assert self.decode is not None
        work = max(0, num_tokens - self.cached_tokens)
        computes = self.decode if self.prefill is None else self.prefill
        self._charges = [(computes, work, 0), (self.decode, 0, num_tokens + max_new_tokens // 2)]
        for link, outstanding, kv_tokens in self._charges:
            link.outstanding_tokens += outstanding
            link.kv_tokens += kv_tokens

    def _uncharge_prompt(self) -> None:
        if len(self._charges) == 2:
            link, outstanding, _ = self._charges.pop(0)
            link.outstanding_tokens = max(0, link.outstanding_tokens - outstanding)

    def uncharge(self) -> None:
        self._uncharge_prompt()
        for link, _, kv_tokens in self._charges:
            link.kv_tokens = max(0, link.kv_tokens - kv_tokens)
        self._charges = []
