"""Loads and unloads adapters while a node serves."""

from dataclasses import dataclass
from pathlib import Path

from engine.lora.files import LowRank, lora_digest, read_lora
from engine.lora.linear import ModelAdapters
from engine.runner import Runner, TorchRunner


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter that was read, but is not part of the model yet."""

    digest: str
    directory: Path
    updates: dict[str, LowRank]


@dataclass(slots=True)
class AdapterLoader:
    """Adds adapters to a model, and removes them."""

    adapters: ModelAdapters
    max_rank: int

    def read(self, directory: Path) -> AdapterFiles:
        """Read an adapter, on any thread. Raises ValueError or OSError if it cannot be served."""
        return AdapterFiles(lora_digest(directory), directory, read_lora(directory, self.max_rank))

    def add(self, files: AdapterFiles) -> None:
        """Add an adapter. Called on the engine's thread, between steps. Raises ValueError if it does not fit."""
        self.adapters.add(files.digest, files.updates, files.directory)

    def remove(self, digest: str) -> None:
        """Remove an adapter that no request uses. Called on the engine's thread, between steps."""
        self.adapters.remove(digest)


def adapter_loader(runner: Runner, max_rank: int) -> AdapterLoader | None:
    """Return a loader for the model of a runner, or None if it takes no adapters."""
    adapters = runner.adapters if isinstance(runner, TorchRunner) else None
    return None if adapters is None else AdapterLoader(adapters, max_rank)
