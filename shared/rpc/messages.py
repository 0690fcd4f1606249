"""The messages of the control plane, each a flat slotted dataclass sent as a msgpack array in field order.

Fields are only ever appended, with a default, so that neighbouring versions understand each other. Rows of token
ids travel as bytes (`pack_ids`): a list of integers costs a hundred times as much to check and to copy.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field


def pack_ids(ids: Iterable[int]) -> bytes:
    """Non-negative ids below 2**31 as little-endian int32 (every machine this runs on is little-endian)."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Inverse of `pack_ids`. Raises ValueError when the bytes are not whole int32s or hold a negative id."""
    ids = array("i")
    ids.frombytes(data)
    row = ids.tolist()
    if row and min(row) < 0:
        raise ValueError("a token id is negative")
    return row


@dataclass(slots=True)
class SamplingParams:
    """How the next token is drawn; names and meanings are vLLM's. temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # how many alternatives beside the drawn token; None: no logprobs
    prompt_logprobs: int | None = None


@dataclass(slots=True)
class SubmitRequest:
    """Router to node: compute this request. `decode_node` names the peer that generates, or "" for this node."""

    id: str
    router: str
    tokens: bytes
    num_prompt: int
    max_tokens: int
    sampling: SamplingParams
    min_tokens: int = 0
    stop_tokens: bytes = b""
    salt: bytes = b""
    priority: int = 0
    decode_node: str = ""
    share_prefix: bool = True  # False: neither reads nor feeds other requests' prefix cache
    traceparent: str = ""  # W3C trace context of the client's request, for logs


@dataclass(slots=True)
class RouterCommand:
    """Router to node on the standing stream. The first message names the router and carries nothing else."""

    router: str
    submits: list[SubmitRequest] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Logprobs:
    """Of one position: the token there, its logprob and rank, and the most likely alternatives, best first."""

    token: int
    logprob: float
    rank: int
    top_tokens: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)


@dataclass(slots=True)
class TokenDelta:
    """What one step did for one request. `position` counts generated tokens before `tokens`."""

    id: str
    position: int = 0
    tokens: bytes = b""
    finish: str = ""  # "stop" | "length": the request is over
    error: str = ""  # not empty: this node gave the request up; the reason
    handed_off: bool = False  # the KV arrived whole; from now on this node alone generates
    cached_tokens: int = 0
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    retry: bool = False  # with `error`: another node may succeed


@dataclass(slots=True)
class NodeStats:
    """A node's state, sent twice a second. Blocks: free + cached + owned + reserved + quarantined = total."""

    state: str = "ready"  # "ready" | "draining" | "stuck" | "breached": its block ledger is broken
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_owned: int = 0
    blocks_reserved: int = 0
    blocks_quarantined: int = 0
    blocks_total: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cache_queries: int = 0  # tokens looked up in the prefix cache
    cache_hits: int = 0  # tokens found there
    preemptions: int = 0
    handoffs: int = 0  # prefill node: committed at a peer
    handoffs_failed: int = 0
    blocks_moved: int = 0
    bytes_moved: int = 0
    channels: dict[str, str] = field(default_factory=dict)  # peer id -> channel in use
    channel_fallbacks: int = 0
    cost: list[float] = field(default_factory=list)  # scheduler.cost.CostModel.packed, once one is fitted
    transfer: list[float] = field(default_factory=list)  # prefill node: seconds a push, and seconds a byte of it
    records_dropped: int = 0  # step records and request events that no router could be told
    sent_ns: int = 0  # the node's Unix time when this was sent, for the offset of its clock
    overruns: int = 0  # emulated passes that ended late, as the machine is too slow for what it emulates
    rows_corrupt: int = 0  # decode node: rows of KV that came otherwise than they were sent
    ledger_error: str = ""  # what is wrong with the block ledger, if anything
    incarnation_id: str = ""  # of who says this: at an address that is used again, another one answers


@dataclass(slots=True)
class StepRecord:
    """What one step was and what it took. Times are the node's Unix time; tokens, pairs: see scheduler.cost.Work."""

    number: int
    start_ns: int  # when its forward pass began
    duration_us: int  # of the forward pass
    host_us: int = 0  # deciding it and telling the step before: time of the engine's loop outside the device
    predicted_us: int = 0  # by the step-time model, before it ran, for pass and host together; 0: there was none
    budget: int = 0  # tokens that it was allowed
    reason: str = ""  # why so many: see scheduler.budget
    num_prefills: int = 0
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    num_decodes: int = 0
    decode_context: int = 0
    num_preempted: int = 0
    running: int = 0
    waiting: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_owned: int = 0
    blocks_reserved: int = 0
    members: bytes = b""  # `pack_ids` of (serial, start, count) a slice, chunks first; serial: see RequestEvent


