"""A ring of the latest steps of one node. 65,536 steps take 10 MB. A step is found by its time in O(log n)."""

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from scheduler.cost import CostModel, StepWork
from shared.rpc.messages import StepRecord, unpack_ids

CAPACITY = 65_536
MEMBERS_BYTES = 16 << 20  # limit for the slices (`StepMember`) of one node's steps; the oldest are dropped first
MAX_REASONS = 256
MAX_REASON = 64  # maximum characters of a reason
MAX_NUMBER = 2**32  # limit of a step's microseconds and tokens; larger numbers would overflow sums


class StepRow(NamedTuple):
    """The contents of a `shared.rpc.messages.StepRecord`, with its time on the router's clock."""

    number: int
    start_ns: int
    duration_us: int
    host_us: int
    predicted_us: int
    budget: int
    reason_code: int  # see `StepRing.reason`
    num_prefills: int
    prefill_tokens: int
    prefill_pairs: int
    num_decodes: int
    decode_context: int
    num_preempted: int
    running: int
    waiting: int
    blocks_free: int
    blocks_cached: int
    blocks_owned: int
    blocks_reserved: int
    draft_tokens: int
    accepted_tokens: int
    interference_ns: int  # by how much the step's prompts delayed the node's decodes

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_us * 1000


# The fields that are copied from a StepRecord.
COPIED = [name for name in StepRow._fields if name not in {"reason_code", "interference_ns"}]
SUMMED = [
    StepRow._fields.index(name)
    for name in ("duration_us", "prefill_tokens", "num_decodes", "accepted_tokens", "interference_ns")
]
FIELDS = (
    *("number", "start_ms", "duration_ms", "host_ms", "predicted_ms", "budget", "reason"),
    *("num_prefills", "prefill_tokens", "num_decodes", "decode_context", "preempted", "running", "waiting"),
    *("free", "cached", "owned", "reserved", "draft_tokens", "accepted_tokens"),
    "prefill_pairs",
)


class StepMember(NamedTuple):
    """A slice of a step. `serial` is the request's number on its node."""

    serial: int
    start: int
    num_tokens: int
    is_chunk: bool


