"""Room for running requests: how many blocks they lack and may still want, and who gives up its own when there are
too few. Plain functions of requests; nobody's blocks move here."""

from collections.abc import Sequence

from scheduler.request import Request, Step, cdiv

# How much of what running requests may still generate is kept free when a new one is admitted: most stop early,
# and preemption catches the rest (the estimate of SGLang's new-token ratio, with its cap on long limits).
GROWTH_SHARE = 0.3
GROWTH_CAP_TOKENS = 4096


def blocks_missing(request: Request, count: int, block_tokens: int) -> int:
    """Blocks to allot before `count` more tokens can be computed."""
    return max(0, cdiv(request.num_scheduled + count, block_tokens) - len(request.blocks))


def growth_of(request: Request, block_tokens: int) -> int:
    """Blocks to keep free for what a request may still generate here."""
    if request.send_kv:
        return 0
    tokens = GROWTH_SHARE * min(request.remaining_tokens, GROWTH_CAP_TOKENS)
    return cdiv(int(tokens), block_tokens)


def growth_of_all(running: Sequence[Request], block_tokens: int) -> int:
    """What running requests still need: the rest of prompts under way in full, their answers in part."""
    growth = 0
    for request in running:
        rest = cdiv(request.num_tokens, block_tokens) - len(request.blocks)
        growth += rest + growth_of(request, block_tokens)
    return growth


def choose_preemption_victim(request: Request, running: Sequence[Request], step: Step) -> Request | None:
    """Who is preempted so that `request` gets room: the last in turn that is not in this step yet, down to the
    request itself; None: it has to wait.

    A request that leaves is never preempted, as its blocks are being read by a transfer. A prompt behind which
    only members of this step come waits for them: it is the older one.
    """
    taken = {id(piece.request) for piece in step.slices}
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