@dataclass(slots=True)
class RequestEvent:
    """Something that happened to one request on one node, at its Unix time `at_ns`, after `duration_us` of it.

    kind, and what else is set:
    "queued"     the node took it: serial (its number in step records of this node), count = tokens of its row
    "reserving"  room was asked for at `peer`; duration_us = until it was granted
    "transfer"   blocks were pushed to `peer`: count = blocks, bytes, channel, duration_us
    "committed"  the peer has all of them and said so
    "landed"     on the decode node: it may run from now on
    "admitted"   its first step here began: count = tokens found in the prefix cache
    "first"      its first token was sampled here
    "preempted"  its blocks were taken; it computes again
    "ended"      it is over here; reason: "stop", "length", "handed_off", "aborted", or what went wrong
    """

    id: str
    kind: str
    at_ns: int
    duration_us: int = 0
    serial: int = -1
    count: int = 0
    bytes: int = 0
    peer: str = ""
    channel: str = ""
    reason: str = ""


@dataclass(slots=True)
class NodeUpdate:
    """Node to router on the standing stream: one a step with tokens, one a heartbeat with the load, and what
    happened since the last, ten times a second."""

    deltas: list[TokenDelta] = field(default_factory=list)
    stats: NodeStats | None = None
    steps: list[StepRecord] = field(default_factory=list)
    events: list[RequestEvent] = field(default_factory=list)


@dataclass(slots=True)
class NodeInfo:
    """What a node says of itself when it joins. `boot` is new at every start and fences off its past life."""

    id: str
    incarnation_id: str
    role: str
    address: str  # host:port of its RPCs
    model: str
    fingerprint: str
    block_tokens: int
    block_bytes: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    version: str = ""
    state: str = "ready"
    attributes: dict[str, str] = field(default_factory=dict)  # what else must be equal for two nodes to be compared
    shared_pool_owner: str = ""  # boot of the decode node in whose pool it computes: it can hand prompts to no other


@dataclass(slots=True)
class JoinReply:
    router: str


@dataclass(slots=True)
class ReserveRequest:
    """Prefill node to decode node: room for this request's KV, please. Answered when there is room."""

    request: SubmitRequest
    writer: str  # boot id of the prefill node
    fingerprint: str


@dataclass(slots=True)
class ReserveReply:
    """`targets` are the blocks to fill, for the prompt's logical blocks from `num_held` on; the rest is there."""

    reservation_id: bytes = b""
    num_held: int = 0
    targets: bytes = b""
    descriptors: dict[str, bytes] = field(default_factory=dict)  # channel name -> how to write into this pool
    error: str = ""
    held: bytes = b""  # the blocks that are there, for who computes in this pool


@dataclass(slots=True)
class PushedNotice:
    """The next target blocks of the ticket are written: one xxh3-64 each, 8 bytes, in their order.

    Told while the next chunk is computed, so that at the commit only the last rows are left to check.
    """

    reservation_id: bytes
    checksums: bytes


@dataclass(slots=True)
class CommitRequest:
    """All rows of the ticket are written; `checksums` are those that no `PushedNotice` has told yet."""

    reservation_id: bytes
    first_token: int
    checksums: bytes


@dataclass(slots=True)
class RenewRequest:
    """The writer lives and still wants these tickets (16 bytes each, concatenated): their leases start anew."""

    writer: str
    reservation_ids: bytes


@dataclass(slots=True)
class RenewReply:
    """What the decode node still holds for the writer.

    `has_reservations`: it has reservations of this writer, renewed or not. `quarantined`: ids (16 bytes each,
    concatenated) of those that it gave up, and whose blocks it keeps until the writer stops.
    """

    error: str = ""
    has_reservations: bool = False
    quarantined: bytes = b""


@dataclass(slots=True)
class StopRequest:
    """The writer gives the ticket up and will write no more. Where no answer told it a ticket: `request`."""

    reservation_id: bytes
    reason: str = ""
    request: str = ""


@dataclass(slots=True)
class SetRoleRequest:
    """Router to node: be a "prefill" or a "decode" node from now on. Answered once the node has rejoined as one.

    Requests on it that still run after `drain_s` go on elsewhere.
    """

    role: str
    drain_s: float = 30.0


@dataclass(slots=True)
class Ack:
    error: str = ""
    again: bool = False  # with `error`: what was said last may be done again, once
