"""Run a router whose event loop measures its own turns: `python -m benchmarks.probed_router` takes the router's flags.

Between SIGUSR1 and SIGUSR2, the loop never sleeps, and the probe measures the CPU time of each turn of the loop. CPU
time does not include the time in which the kernel runs other processes. At SIGUSR2, the process prints the longest turn
in seconds. Without SIGUSR1, the router runs normally."""

import asyncio
import signal
import sys
import time

from router.__main__ import Serve, main
from shared.config.command_line import settings_from_command_line
from shared.config.settings import RouterSettings
from shared.lifecycle import ProcessLifetime, run


class TurnProbe:
    """Measures the longest turn of the running event loop between `start` and `stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_on = False
        self._longest_s = self._last_s = 0.0

    def start(self) -> None:
        self._is_on, self._longest_s, self._last_s = True, 0.0, time.thread_time()
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        now_s = time.thread_time()
        self._longest_s, self._last_s = max(self._longest_s, now_s - self._last_s), now_s
        if self._is_on:
            self._loop.call_soon(self._turn)

    def stop(self) -> None:
        self._is_on = False
        print(self._longest_s, flush=True)


def run_probed(serve: Serve) -> int:
    async def body(lifetime: ProcessLifetime) -> int:
        probe, loop = TurnProbe(), asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, probe.start)
        loop.add_signal_handler(signal.SIGUSR2, probe.stop)
        return await serve(lifetime)

    return run(body)


if __name__ == "__main__":
    sys.exit(main(settings_from_command_line(RouterSettings, sys.argv[1:], "probed_router"), run_probed))
