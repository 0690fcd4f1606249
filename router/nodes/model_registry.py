"""Divides the nodes of a registry among the models that a router serves."""

import logging
from collections.abc import Callable, Sequence

from shared.registry import Registry

log = logging.getLogger("baton.fleet")


class ModelRegistry(Registry):
    """A registry that lists only the nodes of one model. `model` is the model's name, which these nodes report."""

    def __init__(self, whole: "DividedRegistry", model: str) -> None:
        super().__init__()
        self._whole = whole
        self._model = model
        self._changed: Callable[[], None] = lambda: None

    @property
    def kind(self) -> str:  # type: ignore[override]
        return self._whole.registry.kind

    @property
    def state(self) -> str:  # type: ignore[override]
        return self._whole.registry.state

    @property
    def problem(self) -> str:  # type: ignore[override]
        return self._whole.registry.problem

    async def start(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        await self._whole.start()

    async def close(self) -> None:
        await self._whole.close()

    def refresh(self) -> None:
        nodes = self._whole.registry.nodes
        self.nodes = {name: info for name, info in nodes.items() if info.model == self._model}
        self._changed()


class DividedRegistry:
    """A registry whose nodes belong to several models. It has one part per model. The first call of `start` of any part
    starts the registry, and the first call of `close` closes it."""

    def __init__(self, registry: Registry, models: Sequence[str]) -> None:
        self.registry = registry
        self.parts = [ModelRegistry(self, model) for model in models]
        self._models = frozenset(models)
        self._is_running = False
        self._unknown: set[tuple[str, str]] = set()  # (node, model) of nodes whose model the router does not serve

    async def start(self) -> None:
        if not self._is_running:
            self._is_running = True
            await self.registry.start(self._refresh)

    async def close(self) -> None:
        if self._is_running:
            self._is_running = False
            await self.registry.close()

    def _refresh(self) -> None:
        nodes = self.registry.nodes.values()
        unknown = {(info.id, info.model) for info in nodes if info.model not in self._models}
        for node, model in sorted(unknown - self._unknown):
            known = ", ".join(sorted(self._models))
            log.warning("node %s serves the model %r, which is not among this router's models (%s)", node, model, known)
        self._unknown = unknown
        for part in self.parts:
            part.refresh()
