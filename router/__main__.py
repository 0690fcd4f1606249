"""Runs a router: `python -m router --help`."""

import asyncio
import logging
import secrets
import socket
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry

from router.admin import admin_routes
from router.api import build_app
from router.dispatch import Dispatch, Rules
from router.fleet import Fleet
from router.fleet_status import promised
from router.generation import Model
from router.model import read_model
from router.node_metrics import NodeMetrics
from router.records import Records
from router.text import Tokenizer
from shared import failpoints
from shared.command_line import settings_from_command_line
from shared.config import RouterSettings
from shared.errors import ConfigError
from shared.model_files import resolve
from shared.registry import EmbeddedRegistry, RedisRegistry, Registry
from shared.serve import Lifetime, run, settle_memory

log = logging.getLogger("baton.router")


def main(settings: RouterSettings) -> int:
    """Serves until SIGTERM. Returns the process's exit status: 2 when the settings cannot be served."""
    try:
        failpoints.configure(settings.failpoint, allowed=settings.allow_failpoints)
        directory = resolve(settings.model)
        is_local = Path(settings.model).exists()
        name = settings.served_model_name or (directory.resolve().name if is_local else settings.model)
        model = read_model(directory, name, settings.max_model_len, int(time.time()))
        tokenizer = Tokenizer.load(directory)
        listener = _listener(settings.host, settings.port)
    except (ConfigError, OSError, ValueError) as error:
        print(f"router: {error}", file=sys.stderr)
        return 2
    return run(
        lambda lifetime: _serve(lifetime, settings, model, tokenizer, listener),
        settings.log_level,
        settings.log_format,
        "router",
    )


async def _serve(
    lifetime: Lifetime, settings: RouterSettings, model: Model, tokenizer: Tokenizer, listener: socket.socket
) -> int:
    identity = f"router-{secrets.token_hex(8)}"
    records = Records()
    fleet = Fleet(identity, _registry(settings, identity), settings.mode, settings.node_timeout_s, records)
    rules = Rules(settings.max_attempts, settings.disaggregate, settings.ttft_slo_ms / 1000)
    dispatch = Dispatch(fleet, model.name, rules, records)
    metrics = CollectorRegistry()
    metrics.register(NodeMetrics(fleet.nodes, model.name, records, dispatch.status))
    app = build_app(
        dispatch,
        tokenizer,
        model,
        registry=metrics,
        records=records,
        slo=lambda: promised(settings.ttft_slo_ms, (info for info, _, alive in fleet.nodes() if alive)),
        more_routes=admin_routes(fleet, settings.drain_timeout_s),
        max_concurrent_requests=settings.max_concurrent_requests,
    )
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http="httptools",
            loop="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(settings.drain_timeout_s),
        )
    )
    async with AsyncExitStack() as cleanup:
        try:
            await fleet.start()
        except OSError as error:
            print(f"router: cannot listen on registry port {settings.registry_port}: {error}", file=sys.stderr)
            return 2
        cleanup.push_async_callback(fleet.close)
        settle_memory()
        serving = asyncio.ensure_future(server._serve([listener]))
        log.info("listening on http://%s:%d", *listener.getsockname()[:2])
        draining = asyncio.ensure_future(lifetime.draining.wait())
        await asyncio.wait({serving, draining}, return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        app.state.feed.close()
        server.should_exit = True
        await serving
    return 0


def _listener(host: str, port: int) -> socket.socket:
    """Bound before anything is started. Raises OSError with one clear line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port") from None
    return listener


def _registry(settings: RouterSettings, identity: str) -> Registry:
    if settings.registry:
        return RedisRegistry(settings.registry, settings.cluster)
    return EmbeddedRegistry(identity, settings.registry_host or settings.host, settings.registry_port)


if __name__ == "__main__":
    sys.exit(main(settings_from_command_line(RouterSettings, sys.argv[1:], "python -m router")))
