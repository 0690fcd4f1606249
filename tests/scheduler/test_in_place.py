"""Prompts that one node computes in another node's blocks: two schedulers share a device, and no block is copied."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.request import Request, RequestState, Step
from scheduler.scheduler import Scheduler, StepLimits
from tests.scheduler.drive import Device, expected

BLOCK_TOKENS = 4


def run(scheduler: Scheduler, device: Device, step: Step) -> list[int | None]:
    tables, rows = [list(s.request.blocks) for s in step.slices], [list(s.request.tokens) for s in step.slices]
    tokens = device.run(step, tables, rows)
    scheduler.update(step, tokens)
    return tokens


def hand_over(borrower: Scheduler, lender: Scheduler, landing: Request) -> Request:
    """Do what the two nodes do between the grant and the first chunk: add the request with its blocks to `borrower`."""
    guest = Request(
        landing.id, list(landing.tokens), landing.num_prompt, landing.max_tokens, send_kv=True, shared_pool=True
    )
    guest.blocks, guest.num_computed = list(landing.blocks), landing.num_computed
    borrower.add(guest)
    assert len(guest.blocks) * lender.block_tokens >= len(guest.tokens)
    return guest


@given(
    prompts=st.lists(st.lists(st.integers(3, 6), min_size=1, max_size=30), min_size=1, max_size=6),
    budget=st.integers(1, 9),
    aborted=st.sets(st.integers(0, 5)),
)
def test_guests_take_no_block_of_their_computing_node_and_tokens_are_right(
    prompts: list[list[int]], budget: int, aborted: set[int]
) -> None:
    device = Device(BLOCK_TOKENS)
    borrower = Scheduler(StepLimits(max_num_batched_tokens=budget), 2, BLOCK_TOKENS)
    lender = Scheduler(StepLimits(max_num_batched_tokens=8), 40, BLOCK_TOKENS)
    rows = [Request(str(i), list(p), len(p), 5, receive_kv=True, shared_pool=True) for i, p in enumerate(prompts)]
    for row in rows:
        lender.add(row)
    guests: dict[str, Request] = {}
    answers: dict[str, list[int]] = {}
    for _ in range(400):
        step = lender.schedule()
        for landing in step.receiving:
            assert landing.num_computed < len(landing.tokens), "its last token is computed always, for its logits"
            guests[landing.id] = hand_over(borrower, lender, landing)
        if step.slices:
            run(lender, device, step)
        ours = borrower.schedule()
        if ours.slices:
            run(borrower, device, ours)
        assert borrower.ledger().free == 1
        for row in rows:
            guest = guests.get(row.id)
            if guest is None or row.state is not RequestState.RECEIVING_KV:
                continue
            if int(row.id) in aborted and guest.num_computed > guest.num_prompt // 2:
                borrower.abort(guest)
                assert guest.num_in_flight == 0
                lender.abort(row)
            elif guest.state is RequestState.SENDING_KV:
                borrower.abort(guest)
                lender.kv_received(row, guest.tokens[-1])
        answers = {row.id: row.tokens[row.num_prompt :] for row in rows if row.finish is not None}
        if all(row.state is RequestState.DONE for row in rows):
            break
    assert all(row.state is RequestState.DONE for row in rows)
    assert all(tokens == expected(prompts[int(name)], 5) for name, tokens in answers.items())
    assert {int(row.id) for row in rows if row.finish is None} <= aborted
    assert (lender.ledger().owned, lender.ledger().reserved, lender.ledger().quarantined) == (0, 0, 0)
    assert not borrower.has_work
