"""Loads and unloads LoRA adapters while the node serves."""

import asyncio
import logging
from math import inf
from pathlib import Path

from engine.lora.linear import ModelAdapters
from node.node import Node
from shared.lifecycle import wait_until
from shared.limits import MAX_ADAPTERS
from shared.registry import Announcer
from shared.rpc.messages import Ack, SetAdapterRequest

log = logging.getLogger("baton.node")
POLL_S = 0.1


class RuntimeAdapters:
    """Serves `SET_ADAPTER` on the event loop. `model` is None if adapters cannot be loaded while the node serves."""

    def __init__(self, node: Node, announcer: Announcer, model: ModelAdapters | None) -> None:
        self._node = node
        self._announcer = announcer
        self._model = model
        self._held = set(node.state.info.adapters.values())  # digests of the adapters in the model
        self._lock = asyncio.Lock()

    async def set_adapter(self, message: SetAdapterRequest) -> Ack:
        if self._model is None:
            return Ack("it runs without --allow-runtime-lora-updating, or its model takes no adapters")
        try:
            async with self._lock:
                if message.directory:
                    await self._load(self._model, message.name, Path(message.directory))
                else:
                    await self._unload(self._model, message.name)
        except (ValueError, OSError) as error:
            return Ack(str(error))
        return Ack()

    async def _load(self, model: ModelAdapters, name: str, directory: Path) -> None:
        if len(self._node.state.info.adapters) >= MAX_ADAPTERS:
            raise ValueError(f"it already has {MAX_ADAPTERS} adapters; unload one")
        files = await asyncio.to_thread(model.read, directory)
        if files.digest not in self._held:
            await self._node.between_steps(lambda: model.add(files))
            self._held.add(files.digest)
        await self._announce(self._node.state.info.adapters | {name: files.digest})
        log.info("LoRA adapter %s was loaded from %s", name, directory)

    async def _unload(self, model: ModelAdapters, name: str) -> None:
        adapters = dict(self._node.state.info.adapters)
        if digest := adapters.pop(name, ""):
            await self._announce(adapters)
            self._node.tasks.start(self._remove(model, digest))
            log.info("LoRA adapter %s was unloaded", name)

    async def _announce(self, adapters: dict[str, str]) -> None:
        self._node.update_info(adapters=adapters)
        await self._announcer.update(self._node.state.info)

    async def _remove(self, model: ModelAdapters, digest: str) -> None:
        """Wait until no request uses an adapter. Then free its memory, unless it has been loaded again."""
        await wait_until(lambda: not self._node.requests.has_adapter(digest), inf, POLL_S)
        async with self._lock:
            if digest in self._held and digest not in self._node.state.info.adapters.values():
                await self._node.between_steps(lambda: model.remove(digest))
                self._held.discard(digest)
