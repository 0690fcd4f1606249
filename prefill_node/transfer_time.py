"""How long a push of KV takes, learnt from the latest ones: seconds for any push, and seconds for each byte of it."""

from collections import deque
from itertools import combinations
from statistics import median

RECENT = 32
REFIT = 8  # pushes between two fits: one takes a fraction of a millisecond


class TransferTimeModel:
    """The slopes between all pairs of pushes, and their median: a few slow pushes change nothing (Theil and Sen)."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT)  # bytes, seconds
        self._num_pushes = 0
        self._seconds: list[float] = []

    def observe(self, num_bytes: int, seconds: float) -> None:
        """One push of so many bytes took so long."""
        self._recent.append((num_bytes, seconds))
        self._num_pushes += 1
        if self._num_pushes % REFIT == 1:
            self._seconds = self._fit()

    def seconds(self) -> list[float]:
        """[of any push, of each byte]; empty before the first push. Where all pushes have one size, which part is
        whose cannot be seen, and it is all the bytes'."""
        return self._seconds

    def _fit(self) -> list[float]:
        pairs = combinations(self._recent, 2)
        slopes = [(s - t) / (b - a) for (a, t), (b, s) in pairs if a != b]
        per_byte = max(0.0, median(slopes)) if slopes else median(s / b for b, s in self._recent)
        return [max(0.0, median(s - per_byte * b for b, s in self._recent)), per_byte]
