"""Patches that apply during a simulation: virtual clocks, seeded randomness, and no access outside the process."""

import asyncio
import contextlib
import gc
import logging
import os
import random
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import shared.clock
import shared.registry
from shared import failpoints
from tests.simulation.engine import SimEngine
from tests.simulation.loop import CURRENT, Died

UNIX_S = 1_700_000_000.0


@contextlib.contextmanager
def simulated(world: Any) -> Iterator[None]:
    loop, seeded = world.loop, world.random

    def monotonic() -> float:
        return float(loop.now + CURRENT.get().clock_offset_s)

    def wall() -> float:
        return float(UNIX_S + loop.now + CURRENT.get().wall_offset_s)

    def leave(status: int) -> None:
        world.exited(CURRENT.get(), status)
        raise Died

    def token_bytes(count: int | None = None) -> bytes:
        return bytes(seeded.getrandbits(8) for _ in range(count or 32))

    before = random.getstate()
    random.seed(world.scenario.seed)
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in (
            (time, "monotonic", monotonic),
            (time, "monotonic_ns", lambda: int(monotonic() * 1e9)),
            (time, "time", wall),
            (time, "time_ns", lambda: int(wall() * 1e9)),
            (shared.clock, "EPOCH_NS", int(UNIX_S * 1e9)),
            (secrets, "token_bytes", token_bytes),
            (secrets, "token_hex", lambda count=None: token_bytes(count).hex()),
            (os, "_exit", leave),
            (failpoints, "watcher", world.faults.at_site),
            (SimEngine, "world", world),
            (time, "sleep", lambda _: None),
            (shared.registry, "_client", lambda *_, **__: world.redis),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        receiver = _Receiver(world.log)
        for logger in map(logging.getLogger, ("baton", "grpclib", "asyncio")):
            stack.enter_context(mock.patch.multiple(logger, handlers=[receiver], propagate=False))
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.WARNING)
        stack.callback(random.setstate, before)
        if gc.isenabled():
            gc.disable()  # the times of collections would depend on earlier runs in this process
            stack.callback(gc.enable)
        yield


class _Receiver(logging.Handler):
    """Passes the warnings and errors of the system to `receive`."""

    def __init__(self, receive: Callable[[logging.LogRecord], None]) -> None:
        super().__init__()
        self._receive = receive

    def emit(self, record: logging.LogRecord) -> None:
        self._receive(record)


@contextlib.contextmanager
def without_teardown_errors() -> Iterator[None]:
    """Silence the errors that occur when suspended coroutines of dead processes are destroyed."""
    before = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
            logging.disable()
            asyncio.set_event_loop(None)  # otherwise, a finally block creates a loop that is never closed
            gc.collect()  # this collection runs the finally blocks of the coroutines
            gc.collect()
    finally:
        logging.disable(logging.NOTSET)
        sys.unraisablehook = before
