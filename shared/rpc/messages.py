"""The messages of the control plane. Each message is a slotted dataclass, sent as a msgpack array in field order.

Token ids are sent as bytes (`pack_ids`); a list of integers would take a hundred times as long to check and copy.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field


def pack_ids(ids: Iterable[int]) -> bytes:
    """Pack non-negative ids below 2**31 as int32 in little-endian order, which all supported machines use."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Return the ids that `pack_ids` packed.

    Raises ValueError if the bytes are not whole int32s, or if an id is negative.
    """
    ids = array("i")
    ids.frombytes(data)
    row = ids.tolist()
    if row and min(row) < 0:
        raise ValueError("a token id is negative")
    return row


@dataclass(slots=True)
class ThinkingBudget:
    """A limit on the reasoning at the beginning of an answer. Any token in `ends` ends the reasoning. If the first
    `num_tokens` tokens of reasoning contain no such token, the first token in `ends` is forced after them.

    `begin` is a position, counted from the beginning of the prompt, or -1. If it is in the prompt, the reasoning begins
    there. Otherwise, the reasoning begins after the token `start` if this is one of the first tokens of the answer. If
    it is not, the reasoning begins at `begin`. If `begin` is -1, the answer then has no reasoning."""

    num_tokens: int
    start: int
    ends: bytes
    begin: int = -1


@dataclass(slots=True)
class SamplingParams:
    """How tokens are sampled. Names and meanings are as in vLLM. Temperature 0 selects greedy sampling."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # number of likeliest tokens to return for each position; None: no logprobs
    prompt_logprobs: int | None = None
    allowed_tokens: bytes = b""  # only tokens with these ids may be sampled; b"": all
    # The token ids of each word. The last token of a word is not sampled directly after the word's other tokens.
    bad_words: list[bytes] = field(default_factory=list)
    # If not "", return a vector instead of a token: the hidden state of the last token ("last"), the mean hidden state
    # of all tokens ("mean"), or the logits of `allowed_tokens` after the prompt ("logits"). `max_tokens` must be 1.
    pooling: str = ""
    thinking: ThinkingBudget | None = None


@dataclass(slots=True)
class Media:
    """An image of a prompt. Its tokens begin at `offset` in the prompt and form a grid of `rows` x `columns`.

    `pixels` has `height` x `width` RGB pixels of 3 bytes, row by row, resized for the model. `pixels` is empty for a
    node that receives the KV of the prompt. Equal images have equal digests. `encoder` is the address of the node that
    encodes the image, or "" if the node that computes the prompt encodes it.
    """

    offset: int
    rows: int
    columns: int
    digest: bytes
    width: int
    height: int
    pixels: bytes = b""
    encoder: str = ""


@dataclass(slots=True)
class SubmitRequest:
    """Router to node: compute this request. The node at address `decode_node` ("": this node) generates the answer."""

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
    share_prefix: bool = True  # False: the request shares no cached prefix with other requests
    traceparent: str = ""  # W3C trace context of the client's request, for logs
    grammar: str = ""  # the answer matches this grammar (see `shared.grammar`); "": any answer
    speculative: bool = True  # False: a node with speculative decoding guesses no tokens for this request
    adapter: str = ""  # digest of a LoRA adapter; "": the model itself
    media: list[Media] = field(default_factory=list)  # images of the prompt, in order
    tenant: str = ""  # owner of the request's API key


@dataclass(slots=True)
class RouterCommand:
    """Router to node, on their long-lived stream. The first message contains no submits and no aborts."""

    router: str
    submits: list[SubmitRequest] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    records: bool = True  # whether the node sends this router its records of steps and events from now on
    has_requests: bool = True  # whether the router has requests on the node; if so, it notices a silent node sooner
    has_seen_drain: bool = False  # whether the router knows that the node drains; if so, it places no more requests


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
    finish: str = ""  # "stop" or "length" if the request is complete
    error: str = ""  # why this node gave up the request, or ""
    handed_off: bool = False  # all KV has arrived at this node; from now on, only this node generates tokens
    cached_tokens: int = 0
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    retry: bool = False  # if `error` is set: whether another node may succeed
    vector: bytes = b""  # the result of a pooled request, as little-endian float32
    version: list[str] = field(default_factory=list)  # in stored responses: the `ModelVersion` that sampled the tokens


