"""A fake CUDA graph that runs on a CPU and is stricter than a real one, to expose errors in a captured pass.

The capture records each operation with its arguments: tensors by address, and numbers by value. A replay writes to the
outputs of the recorded operations. Before a replay, all tensors that captured operations created are poisoned.
Therefore each of these errors makes the result wrong: an input is not updated, the host reads a number that changes
later, a result is used after the next replay began, or padding leaks into a sum. As with CUDA, an operation that waits
for the device raises an error.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
# Each of these operations makes the host wait for the device, or copies from host memory that is not pinned.
REFUSED = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "lift_fresh"}


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, graph: "FakeGraph") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in REFUSED:
            raise RuntimeError(f"{name}: a captured pass may not wait for the device")
        result = func(*args, **(kwargs or {}))
        self._graph.record(func, args, kwargs or {}, result)
        return result


class FakeGraph:
    capturing: ClassVar["FakeGraph | None"] = None

    def __init__(self) -> None:
        self._operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self._made: list[Tensor] = []
        self._recorder = _Recorder(self)

    def capture_begin(self) -> None:
        FakeGraph.capturing = self
        self._recorder.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        FakeGraph.capturing = None

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        results = _tensors(result)
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        self._operations.append((func, args, kwargs, results))
        self._made += [tensor for tensor in results if _storage(tensor) not in given]

    def poison(self) -> None:
        for tensor in self._made:
            tensor.fill_(_poison(tensor.dtype))

    def replay(self) -> None:
        for func, args, kwargs, results in self._operations:
            for old, new in zip(results, _tensors(func(*args, **kwargs)), strict=True):
                if _storage(old) != _storage(new):  # the result is neither a view nor written in place
                    old.copy_(new)


@contextmanager
def recorded_launches(launcher: type) -> Iterator[None]:
    """Also record kernel launches. A launch is a call of `launcher`, the class of Triton's interpreter for kernels."""
    launch = launcher.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        if FakeGraph.capturing is not None:
            FakeGraph.capturing.record(lambda *a, **k: launch(self, *a, **k), args, kwargs, None)
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            launch(self, *args, **kwargs)

    launcher.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        launcher.__call__ = launch  # type: ignore[method-assign]


class FakeGraphPool:
    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []

    def begin(self) -> FakeGraph:
        self.graphs.append(FakeGraph())
        self.graphs[-1].capture_begin()
        return self.graphs[-1]

    def run(self, work: Callable[[], T]) -> T:
        return work()

    def reclaim(self) -> None:
        for graph in self.graphs:
            graph.poison()


def _poison(dtype: torch.dtype) -> float:
    if dtype == torch.bool:
        return True
    return torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.numel()]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
