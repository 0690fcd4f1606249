"""The state machine of a handoff under events in random order."""

import random

from hypothesis import given
from hypothesis import strategies as st

from prefill_node.handoff import CommitAction, Handoff, HandoffPhase, PushAction, StopAction

RESERVATION = b"t" * 16


class Peer:
    """A decode node that checks what it receives."""

    def __init__(self, num_blocks: int, num_held: int) -> None:
        self.targets = tuple(range(100, 100 + num_blocks - num_held))
        self.num_held = num_held
        self.received: list[int] = []
        self.commits = 0
        self.stops: list[str] = []


@given(
    num_prompt=st.integers(1, 40),
    block_tokens=st.integers(1, 8),
    chunk=st.integers(1, 12),
    held=st.integers(0, 6),
    trouble=st.sampled_from(["none", "push", "commit", "abort", "refused"]),
    seed=st.integers(0, 2**32),
)
def test_complete_blocks_are_pushed_once_in_order_and_the_end_is_reported_once(
    num_prompt: int, block_tokens: int, chunk: int, held: int, trouble: str, seed: int
) -> None:
    rng = random.Random(seed)
    handoff = Handoff(num_prompt, block_tokens)
    peer = Peer(handoff.num_blocks, min(held, num_prompt // block_tokens))
    computed = 0
    sampled = answered = False
    current: PushAction | CommitAction | StopAction | None = None
    for _ in range(1000):
        if handoff.phase is HandoffPhase.DONE:
            break
        choices = ["look"]
        if computed < num_prompt:
            choices.append("compute")
        elif not sampled:
            choices.append("sample")
        if not answered:
            choices.append("answer")
        if current is not None:
            choices.append("complete")
        if trouble == "abort":
            choices.append("abort")
        choice = rng.choice(choices)
        if choice == "compute":
            computed = min(num_prompt, computed + chunk)
            handoff.computed(computed)
        elif choice == "sample":
            sampled = True
            handoff.sampled(7)
        elif choice == "answer":
            answered = True
            if trouble == "refused":
                handoff.failed("no room")
            else:
                handoff.granted(RESERVATION, peer.num_held, peer.targets)
        elif choice == "abort":
            handoff.cancel("aborted")
        elif choice == "complete":
            assert current is not None
            action, current = current, None
            if isinstance(action, PushAction) and trouble == "push" and rng.random() < 0.3:
                handoff.failed("the peer is gone")
            elif isinstance(action, CommitAction) and trouble == "commit":
                handoff.failed("checksums differ")
            else:
                if isinstance(action, PushAction):
                    assert action.targets == peer.targets[action.first - peer.num_held : action.last - peer.num_held]
                    peer.received += range(action.first, action.last)
                peer.commits += isinstance(action, CommitAction)
                handoff.done()
        else:
            action = handoff.next_action()
            assert action is None or current is None, "two actions at once"
            if isinstance(action, PushAction):
                whole = computed == num_prompt
                assert action.last <= (handoff.num_blocks if whole else computed // block_tokens)
            if isinstance(action, CommitAction):
                assert sampled
                assert len(peer.received) + peer.num_held == handoff.num_blocks
            if isinstance(action, StopAction):
                peer.stops.append(action.reason)
            current = action or current
    assert handoff.phase is HandoffPhase.DONE, "a handoff always ends"
    assert peer.received == list(range(peer.num_held, peer.num_held + len(peer.received)))
    assert len(peer.stops) <= 1
    assert handoff.committed or peer.stops, "the peer is informed of the end"
    if trouble == "none":
        assert handoff.committed
        assert not peer.stops
