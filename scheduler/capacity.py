"""KV capacity: counts the blocks that requests need, and chooses the request to preempt when blocks run out.

These functions allocate and free nothing.
"""

from collections.abc import Sequence

from scheduler.request import Request, Step, cdiv

# When a request is admitted, blocks are kept free for this share of the tokens that running requests may still
# generate. Most requests stop early, and preemption handles the rest (SGLang's new-token ratio, with its cap).
GROWTH_SHARE = 0.3
GROWTH_CAP_TOKENS = 4096


def blocks_missing(request: Request, count: int, block_tokens: int) -> int:
    """Return how many blocks to allocate before `count` more tokens can be computed."""
    return max(0, cdiv(request.num_scheduled + count, block_tokens) - len(request.blocks))


def growth_of(request: Request, block_tokens: int) -> int:
    """Return how many blocks to keep free for the tokens that a request may still generate on this node."""
    if request.send_kv:
        return 0
    tokens = GROWTH_SHARE * min(request.remaining_tokens, GROWTH_CAP_TOKENS)
    return cdiv(int(tokens), block_tokens)


def growth_of_all(running: Sequence[Request], block_tokens: int) -> int:
    """Return how many blocks running requests still need for their whole prompts and for part of their answers."""
    growth = 0
    for request in running:
        rest = cdiv(request.num_tokens, block_tokens) - len(request.blocks)
        growth += rest + growth_of(request, block_tokens)
    return growth


def choose_preemption_victim(request: Request, running: Sequence[Request], step: Step) -> Request | None:
    """Return the request to preempt so that `request` gets blocks, or None if `request` has to wait.

    The victim is the last running request that is not in this step yet, possibly `request` itself. A request that
    sends its KV to a peer is never preempted, because a transfer reads its blocks. If all later requests are in this
    step, `request` waits for them.
    """
    taken = {id(slice_.request) for slice_ in step.slices}
    others_wait = False
    for candidate in reversed(running):
        if candidate is request:
            break
        if id(candidate) not in taken:
            if not candidate.send_kv:
                return candidate
            others_wait = True
    is_last = running[-1] is request
    may_wait = request.send_kv or len(running) == 1 or not (is_last or others_wait)
    return None if may_wait else request
