"""Conditional disaggregation: whether a prompt is computed on a prefill node, or by the decode node itself.

Pure arithmetic over step-time models that the nodes fitted to their own steps (scheduler.fit). NVIDIA Dynamo decides
by a fixed prompt length and queue depth; here both sides are predicted in seconds, and the sooner one is taken. The
decode node is taken to mix chunks with decodes, as the policy stall_free does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil

from scheduler.budget import FLOOR_TOKENS, tokens_within
from scheduler.cost import CostModel, StepWork, pairs_of


@dataclass(slots=True)
class NodeView:
    """What placement knows of a live node. Tokens are counted from what the router sent and the node told."""

    id: str
    role: str
    outstanding_tokens: int = 0  # prompt tokens sent there and not computed yet
    running: int = 0
    max_num_seqs: int = 1
    kv_tokens: int = 0  # tokens whose KV is or will be there
    kv_capacity_tokens: int = 1
    placed: int = 0  # requests ever sent there: among equals, whose turn it is
    outstanding_pairs: int = 0  # query-key pairs of the outstanding tokens
    decode_context: int = 0  # tokens whose KV its decodes read each step
    budget_tokens: int = 512  # of a step, at most
    tbt_slo_s: float = 0.0  # longest time between two tokens that it promises; 0: none
    cost: CostModel | None = None
    cost_is_learnt: bool = True  # it has computed enough of them for its model to tell what they cost
    push_s: float = 0.0  # seconds a push of KV blocks takes, whatever its size
    byte_s: float = 0.0  # and for each byte of it
    token_bytes: int = 0  # KV of one token
    prefilling: int = 0  # of those running: whose prompt is not computed yet, here or elsewhere
    incarnation_id: str = ""
    shared_pool_owner: str = ""  # boot of the only decode node that a prefill node can hand prompts to; "": to any
    stale: bool = False  # it ran nothing for so long that its model may not hold any more

    @property
    def num_decodes(self) -> int:
        return max(0, self.running - self.prefilling)


@dataclass(frozen=True, slots=True)
class LatencyEstimate:
    """Predicted seconds of one prompt on one placement. The wait for room in a KV pool is not in it."""

    wait_s: float  # for the prompts before it
    compute_s: float  # of its own chunks
    transfer_s: float = 0.0  # after its last chunk, until the decode node may go on
    harm_s: float = 0.0  # that its chunks add to the tokens of all running decodes together
    keeps_tbt: bool = True

    @property
    def first_token_s(self) -> float:
        """The prefill node tells the first token itself, so the transfer delays only the second."""
        return self.wait_s + self.compute_s

    @property
    def ready_s(self) -> float:
        """Until the decode node may compute the second token."""
        return self.wait_s + self.compute_s + self.transfer_s

    @property
    def total_s(self) -> float:
        """What everybody waits for it together."""
        return self.ready_s + self.harm_s


def remote_estimate(node: NodeView, num_tokens: int, cached: int, cached_at_decode: int) -> LatencyEstimate | None:
    """Of a prompt computed on a prefill node; None as long as its steps have no model.

    All but the last chunk's blocks travel while the next chunk is computed, as far as the link is fast enough.
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
    """Of a prompt computed on a decode node, in the room that its decodes leave in each step; None without a model.

    What prompts cost, a decode node learns only by computing some; until then it is taken from the prefill node's
    model, `teacher`. Both agree where a node's own model knows all: decodes and chunk add up to the model's step.
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
    room = max(fits, FLOOR_TOKENS) if node.tbt_slo_s else fits  # which an SLO grants prompts whatever it costs

    def step_seconds(count: int) -> float:
        return alone_s + chunk_seconds(prompts, count + num_decodes, num_decodes)

    wait_s = prompt_seconds(step_seconds, node.outstanding_tokens, room) + prompts.per_pair * node.outstanding_pairs
    compute_s = prompt_seconds(step_seconds, own, room) + prompts.per_pair * pairs
    if node.tbt_slo_s:  # slower tokens are what the SLO allows
        return LatencyEstimate(wait_s, compute_s, keeps_tbt=fits >= min(own, FLOOR_TOKENS))
    return LatencyEstimate(wait_s, compute_s, harm_s=num_decodes * (compute_s - ceil(own / room) * alone_s))


def prompt_seconds(step_seconds: Callable[[int], float], tokens: int, room: int) -> float:
    """Of computing `tokens` prompt tokens, at most `room` a step; attention (`CostModel.per_pair`) is not in it."""
    full, rest = divmod(tokens, room)
    return (full * step_seconds(room) if full else 0.0) + (step_seconds(rest) if rest else 0.0)


def chunk_seconds(cost: CostModel, tokens: int, beside: int = 0) -> float:
    """Of a step of so many tokens without attention; with `beside`, what it takes longer than those tokens alone."""
    if not beside:
        return cost.overhead + cost.per_token * max(cost.knee_tokens, tokens)
    return cost.per_token * (max(cost.knee_tokens, tokens) - max(cost.knee_tokens, beside))


def _room(node: NodeView, alone_s: float, cost: CostModel, decodes: StepWork, start: int) -> int:
    """Prompt tokens, from position `start` on, that fit into a step beside the decodes."""
    room = max(1, node.budget_tokens - decodes.num_decodes)
    if not node.tbt_slo_s or not decodes.num_decodes:
        return room
    spare_s = node.tbt_slo_s / (1 + cost.margin) - alone_s
    return int(min(room, tokens_within(cost, cost.seconds(decodes) + spare_s, decodes, start)))


def choose(remote: LatencyEstimate | None, local: LatencyEstimate | None) -> tuple[bool, str]:
    """Whether the prompt is computed by the decode node itself, and why (a word that is counted and shown).

    With a TBT SLO, local wins when it keeps it and is sooner. Without one, the delay that its chunks add to each
    running decode counts as much as its own: the sum of what everybody waits decides. Ties go to the prefill node.
    """
    if remote is None or local is None:
        return False, "no_prediction"
    if not local.keeps_tbt:
        return False, "keeps_tbt"
    if local.total_s >= remote.total_s:
        return False, "remote_sooner"
    return True, "prefill_overloaded" if local.total_s >= remote.total_s - remote.wait_s else "local_sooner"
