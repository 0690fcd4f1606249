"""One sample on one placement: what its two nodes say of it, in whatever order, until it is over or lost.

It also keeps the router's own ledger of load: what an attempt makes its nodes compute and hold.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from router.dispatch.requests import SampleDelta
from router.nodes.connection import NodeConnection
from scheduler.cost import pairs_of
from shared import failpoints
from shared.errors import RequestError, UnavailableError
from shared.rpc.messages import Logprobs, TokenDelta, unpack_ids

HANDOFF = ("handoff: ", "landing: ")  # how the prefill and the decode node begin to say that a handoff failed


class AttemptFailed(Exception):
    """The attempt cannot go on; another may. `node` is who said so or is gone, "" if none; `is_suspect`: it died in
    the middle of computing this request."""

    def __init__(self, reason: str, node: str, *, is_gone: bool = False, is_suspect: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node
        self.is_gone = is_gone
        self.is_suspect = is_suspect


class ClientBackpressure(Exception):
    """Its client does not read: nothing is generated for it until it does."""


class AttemptObserver(Protocol):
    """Whoever a sample belongs to."""

    def put(self, piece: SampleDelta) -> None: ...
    def on_prefill_done(self, home: NodeConnection | None) -> None: ...
    def on_prompt_computed(self) -> None: ...


@dataclass(slots=True)
class SampleState:
    """What one sample has generated so far, over all attempts."""

    index: int
    run: AttemptObserver
    tokens: list[int] = field(default_factory=list)
    is_finished: bool = False
    is_enough: bool = False  # for the client: a stop string was found
    error: BaseException | None = None  # why it failed


class Attempt:
    """One sample on one placement, until it is over or lost. Deltas of the two nodes may come in any order."""

    def __init__(self, sample: SampleState, identity: str, is_new: bool) -> None:
        self.sample = sample
        self.id = identity
        self.is_new = is_new  # the request's first: nothing of it was accepted yet
        self.prefill: NodeConnection | None = None
        self.decode: NodeConnection | None = None
        self.cached_tokens = 0  # that the prefix index expects
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._start = len(sample.tokens)
        self._handed_off = False
        self._producers: set[NodeConnection] = set()
        self._early: dict[int, tuple[NodeConnection, TokenDelta]] = {}
        self._prompt_logprobs: list[Logprobs] = []
        self._charges: list[tuple[NodeConnection, int, int, int]] = []  # prompt tokens, their pairs, KV tokens

    @property
    def has_output(self) -> bool:
        return len(self.sample.tokens) > self._start

    def produced_by(self, link: NodeConnection) -> bool:
        """Whether tokens of this attempt came from there."""
        return link in self._producers

    def connection_to(self, node: str) -> NodeConnection | None:
        return next((link for link in (self.prefill, self.decode) if link is not None and link.info.id == node), None)

    def pause(self) -> None:
        if not self.done.done():
            self.done.set_exception(ClientBackpressure())

    def on_delta(self, link: NodeConnection, delta: TokenDelta) -> None:
        try:
            self._process(link, delta)
        except ValueError:
            raise  # of a node that garbles its words nothing is believed
        except Exception as error:  # noqa: BLE001 - it fails this request alone, where it is awaited
            if not self.done.done():
                self.done.set_exception(error)

    def _process(self, link: NodeConnection, delta: TokenDelta) -> None:
        if self.done.done():
            return
        self._handed_off = self._handed_off or delta.handed_off or (link is self.decode and bool(delta.tokens))
        if delta.error:
            if link is not self.decode and self._handed_off:
                return  # the prefill node did not hear that its commit succeeded
            self._fail(link, delta)
            return
        if self._handed_off or self.prefill is None or delta.finish:
            self._uncharge_prompt()
            if self.sample.index == 0:
                self.sample.run.on_prefill_done(self.decode if self._handed_off or self.prefill is None else None)
        self._prompt_logprobs += delta.prompt_logprobs
        if not delta.tokens and not delta.finish:
            return
        self._early[delta.position] = link, delta
        while (ready := self._early.pop(len(self.sample.tokens), None)) is not None:
            self._publish(*ready)
            if ready[1].finish:
                self.sample.is_finished = True
                self.done.set_result(None)
                return

    def on_node_lost(self, link: NodeConnection) -> None:
        # Landed, and its first token is here: the prefill node has nothing left to say.
        if self.done.done() or (link is self.prefill and self._handed_off and self.has_output):
            return
        computes = self.decode if self.prefill is None or self._handed_off else self.prefill
        is_suspect = link is computes and link.has_crashed
        self.done.set_exception(
            AttemptFailed(f"node {link.info.id} is gone", link.info.id, is_gone=True, is_suspect=is_suspect)
        )

    def _publish(self, link: NodeConnection, delta: TokenDelta) -> None:
        failpoints.reach("router.told", self.id)
        tokens = unpack_ids(delta.tokens)
        is_first = not self.sample.tokens
        self.sample.tokens += tokens
        self._producers.add(link)
        self.sample.run.put(
            SampleDelta(
                self.sample.index,
                tokens,
                delta.logprobs,
                self._prompt_logprobs if is_first else [],
                delta.finish or None,
                delta.cached_tokens if is_first else 0,
            )
        )
        self._prompt_logprobs = []  # told whole with the first token, so an attempt before it leaves no trace

    def _fail(self, link: NodeConnection, delta: TokenDelta) -> None:
        if delta.retry:
            self.done.set_exception(AttemptFailed(delta.error, link.info.id))
        elif delta.error in {"internal", "numerical", "no_token"}:
            self.done.set_exception(UnavailableError(f"The model failed on this request ({delta.error}).", status=500))
        else:
            self.done.set_exception(RequestError(delta.error))

    # ---- the router's own ledger of load, for placement ----------------------------------------------------------

    def charge(self, num_tokens: int, max_new_tokens: int) -> None:
        assert self.decode is not None
        work = max(0, num_tokens - self.cached_tokens)
        computes = self.decode if self.prefill is None else self.prefill
        pairs = pairs_of(num_tokens - work, work)
        self._charges = [(computes, work, pairs, 0), (self.decode, 0, 0, num_tokens + max_new_tokens // 2)]
        for link, outstanding, pairs, kv_tokens in self._charges:
            link.outstanding_tokens += outstanding
            link.outstanding_pairs += pairs
            link.kv_tokens += kv_tokens
        self.decode.prefilling += 1

    def _uncharge_prompt(self) -> None:
        if len(self._charges) == 2:
            self.sample.run.on_prompt_computed()
            link, outstanding, pairs, _ = self._charges.pop(0)
            link.outstanding_tokens = max(0, link.outstanding_tokens - outstanding)
            link.outstanding_pairs = max(0, link.outstanding_pairs - pairs)
            if self.decode is not None:
                self.decode.prefilling = max(0, self.decode.prefilling - 1)

    def uncharge(self) -> None:
        self._uncharge_prompt()
        for link, _, _, kv_tokens in self._charges:
            link.kv_tokens = max(0, link.kv_tokens - kv_tokens)
        self._charges = []
