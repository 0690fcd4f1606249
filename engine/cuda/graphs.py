"""CUDA graphs: device work that is captured once and replayed with one call. Other work may run between graphs.

A pass can be split at each attention layer into several graphs, as in SGLang PR #19102 and vLLM's breakable graphs. No
compiler is needed for this: the capture ends, the call of attention is recorded, and another capture begins.
"""

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

T = TypeVar("T")


class CudaGraphPool:
    """Memory that all graphs share. A graph's results are valid until a graph of another pass is replayed."""

    def __init__(self, device: torch.device) -> None:
        self._handle = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self) -> torch.cuda.CUDAGraph:
        """Return a graph that captures work until `capture_end` is called. Replays use the same addresses and sizes."""
        graph = torch.cuda.CUDAGraph()
        # In the mode thread_local, the threads of channels may allocate and copy while this thread captures.
        graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
        return graph

    def run(self, work: Callable[[], T]) -> T:
        """Call `work` on a separate stream, since the default stream cannot be captured.

        Python's garbage collector is disabled during the call: if it destroyed an older graph, the capture would fail.
        """
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
        """Do nothing. Test fakes overwrite the memory here, because a replay may overwrite another pass's results."""


class GraphRecording:
    """A captured pass: its graphs and the calls between them, in order."""

    def __init__(self, pool: CudaGraphPool) -> None:
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._pieces: list[Callable[[], None]] = []
        self.num_graphs = 0

    def capture(self, work: Callable[[], T]) -> T:
        """Capture `work` and return its result. Every replay writes the result to the same memory."""

        def whole() -> T:
            self._begin()
            try:
                result = work()
            except BaseException:
                with suppress(Exception):  # ending a failed capture raises another error
                    self._end()
                raise
            self._end()
            return result

        return self._pool.run(whole)

    def pause(self, call: Callable[[], None]) -> None:
        """Interrupt the capture, so that every replay runs `call` at this point. Must be called by `work`."""
        self._end()
        self._pieces.append(call)
        self._begin()

    def replay(self) -> None:
        self._pool.reclaim()
        for piece in self._pieces:
            piece()

    def _begin(self) -> None:
        self._graph = self._pool.begin()

    def _end(self) -> None:
        assert self._graph is not None, "paused or ended outside of a capture"
        self._graph.capture_end()
        self._pieces.append(self._graph.replay)
        self._graph = None
        self.num_graphs += 1