class StepRing:
    """A ring of StepRows, with the slices of their steps. A NodeHistory owns the ring, and fills it on the event loop.

    The index of a step is the number of steps that were added before it. Other threads may read the ring. If a row is
    overwritten while they read the ring, they get the newer step.
    """

    def __init__(self, capacity: int = CAPACITY, members_bytes: int = MEMBERS_BYTES) -> None:
        self.model: CostModel | None = None  # the node's step-time model, as last reported
        self.num_ever = 0
        self._capacity = capacity
        self._rows = np.zeros((capacity, len(StepRow._fields)), np.int64)  # takes no memory before it is filled
        self._members: dict[int, bytes] = {}  # packed members by step number, oldest first
        self._members_bytes = 0
        self._members_limit = members_bytes
        self._reasons: list[str] = []

    def __len__(self) -> int:
        return min(self.num_ever, self._capacity)

    def add(self, record: StepRecord) -> StepRow:
        """Append the node's next step. Raises ValueError if a number is out of range."""
        summed = (record.duration_us, record.host_us, record.prefill_tokens, record.num_decodes, record.accepted_tokens)
        if min(summed) < 0 or max(summed) > MAX_NUMBER or record.start_ns < 0:
            raise ValueError(f"step {record.number}: a number is out of range")
        copied = {name: getattr(record, name) for name in COPIED}
        code = self._code(record.reason[:MAX_REASON])
        row = StepRow(**copied, reason_code=code, interference_ns=interference_ns(record, self.model))
        try:
            self._rows[self.num_ever % self._capacity] = row
        except OverflowError as error:
            raise ValueError(f"step {record.number}: {error}") from None
        self.num_ever += 1
        self._keep_members(record)
        return row

    def row(self, index: int) -> StepRow:
        """Return the step with this index, which must still be in the ring."""
        return StepRow(*self._rows[index % self._capacity].tolist())

    def rows(self, first: int = 0, last: int | None = None) -> Iterator[StepRow]:
        """Yield the steps with an index of at least `first` and below `last`, if they are still in the ring."""
        for index in range(max(first, self.num_ever - len(self)), self.num_ever if last is None else last):
            yield self.row(index)

    def place(self, at_ns: int) -> int:
        """Return the index of the first step in the ring that began at `at_ns` or later."""
        return self._bisect(1, at_ns)

    def latest(self) -> StepRow | None:
        return self.row(self.num_ever - 1) if self.num_ever else None

    def numbered(self, number: int) -> StepRow | None:
        index = self._bisect(0, number)
        row = self.row(index) if index < self.num_ever else None
        return row if row is not None and row.number == number else None

    def reason(self, row: StepRow) -> str:
        return self._reasons[row.reason_code] if row.reason_code >= 0 else "other"

    def shown(self, row: StepRow) -> list[object]:
        """Return the values of `FIELDS`, as the API shows them."""
        times = (row.start_ns / 1e6, row.duration_us / 1e3, row.host_us / 1e3, row.predicted_us / 1e3)
        prompts = (row.num_prefills, row.prefill_tokens, row.num_decodes, row.decode_context)
        return [row.number, *times, row.budget, self.reason(row), *prompts, *row[12:21], row.prefill_pairs]

    def members(self, number: int) -> list[StepMember] | None:
        """Return the slices of a step, chunks first, or None if they were dropped or malformed."""
        data, row = self._members.get(number), self.numbered(number)
        try:
            return None if data is None or row is None else members_of(data, row.num_prefills)
        except ValueError:
            return None

    def sums(self, start_ns: int, end_ns: int) -> tuple[int, int, int, int]:
        """Return four totals of the steps that began in [start_ns, end_ns): number, duration in nanoseconds, tokens,
        and interference in nanoseconds."""
        first, last = self.place(start_ns), self.place(end_ns)
        rows = np.arange(first, last) % self._capacity
        busy_us, prompts, decodes, accepted, interference = self._rows[rows[:, None], SUMMED].sum(axis=0).tolist()
        return last - first, busy_us * 1000, prompts + decodes + accepted, interference

    def _bisect(self, field: int, value: int) -> int:
        """Return the first index whose `field` (0: number, 1: start_ns) is at least `value`. Both fields increase."""
        first = self.num_ever - len(self)
        column = self._rows[:, field]
        places = range(first, self.num_ever)
        return first + bisect_left(places, value, key=lambda index: int(column[index % self._capacity]))

    def _code(self, reason: str) -> int:
        if reason not in self._reasons:
            if len(self._reasons) == MAX_REASONS:
                return -1
            self._reasons.append(reason)
        return self._reasons.index(reason)

    def _keep_members(self, record: StepRecord) -> None:
        self._members_bytes += len(record.members) - len(self._members.pop(record.number, b""))
        self._members[record.number] = record.members
        while self._members_bytes > self._members_limit or len(self._members) > self._capacity:
            self._members_bytes -= len(self._members.pop(next(iter(self._members))))


def interference_ns(step: StepRecord, model: CostModel | None) -> int:
    """Return the nanoseconds by which the prompts in a step delayed the requests that decode on the node.

    This is the duration of the step, including host time, minus the duration that the step-time model predicts for the
    step's decodes alone. A step without decodes delays the node's decodes by its whole duration. The result is 0 if the
    step has no prompts, or if it has decodes but `model` is None.
    """
    if step.prefill_tokens == 0 or (model is None and step.num_decodes):
        return 0
    alone = StepWork(num_decodes=step.num_decodes, decode_context=step.decode_context, draft_tokens=step.draft_tokens)
    alone_s = min(model.seconds(alone), MAX_NUMBER) if model is not None and step.num_decodes else 0.0
    return max(0, (step.duration_us + step.host_us) * 1000 - round(alone_s * 1e9))


def members_of(data: bytes, num_chunks: int) -> list[StepMember]:
    """Unpack a step's slices. Raises ValueError if the bytes are malformed."""
    ids = unpack_ids(data)
    if len(ids) % 3:
        raise ValueError("the number of ids of a step's members is not a multiple of 3")
    triples = zip(ids[::3], ids[1::3], ids[2::3], strict=True)
    return [StepMember(*triple, index < num_chunks) for index, triple in enumerate(triples)]
