"""Conditional disaggregation: decides whether a prefill node or the decode node itself computes a prompt.

The decision is calculated from step-time models that the nodes fit to their own steps (`engine.step_time_fit`). NVIDIA
Dynamo decides by a fixed prompt length and queue depth; here the times of both alternatives are predicted and the
faster one is chosen. The decode node is assumed to mix prompt chunks with decodes, as the policy stall_free does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil

from scheduler.budget import FLOOR_TOKENS, tokens_within
from scheduler.cost import CostModel, StepWork, pairs_of


@dataclass(slots=True)
class NodeView:
    """A live node as placement sees it: its properties, the requests that the router sent, and the node's reports."""

    id: str
    role: str
    outstanding_tokens: int = 0  # prompt tokens sent to the node and not computed yet
    running: int = 0
    max_num_seqs: int = 1
    kv_tokens: int = 0  # tokens whose KV is or will be on the node
    kv_capacity_tokens: int = 1
    placed: int = 0  # number of requests sent to the node so far, to break ties
    outstanding_pairs: int = 0  # query-key pairs of the outstanding tokens
    decode_context: int = 0  # tokens whose KV the node's decodes read in each step
    budget_tokens: int = 512  # maximum number of tokens in a step
    tbt_slo_s: float = 0.0  # the node's SLO for the time between two tokens; 0: none
    cost: CostModel | None = None
    cost_is_learnt: bool = True  # whether `cost` was fitted to enough prompt tokens to predict the cost of prompts
    push_s: float = 0.0  # fixed seconds per KV push
    byte_s: float = 0.0  # additional seconds per byte of a KV push
    token_bytes: int = 0  # bytes of KV per token
    prefilling: int = 0  # requests in `running` whose prompt this or another node has yet to compute
    incarnation_id: str = ""
    shared_pool_owner: str = ""  # incarnation of the only decode node to which this node can hand off; "": any
    stale: bool = False  # whether `cost` may be out of date, because the node has been idle

    @property
    def num_decodes(self) -> int:
        return max(0, self.running - self.prefilling)


@dataclass(frozen=True, slots=True)
class LatencyEstimate:
    """The predicted latency of one prompt with one placement, excluding any wait for free KV blocks."""

    wait_s: float  # time until the prompts queued before this one are computed
    compute_s: float  # time to compute this prompt's own chunks
    transfer_s: float = 0.0  # time from the end of the prompt's last chunk until the decode node can continue
    harm_s: float = 0.0  # sum of the delays that the prompt's chunks add to running decodes
    keeps_tbt: bool = True  # whether the running decodes still meet their TBT SLO

    @property
    def first_token_s(self) -> float:
        """Seconds until the first token. The transfer comes after this token, so it delays only the second token."""
        return self.wait_s + self.compute_s

    @property
    def ready_s(self) -> float:
        """Seconds until the decode node can compute the second token."""
        return self.wait_s + self.compute_s + self.transfer_s

    @property
    def total_s(self) -> float:
        """The seconds until the second token, plus the delays that the request adds to running decodes."""
        return self.ready_s + self.harm_s


def remote_estimate(node: NodeView, num_tokens: int, cached: int, cached_at_decode: int) -> LatencyEstimate | None:
    """Predict how long a prefill node takes for a prompt of `num_tokens` tokens. Return None without a cost model.

    `cached` and `cached_at_decode` are the numbers of prefix tokens cached on the prefill node and on the decode node.
    If the link is fast enough, the blocks of every chunk but the last are transferred while the next chunk is computed.
    """
    if node.cost is None:
        return None
    room, own = node.budget_tokens, max(1, num_tokens - cached)
    chunks = ceil(own / room)
    last = own - (chunks - 1) * room
    wait_s, compute_s, last_s = (
        prompt_seconds(partial(chunk_seconds, node.cost), tokens, room) + node.cost.per_pair * pairs
        for tokens, pairs in (
            (node.outstanding_tokens, node.outstanding_pairs),
            (own, pairs_of(num_tokens - own, own)),
            (last, pairs_of(num_tokens - last, last)),
        )
    )
    moved = max(1, num_tokens - cached_at_decode)
    byte_s = node.byte_s * node.token_bytes
    exposed_s = node.push_s + byte_s * (min(moved, last) if chunks > 1 else moved)
    unhidden_s = chunks * node.push_s + byte_s * moved - (compute_s - last_s)
    return LatencyEstimate(wait_s, compute_s, max(exposed_s, unhidden_s))


