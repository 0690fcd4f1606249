"""Captured device work: recorded once, replayed with one call; what may not be captured runs between two pieces.

A pass that is broken at attention into pieces (SGLang PR #19102, vLLM's breakable graphs) needs no compiler: capture
ends, the call is remembered, capture begins again.
"""

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Graph(Protocol):
    """The work that is issued between `begin` and `end`. A replay repeats it at the same addresses and sizes."""

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def replay(self) -> None: ...


class GraphPool(Protocol):
    """Memory that all graphs share: what a graph made is valid until another one, of another pass, is replayed."""

    def graph(self) -> Graph: ...

    def prepare(self, work: Callable[[], object]) -> None:
        """Runs `work` once, uncaptured, so that it has compiled and allocated what it keeps."""
        ...

    def capture(self, work: Callable[[], T]) -> T:
        """Calls `work`, which begins and ends graphs, where capture is possible."""
        ...

    def reclaim(self) -> None:
        """The next replay is of another pass."""
        ...


class CudaGraph:
    def __init__(self, pool: "CudaGraphPool") -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def begin(self) -> None:
        # thread_local: other threads (channels) may allocate and copy while this one captures.
        self._graph.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")

    def end(self) -> None:
        self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphPool:
    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def graph(self) -> CudaGraph:
        return CudaGraph(self)

    def prepare(self, work: Callable[[], object]) -> None:
        self.capture(work)

    def capture(self, work: Callable[[], T]) -> T:
        """On a stream of its own: the default stream cannot be captured. Without Python's collector, which might end an
        older graph meanwhile: that ends the capture too."""
        self._stream.wait_stream(torch.cuda.current_stream())
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                result = work()
        finally:
            if collects:
                gc.enable()
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def reclaim(self) -> None:
        """Addresses are fixed: there is nothing to do."""


class GraphRecording:
    """One pass: graphs, and calls between them, in order."""

    def __init__(self, pool: GraphPool) -> None:
        self._pool = pool
        self._graph: Graph | None = None
        self._pieces: list[Callable[[], None]] = []
        self.num_graphs = 0

    def capture(self, work: Callable[[], T]) -> T:
        """What `work` returns lives where every replay writes it again."""

        def whole() -> T:
            self._begin()
            try:
                result = work()
            except BaseException:
                with suppress(Exception):  # CUDA refuses to end what has failed: that error would hide the first
                    self._end()
                raise
            self._end()
            return result

        return self._pool.capture(whole)

    def pause(self, call: Callable[[], None]) -> None:
        """Inside `work`: `call` is made at every replay, between what came before and what follows."""
        self._end()
        self._pieces.append(call)
        self._begin()

    def replay(self) -> None:
        self._pool.reclaim()
        for piece in self._pieces:
            piece()

    def _begin(self) -> None:
        self._graph = self._pool.graph()
        self._graph.begin()

    def _end(self) -> None:
        assert self._graph is not None, "paused or ended outside of a capture"
        self._graph.end()
        self._pieces.append(self._graph.replay)
        self._graph = None
        self.num_graphs += 1