@dataclass(slots=True)
class NodeStats:
    """The state of a node. Blocks: free + cached + owned + reserved + quarantined = total."""

    state: str = "ready"  # "ready" | "draining" | "stuck" | "breached" (an error in the block ledger)
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
    cache_queries: int = 0  # number of tokens looked up in the prefix cache
    cache_hits: int = 0  # number of tokens found in the prefix cache
    preemptions: int = 0
    handoffs: int = 0  # prefill node: number of handoffs that decode nodes committed
    handoffs_failed: int = 0
    blocks_moved: int = 0
    bytes_moved: int = 0
    channels: dict[str, str] = field(default_factory=dict)  # prefill node: peer's address -> channel in use
    channel_fallbacks: int = 0
    cost: list[float] = field(default_factory=list)  # the packed scheduler.cost.CostModel; empty until it is fitted
    transfer: list[float] = field(default_factory=list)  # prefill node: constant seconds of a push, seconds per byte
    records_dropped: int = 0  # number of step records and request events that no router received
    sent_ns: int = 0  # the node's Unix time when it sent these statistics; shows the offset of its clock
    overruns: int = 0  # number of emulated passes that ended late because the machine is too slow
    rows_corrupt: int = 0  # decode node: number of KV rows that arrived with a wrong checksum
    ledger_error: str = ""  # the error in the block ledger, if there is one
    incarnation_id: str = ""  # identifies the sender's process, whose address another process may use later
    num_drafts: int = 0  # speculative decoding: number of decodes that verified guessed tokens
    draft_tokens: int = 0  # guessed tokens that were verified
    accepted_tokens: int = 0  # guessed tokens that were right
    accepted_per_pos: list[int] = field(default_factory=list)  # entry i: number of decodes whose guess i was right
    images_encoded: int = 0  # images encoded by the vision module
    images_cached: int = 0  # images whose features were still in memory when they were needed again
    num_routers: int = 0  # number of attached routers and router workers
    images_fetched: int = 0  # images whose features another node computed


@dataclass(slots=True)
class StepRecord:
    """The contents and durations of one step. `start_ns` is the node's Unix time. `cost.StepWork` explains pairs."""

    number: int
    start_ns: int  # start of the step's forward pass
    duration_us: int  # duration of the forward pass
    host_us: int = 0  # idle time of the device while the node published the previous step and planned this step
    predicted_us: int = 0  # the cost model's prediction of duration_us + host_us; 0: there is no model
    budget: int = 0  # maximum number of tokens in this step
    reason: str = ""  # the reason for the budget: see scheduler.budget
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
    members: bytes = b""  # (serial, start, count) of each slice as int32, prompts first; serial: see RequestEvent
    draft_tokens: int = 0  # guessed tokens that the step's decodes verified; decode_context includes their contexts
    accepted_tokens: int = 0  # guessed tokens that were right


@dataclass(slots=True)
class RequestEvent:
    """An event of one request on one node. The event ended at `at_ns` (the node's Unix time) and lasted `duration_us`.

    The kinds of events, each with its meaning and the other fields that it sets:
    "queued"     the node accepted the request: serial (its number in step records), count = number of its tokens
    "reserving"  `peer` reserved blocks: duration_us = time until its reply
    "transfer"   blocks were pushed to `peer`: count = number of blocks, bytes, channel, duration_us
    "committed"  `peer` acknowledged that it has all blocks: duration_us
    "received"   the decode node has all blocks, and the request may run there
    "admitted"   the first step of the request on this node began: count = number of tokens found in the prefix cache
    "first"      the first token of the request on this node was sampled
    "preempted"  the blocks of the request were freed for another request; its KV will be computed again
    "ended"      the request ended on this node: reason = "stop", "length", "handed_off", "aborted", or an error
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
    """Node to router, on their long-lived stream: deltas after each step, and statistics roughly once a second. If the
    router wants records, the node also sends it new records of steps and events ten times a second."""

    deltas: list[TokenDelta] = field(default_factory=list)
    stats: NodeStats | None = None
    steps: list[StepRecord] = field(default_factory=list)
    events: list[RequestEvent] = field(default_factory=list)


@dataclass(slots=True)
class NodeInfo:
    """The description of a node in the registry. Each start of the node's process has a new `incarnation_id`."""

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
    attributes: dict[str, str] = field(default_factory=dict)  # other settings, which comparisons and placement read
    shared_pool_owner: str = ""  # incarnation id of the decode node in whose pool this node computes, if any
    adapters: dict[str, str] = field(default_factory=dict)  # name -> digest of each LoRA adapter


