"""Test prompts that one node computes in the blocks of another node: two schedulers share a device, and no block is
copied."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.geometry import Geometry, Group
from scheduler.request import Request, RequestState, Step
from scheduler.scheduler import Scheduler, StepLimits
from tests.scheduler.drive import GROUPS, Copied, Device, expected

BLOCK_TOKENS = 4


def run(scheduler: Scheduler, device: Device, step: Step) -> list[list[int]]:
    tokens = device.run([Copied(piece, piece.request.tables) for piece in step.slices])
    scheduler.update(step, tokens)
    return tokens


def hand_over(client: Scheduler, owner: Scheduler, received: Request) -> Request:
    """Add a request with the blocks of `received` to `client`, as nodes do between the grant and the first chunk."""
    borrowing = Request(
        received.id, list(received.tokens), received.num_prompt, received.max_tokens, send_kv=True, shared_pool=True
    )
    geometry, held = owner.geometry, received.num_computed // owner.block_tokens
    tables = zip(received.tables, geometry.attention, strict=True)
    held_rows = [row for table, group in tables for row in table[: held * group.rows] if row] + received.snapshot
    assert geometry.lent_rows(received.num_prompt, held) == (len(held_rows), len(received.reserved))
    borrowed = geometry.borrow(held, held_rows, received.reserved)
    assert borrowed == (received.tables, received.states, received.snapshot)
    borrowing.tables, borrowing.states, borrowing.snapshot = borrowed
    borrowing.num_computed = received.num_computed
    client.add(borrowing)
    return borrowing


@given(
    prompts=st.lists(st.lists(st.integers(3, 6), min_size=1, max_size=30), min_size=1, max_size=6),
    budget=st.integers(1, 9),
    aborted=st.sets(st.integers(0, 5)),
    groups=GROUPS,
)
def test_borrowed_requests_take_no_block_of_the_computing_node_and_tokens_are_right(
    prompts: list[list[int]], budget: int, aborted: set[int], groups: tuple[Group, ...]
) -> None:
    geometry = Geometry(BLOCK_TOKENS, groups)
    device = Device(geometry)
    client = Scheduler(StepLimits(max_num_batched_tokens=budget), 2, BLOCK_TOKENS, groups=groups)
    num_rows = 40 * geometry.block_rows + 12 * geometry.state_rows
    owner = Scheduler(StepLimits(max_num_batched_tokens=8), num_rows, BLOCK_TOKENS, groups=groups)
    rows = [Request(str(i), list(p), len(p), 5, receive_kv=True, shared_pool=True) for i, p in enumerate(prompts)]
    for row in rows:
        owner.add(row)
    borrowed: dict[str, Request] = {}
    answers: dict[str, list[int]] = {}
    for _ in range(400):
        step = owner.schedule()
        for received in step.receiving:
            assert received.num_computed < len(received.tokens), "the last token is always computed, for its logits"
            borrowed[received.id] = hand_over(client, owner, received)
        if step.slices:
            run(owner, device, step)
        ours = client.schedule()
        if ours.slices:
            run(client, device, ours)
        assert client.ledger().free == 1
        for row in rows:
            borrowing = borrowed.get(row.id)
            if borrowing is None or row.state is not RequestState.RECEIVING_KV:
                continue
            if int(row.id) in aborted and borrowing.num_computed > borrowing.num_prompt // 2:
                client.abort(borrowing)
                assert borrowing.num_in_flight == 0
                owner.abort(row)
            elif borrowing.state is RequestState.SENDING_KV:
                client.abort(borrowing)
                is_second = geometry.state_rows > 0 and borrowing.states[0] != row.states[0]
                owner.kv_received(row, borrowing.tokens[-1], int(is_second))
        answers = {row.id: row.tokens[row.num_prompt :] for row in rows if row.finish is not None}
        if all(row.state is RequestState.DONE for row in rows):
            break
    assert all(row.state is RequestState.DONE for row in rows)
    assert all(tokens == expected(prompts[int(name)], 5) for name, tokens in answers.items())
    assert {int(row.id) for row in rows if row.finish is None} <= aborted
    assert (owner.ledger().owned, owner.ledger().reserved, owner.ledger().quarantined) == (0, 0, 0)
    assert not client.has_work