def local_estimate(node: NodeView, teacher: CostModel | None, num_tokens: int, cached: int) -> LatencyEstimate | None:
    """Predict how long a decode node takes to compute a prompt in the budget that its decodes leave.

    Return None if the node has no cost model.

    A decode node's model can predict the cost of prompts only after the node has computed prompts. Until then, this
    cost is taken from `teacher`, the prefill node's model. Afterwards, the node's own model predicts both the time of a
    step's decodes and the time that a chunk of the prompt adds to the step.
    """
    prompts = node.cost if node.cost_is_learnt or teacher is None else teacher
    if node.cost is None or prompts is None:
        return None
    own = max(1, num_tokens - cached)
    pairs = pairs_of(num_tokens - own, own)
    num_decodes = node.num_decodes
    decodes = StepWork(num_decodes=num_decodes, decode_context=node.decode_context)
    alone_s = node.cost.seconds(decodes) if num_decodes else 0.0
    fits = _room(node, alone_s, prompts, decodes, num_tokens - own // 2)
    room = max(fits, FLOOR_TOKENS) if node.tbt_slo_s else fits  # `SloBudget` always allows FLOOR_TOKENS

    def step_seconds(count: int) -> float:
        return alone_s + chunk_seconds(prompts, count + num_decodes, num_decodes)

    wait_s = prompt_seconds(step_seconds, node.outstanding_tokens, room) + prompts.per_pair * node.outstanding_pairs
    compute_s = prompt_seconds(step_seconds, own, room) + prompts.per_pair * pairs
    if node.tbt_slo_s:  # delays within the SLO are not counted as harm
        return LatencyEstimate(wait_s, compute_s, keeps_tbt=fits >= min(own, FLOOR_TOKENS))
    return LatencyEstimate(wait_s, compute_s, harm_s=num_decodes * (compute_s - ceil(own / room) * alone_s))


def prompt_seconds(step_seconds: Callable[[int], float], tokens: int, room: int) -> float:
    """Return the seconds to compute `tokens` prompt tokens in steps of at most `room` tokens, excluding attention."""
    full, rest = divmod(tokens, room)
    return (full * step_seconds(room) if full else 0.0) + (step_seconds(rest) if rest else 0.0)


def chunk_seconds(cost: CostModel, tokens: int, others: int = 0) -> float:
    """Return the predicted seconds of a step of `tokens` tokens, excluding attention.

    If `others` is not 0, return the additional seconds relative to a step of `others` tokens.
    """
    if not others:
        return cost.overhead + cost.per_token * max(cost.knee_tokens, tokens)
    return cost.per_token * (max(cost.knee_tokens, tokens) - max(cost.knee_tokens, others))


def _room(node: NodeView, alone_s: float, cost: CostModel, decodes: StepWork, start: int) -> int:
    """Return how many prompt tokens, from position `start` on, fit into a step together with the decodes."""
    room = max(1, node.budget_tokens - decodes.num_decodes)
    if not node.tbt_slo_s or not decodes.num_decodes:
        return room
    spare_s = node.tbt_slo_s / (1 + cost.margin) - alone_s
    return int(min(room, tokens_within(cost, cost.seconds(decodes) + spare_s, decodes, start)))


def choose(remote: LatencyEstimate | None, local: LatencyEstimate | None) -> tuple[bool, str]:
    """Return whether the decode node computes the prompt itself, and the reason (a metric label).

    A decode node with a TBT SLO computes the prompt if it still keeps the SLO and is faster. Without an SLO, the
    delay that the chunks add to running decodes is included in the local time. A tie favors the prefill node.
    """
    if remote is None or local is None:
        return False, "no_prediction"
    if not local.keeps_tbt:
        return False, "keeps_tbt"
    if local.total_s >= remote.total_s:
        return False, "remote_sooner"
    return True, "prefill_overloaded" if local.total_s >= remote.total_s - remote.wait_s else "local_sooner"