@dataclass(slots=True)
class NodeListChange:
    """Registry to a worker of the router: nodes that joined or changed, and ids of nodes that left the cluster.

    The first messages of a stream list all nodes. `is_complete` is set in the last message of each change.
    """

    nodes: list[NodeInfo] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    is_complete: bool = True


@dataclass(slots=True)
class EncodeRequest:
    """Node to node: reply with the features of an image's tokens, starting at token number `first`. Only the first
    request for an image has to contain the pixels."""

    fingerprint: str
    image: Media
    first: int = 0


@dataclass(slots=True)
class EncodeReply:
    """The features of `count` tokens. `tensors` has the float32 bytes of each tensor of `ImageFeatures`. If there is no
    error and `count` is 0, the image is still being encoded."""

    error: str = ""
    count: int = 0
    tensors: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class ReserveRequest:
    """Prefill node to decode node: reserve blocks for the KV of this request. The reply may wait for free blocks."""

    request: SubmitRequest
    writer: str  # incarnation id of the prefill node
    fingerprint: str


@dataclass(slots=True)
class ReserveReply:
    """The reserved rows. The decode node already has the first `num_held` blocks of the prompt. `targets` are the rows
    for the rest of the prompt's data, in the order of `Geometry.landing_order` (shared pool: `Geometry.borrow`)."""

    reservation_id: bytes = b""
    num_held: int = 0
    targets: bytes = b""
    descriptors: dict[str, bytes] = field(default_factory=dict)  # channel name -> descriptor of the decode node's pool
    error: str = ""
    held: bytes = b""  # if the writer computes in this pool: the rows of the first `num_held` blocks and of their state


@dataclass(slots=True)
class PushedNotice:
    """The writer wrote the next rows of the reservation. `checksums` has the 8-byte xxh3-64 of each row, in order.

    The notice is sent while the next chunk is computed, so that only the last rows remain to be checked at the commit.
    """

    reservation_id: bytes
    checksums: bytes


@dataclass(slots=True)
class CommitRequest:
    """All rows of the reservation have been written. `checksums` has the checksums of the rows that no `PushedNotice`
    covered. In a shared pool, two recurrent states are reserved, and `current_state` is the index (0 or 1) of the one
    that holds the state after the prompt. Otherwise, it is 0."""

    reservation_id: bytes
    first_token: int
    checksums: bytes
    current_state: int = 0


@dataclass(slots=True)
class RenewRequest:
    """Prefill node to decode node: renew the leases of these reservations (ids of 16 bytes each, concatenated)."""

    writer: str
    reservation_ids: bytes


@dataclass(slots=True)
class RenewReply:
    """The writer's reservations that the decode node still has.

    `has_reservations` is true if the decode node has any reservation of this writer, renewed or not. `quarantined` has
    the ids (16 bytes each, concatenated) of the writer's reservations in quarantine, which the writer must stop.
    """

    error: str = ""
    has_reservations: bool = False
    quarantined: bytes = b""


@dataclass(slots=True)
class StopRequest:
    """The writer gives up the reservation and writes nothing more.

    If the writer does not know the reservation id, `reservation_id` is empty, and `request` is the id of the request.
    """

    reservation_id: bytes
    reason: str = ""
    request: str = ""


@dataclass(slots=True)
class AcceptRequest:
    """Proxy of a prefill engine to proxy of a decode engine: answer this request with the prefill engine's KV.

    `params` is the JSON object with which the decode engine gets the prompt's KV from the prefill engine. The decode
    engine may use it once, and must sample the first token within `lease_ms` milliseconds. If `first_token` is not
    negative, the router has this token, and the decode engine must sample the same token. If `first_token` is -2, the
    prefill engine is still computing the prompt, and its proxy commits the request later. In that commit,
    `reservation_id` is the request's id.
    """

    request: SubmitRequest
    params: bytes
    lease_ms: int
    first_token: int = -1


@dataclass(slots=True)
class SetRoleRequest:
    """Router to node: become a "prefill" or a "decode" node. The reply is sent once the node has rejoined in that role.

    Requests that still run after `drain_s` seconds are retried on other nodes.
    """

    role: str
    drain_s: float = 30.0


@dataclass(slots=True)
class SetAdapterRequest:
    """Router to node: load the LoRA adapter in `directory`, or unload it if `directory` is empty.

    The reply is sent when the node has announced the change. Requests that use an unloaded adapter continue.
    """

    name: str
    directory: str = ""


@dataclass(slots=True)
class Ack:
    error: str = ""
    again: bool = False  # if `error` is set: whether the sender may repeat the last push, once
