"""The messages of the control plane. Each is a slotted dataclass, sent as a msgpack array in field order.

Token ids are sent as bytes (`pack_ids`): a list of integers takes a hundred times as long to check and copy.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field


def pack_ids(ids: Iterable[int]) -> bytes:
    """Pack non-negative ids below 2**31 as little-endian int32, the byte order of all supported machines."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Inverse of `pack_ids`. Raises ValueError if the bytes are not whole int32s, or an id is negative."""
    ids = array("i")
    ids.frombytes(data)
    row = ids.tolist()
    if row and min(row) < 0:
        raise ValueError("a token id is negative")
    return row


@dataclass(slots=True)
class SamplingParams:
    """How the next token is sampled. Names and meanings are those of vLLM; temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # number of alternatives in addition to the sampled token; None: no logprobs
    prompt_logprobs: int | None = None


@dataclass(slots=True)
class SubmitRequest:
    """Router to node: compute this request. `decode_node` is the address of the node that generates; "": this node."""

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
    share_prefix: bool = True  # False: shares no prefix cache with other requests
    traceparent: str = ""  # W3C trace context of the client's request, for logs


@dataclass(slots=True)
class RouterCommand:
    """Router to node, on the standing stream. The first message contains only the name of the router."""

    router: str
    submits: list[SubmitRequest] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Logprobs:
    """The logprobs of one position: the token, its logprob and rank, and the likeliest alternatives, best first."""

    token: int
    logprob: float
    rank: int
    top_tokens: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)


@dataclass(slots=True)
class TokenDelta:
    """The result of one step for one request. `position` is the number of tokens generated before `tokens`."""

    id: str
    position: int = 0
    tokens: bytes = b""
    finish: str = ""  # "stop" | "length": the request is over
    error: str = ""  # the reason why this node gave up the request, if it did
    handed_off: bool = False  # all KV has arrived; from now on, only this node generates
    cached_tokens: int = 0
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    retry: bool = False  # with `error`: another node may succeed


@dataclass(slots=True)
class NodeStats:
    """The state of a node, sent at each heartbeat. Blocks: free + cached + owned + reserved + quarantined = total."""

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
    handoffs: int = 0  # prefill node: handoffs committed by a decode node
    handoffs_failed: int = 0
    blocks_moved: int = 0
    bytes_moved: int = 0
    channels: dict[str, str] = field(default_factory=dict)  # peer id -> channel in use
    channel_fallbacks: int = 0
    cost: list[float] = field(default_factory=list)  # scheduler.cost.CostModel.packed; empty until a model is fitted
    transfer: list[float] = field(default_factory=list)  # prefill node: seconds per push, and seconds per byte
    records_dropped: int = 0  # step records and request events that were not sent to a router
    sent_ns: int = 0  # the node's Unix time when this was sent, to compute the offset of its clock
    overruns: int = 0  # emulated passes that ended late because this machine is too slow
    rows_corrupt: int = 0  # decode node: rows of KV whose checksum differed on arrival
    ledger_error: str = ""  # the error in the block ledger, if there is one
    incarnation_id: str = ""  # of the sender, because another process may reuse its address


@dataclass(slots=True)
class StepRecord:
    """The contents and durations of one step. Times are Unix time of the node. For pairs, see `cost.StepWork`."""

    number: int
    start_ns: int  # start of the step's forward pass
    duration_us: int  # duration of the forward pass
    host_us: int = 0  # time of the engine's loop outside the device: planning, and publishing the previous step
    predicted_us: int = 0  # duration_us + host_us as the cost model predicted them; 0: no model
    budget: int = 0  # maximum tokens of this step
    reason: str = ""  # what limited the budget: see scheduler.budget
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
    members: bytes = b""  # packed (serial, start, count) of each slice, prompts first; for serial, see RequestEvent


@dataclass(slots=True)
class RequestEvent:
    """An event of one request on one node. The event ended at `at_ns` (the node's Unix time) and lasted `duration_us`.

    The kinds, and the other fields that each sets:
    "queued"     the node accepted the request: serial (its number in step records of this node), count = its tokens
    "reserving"  `peer` reserved blocks: duration_us = time until the reply
    "transfer"   blocks were pushed to `peer`: count = blocks, bytes, channel, duration_us
    "committed"  `peer` acknowledged that it has all blocks: duration_us
    "received"   the decode node has all blocks, and the request may run there
    "admitted"   the first step of the request on this node began: count = tokens found in the prefix cache
    "first"      its first token on this node was sampled
    "preempted"  its blocks were freed for another request; its tokens are computed again
    "ended"      it ended on this node: reason = "stop", "length", "handed_off", "aborted", or an error
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
    """Node to router, on the standing stream: deltas after each step, statistics at each heartbeat, and new records of
    steps and events ten times a second."""

    deltas: list[TokenDelta] = field(default_factory=list)
    stats: NodeStats | None = None
    steps: list[StepRecord] = field(default_factory=list)
    events: list[RequestEvent] = field(default_factory=list)


@dataclass(slots=True)
class NodeInfo:
    """The description of a node in the registry. `incarnation_id` is new at every start of its process."""

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
    attributes: dict[str, str] = field(default_factory=dict)  # other settings; comparisons and placement use them
    shared_pool_owner: str = ""  # incarnation id of the decode node in whose pool it computes, if any


@dataclass(slots=True)
class ReserveRequest:
    """Prefill node to decode node: reserve blocks for the KV of this request. The reply comes when there are blocks."""

    request: SubmitRequest
    writer: str  # incarnation id of the prefill node
    fingerprint: str


@dataclass(slots=True)
class ReserveReply:
    """The reserved blocks. The decode node already has the first `num_held` logical blocks of the prompt; `targets` are
    the blocks to fill with the others."""

    reservation_id: bytes = b""
    num_held: int = 0
    targets: bytes = b""
    descriptors: dict[str, bytes] = field(default_factory=dict)  # channel name -> how to write into this pool
    error: str = ""
    held: bytes = b""  # the blocks of the first `num_held`, for a prefill node that computes in this pool


@dataclass(slots=True)
class PushedNotice:
    """The next target blocks of the reservation are written. `checksums`: the 8-byte xxh3-64 of each, in order.

    It is sent while the next chunk is computed, so that only the last rows remain to be checked at the commit.
    """

    reservation_id: bytes
    checksums: bytes


@dataclass(slots=True)
class CommitRequest:
    """All rows of the reservation are written. `checksums` are those that no `PushedNotice` contained."""

    reservation_id: bytes
    first_token: int
    checksums: bytes


@dataclass(slots=True)
class RenewRequest:
    """Prefill node to decode node: renew the leases of these reservations (ids of 16 bytes each, concatenated)."""

    writer: str
    reservation_ids: bytes


@dataclass(slots=True)
class RenewReply:
    """The writer's reservations that the decode node still has.

    `has_reservations`: it has reservations of this writer, renewed or not. `quarantined`: the ids (16 bytes each,
    concatenated) of reservations in quarantine, whose blocks are not reused before the writer stops.
    """

    error: str = ""
    has_reservations: bool = False
    quarantined: bytes = b""


@dataclass(slots=True)
class StopRequest:
    """The writer gives up the reservation and writes no more. If it has no reservation id, `request` is set instead."""

    reservation_id: bytes
    reason: str = ""
    request: str = ""


@dataclass(slots=True)
class SetRoleRequest:
    """Router to node: become a "prefill" or a "decode" node. The reply comes when the node has rejoined in that role.

    Requests that still run after `drain_s` are retried on other nodes.
    """

    role: str
    drain_s: float = 30.0


@dataclass(slots=True)
class Ack:
    error: str = ""
    again: bool = False  # with `error`: the sender may repeat the last push, once
