"""Run a router: `python -m router --help`."""

import asyncio
import gc
import logging
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from dashboard.metrics import RecordMetrics
from dashboard.routes import Dashboard
from router.dispatch.attempt import SLOW_S
from router.http.admin import Admin
from router.http.app import build_app
from router.http.auth import ApiKeys
from router.http.certificate import Certificate
from router.http.connection import ConnectionLimits, HttpConnection, IdleConnections, raise_fd_limit
from router.http.whole_router import WholeRouter
from router.metrics.node_metrics import MetricSource, NodeMetrics
from router.metrics.request_metrics import slo_targets
from router.models import ConnectedModel, ModelFiles, connect, load_models
from router.nodes.adapters import AdapterSync
from router.observer import RouterObserver
from router.rebalance import Rebalancer
from router.responses_store import open_store
from router.workers import WorkerShare, supervise
from shared import failpoints, logs
from shared.config.command_line import settings_from_command_line
from shared.config.settings import RouterSettings
from shared.errors import ConfigError
from shared.lifecycle import ProcessLifetime, TaskGroup, cannot_listen, collect_garbage, freeze_gc, run
from shared.registry import EmbeddedRegistry, FollowedRegistry, RedisRegistry, Registry
from shared.rpc import tls

log = logging.getLogger("baton.router")
HANDSHAKE_S = 10.0  # how long a client may take for a TLS handshake
Serve = Callable[[ProcessLifetime], Coroutine[Any, Any, int]]


def main(settings: RouterSettings, run: Callable[[Serve], int] = run) -> int:
    """Serve until SIGTERM. Return the exit status, which is 2 if the settings are invalid or a port cannot be opened.

    `run` calls a `Serve` function on an event loop, and returns the exit status that the function returns."""
    logs.configure(settings.log_level, settings.log_format, "router")
    try:
        failpoints.configure(settings.failpoint, allowed=settings.allow_failpoints)
        # The registry's port needs a cluster secret if other machines can reach it. If the registry is in Redis, the
        # router opens no such port. The API's port needs no cluster secret, because API keys can protect it.
        listens = {} if settings.registry else {"--registry-host": settings.registry_host or settings.host}
        tls.configure(settings.cluster_secret_file, listens)
        models = load_models(settings)
        has_keys = settings.api_keys_file or settings.api_keys
        keys = ApiKeys(settings.api_keys_file, settings.api_keys) if has_keys else None
        certificate = Certificate(settings.ssl_certfile, settings.ssl_keyfile) if settings.ssl_certfile else None
        if certificate is not None:
            certificate.check()
        ports = [listen(settings.host, settings.port, "--port", settings.workers)]
        if settings.admin_port:
            ports.append(listen(settings.admin_host, settings.admin_port, "--admin-port", settings.workers))
    except (ConfigError, OSError, ValueError) as error:
        print(f"router: {error}", file=sys.stderr)
        return 2

    def serve(listeners: list[socket.socket], share: WorkerShare = WorkerShare()) -> int:
        return run(lambda lifetime: _serve(lifetime, settings, models, keys, certificate, listeners, share))

    return serve([port[0] for port in ports]) if settings.workers == 1 else _run_workers(settings, ports, serve)


async def _serve(
    lifetime: ProcessLifetime,
    settings: RouterSettings,
    models: Sequence[ModelFiles],
    keys: ApiKeys | None,
    certificate: Certificate | None,
    listeners: list[socket.socket],
    share: WorkerShare,
) -> int:
    if share.sockets:
        lifetime.leave_end_to_supervisor()
    dashboard = Dashboard() if settings.dashboard else None
    observer = dashboard or RouterObserver()
    served = connect(settings, models, f"router-{secrets.token_hex(8)}", _registry(settings, share), share, observer)
    admin = Admin([each.pool for each in served], settings.drain_timeout_s)
    adapters = AdapterSync(served[0].pool, served[0].parts.dispatcher.adapter_requests)
    app = build_app(
        [each.parts for each in served],
        registry=_metrics(served, dashboard),
        observer=observer,
        slo=lambda: slo_targets(
            settings.ttft_slo_ms, (info for each in served for info, _, alive in each.pool.nodes() if alive)
        ),
        more_routes=admin.routes(),
        keys=keys,
        allowed_origins=settings.allowed_origins,
        responses_store=open_store(settings.responses_store, settings.cluster),
        max_concurrent_requests=share.of(settings.max_concurrent_requests),
        request_timeout_s=settings.request_timeout_s,
        workers=WholeRouter(share.sockets, share.number) if share.sockets else None,
        adapters=adapters if settings.allow_runtime_lora_updating else None,
    )
    apps = [app.state.api, app.state.admin] if settings.admin_port else [app]
    if share.sockets:
        apps.append(app.state.worker)
    options = raise_fd_limit(share.of(settings.max_connections)), settings.drain_timeout_s, certificate
    servers = [HttpServer(app, listener, *options) for app, listener in zip(apps, listeners, strict=True)]
    async with AsyncExitStack() as cleanup:
        try:
            for each in served:
                await each.pool.start()
                cleanup.push_async_callback(each.pool.close)
        except OSError as error:
            print(f"router: {error}", file=sys.stderr)
            return 2
        if settings.allow_runtime_lora_updating:
            cleanup.push_async_callback(adapters.start().close)
        if settings.rebalance == "on":
            for each in served:
                cleanup.push_async_callback(Rebalancer(each.pool, each.signals, admin).start().close)
        if (runs := app.state.responses) is not None:
            runs.open()
            cleanup.push_async_callback(runs.close)
        freeze_gc()
        if share.number == 0:
            _log_addresses(listeners, "http" if certificate is None else "https", keys is None)
        await _serve_http(lifetime, servers, certificate, observer)
    return 0


async def _serve_http(
    lifetime: ProcessLifetime, servers: "list[HttpServer]", certificate: Certificate | None, observer: RouterObserver
) -> None:
    """Serve until the process starts to drain. Then drain the servers, and wait until they have ended."""
    serving = asyncio.gather(*(server.serve([server.listener]) for server in servers))
    draining = asyncio.ensure_future(lifetime.draining.wait())
    ends: set[asyncio.Future[Any]] = {serving, draining}
    background = TaskGroup()
    background.start(collect_garbage())
    if certificate is not None:
        background.start(certificate.follow([each.config.ssl for each in servers if each.config.ssl is not None]))
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    draining.cancel()
    observer.close()
    for server in servers:
        server.drain()
    await serving
    await background.close()


def _metrics(served: Sequence[ConnectedModel], dashboard: Dashboard | None) -> CollectorRegistry:
    """Return a Prometheus registry with the metrics of the nodes and of scaling. If there is a dashboard, the registry
    also has the metrics of the nodes' steps."""
    sources = [
        MetricSource(each.parts.card.name, each.pool.journal.metric_rows, each.parts.dispatcher.status)
        for each in served
    ]
    metrics = CollectorRegistry()
    for each in served:
        metrics.register(each.signals)
    if dashboard is None:
        metrics.register(NodeMetrics(sources))
    else:
        record_metrics = RecordMetrics(sources, dashboard)
        dashboard.subscribe(record_metrics)
        metrics.register(record_metrics)
    return metrics


class HttpServer(uvicorn.Server):
    """A uvicorn server without signal handlers. The process itself handles signals, and drains all servers together.

    With a certificate, it serves HTTPS, except to the other workers of its router.
    """

    def __init__(
        self,
        app: Starlette,
        listener: socket.socket,
        max_connections: int,
        drain_timeout_s: float,
        certificate: Certificate | None,
    ) -> None:
        self.idle = IdleConnections()
        self.listener = listener
        self._limits = ConnectionLimits(max_connections)
        options = uvicorn.Config(
            app,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,  # otherwise, clients could forge the addresses in the log
            timeout_graceful_shutdown=int(drain_timeout_s),
        )
        if certificate is not None and listener.family != socket.AF_UNIX:
            options.ssl_certfile, options.ssl_keyfile = certificate.certfile, certificate.keyfile or None
        options.load()
        super().__init__(options)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, with a timeout for TLS handshakes, which uvicorn has no option for."""
        await super().startup([])
        connect = partial(HttpConnection, self.config, self.server_state, {}, limits=self._limits, waiting=self.idle)
        timeout_s, backlog = HANDSHAKE_S if self.config.ssl else None, self.config.backlog
        listening = asyncio.get_running_loop().create_server(
            connect, sock=self.listener, ssl=self.config.ssl, ssl_handshake_timeout=timeout_s, backlog=backlog
        )
        self.servers = [await listening]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def drain(self) -> None:
        self.idle.is_draining = self.should_exit = True


def listen(host: str, port: int, flag: str, count: int = 1) -> list[socket.socket]:
    """Bind `count` listeners to one port. The kernel distributes new connections among them.

    Raises OSError if the address cannot be used. The error's message names `flag`."""
    listeners = [_listener(host, port, flag, shares=count > 1)]
    port = listeners[0].getsockname()[1]
    return listeners + [_listener(host, port, flag, shares=True, joins=True) for _ in range(count - 1)]


def _listener(host: str, port: int, flag: str, *, shares: bool, joins: bool = False) -> socket.socket:
    """Bind a listener. If `shares` is set, further listeners can bind to the same port. `joins` must be set for all
    listeners of a port except the first."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # Accepted connections inherit these options, which close a connection whose client is unreachable or does not read.
    keepalive = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)]
    keepalive += [(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)]
    keepalive += [(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SLOW_S * 1000))]
    for option in [(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1), *keepalive]:
        listener.setsockopt(*option)
    try:
        # Set SO_REUSEPORT on the first listener only after `bind`, so that `bind` fails if another router has the port.
        # If the option were set before, the two routers would share the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, joins)
        listener.bind((host, port))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shares)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise cannot_listen(error, host, port, flag, flag.replace("port", "host")) from None
    return listener


def _log_addresses(listeners: list[socket.socket], scheme: str, is_open: bool) -> None:
    for listener in [each for each in listeners if each.family != socket.AF_UNIX]:
        host, port = listener.getsockname()[:2]
        log.info("listening on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, port)
        if is_open and not ip_address(host).is_loopback:
            log.warning("no API keys configured: %s:%d is open to any client; set --api-keys-file", host, port)


def _run_workers(
    settings: RouterSettings, ports: list[list[socket.socket]], serve: Callable[[list[socket.socket], WorkerShare], int]
) -> int:
    """Run each worker in a separate process. Run the registry in another process, unless the registry is in Redis.
    Return the exit status.

    `ports` has a list for each port, with one listener for each worker. Each worker calls `serve` with its own
    listeners."""
    every = [listener for port in ports for listener in port]
    helpers: dict[str, Callable[[], int]] = {}
    with tempfile.TemporaryDirectory(prefix="baton-router-") as directory:
        sockets = tuple(Path(directory) / f"worker-{number}" for number in range(settings.workers))
        shares = [WorkerShare(number, settings.workers, sockets) for number in range(settings.workers)]
        if not settings.registry:
            host = settings.registry_host or settings.host
            try:
                (joining,) = listen(host, settings.registry_port, "--registry-port")
            except OSError as error:
                print(f"router: {error}", file=sys.stderr)
                return 2
            host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
            port = joining.getsockname()[1]
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            shares = [replace(share, registry=address) for share in shares]
            every.append(joining)

            def register() -> int:
                _close_all_but([joining], every)
                return run(lambda lifetime: _serve_registry(lifetime, joining))

            helpers["registry"] = register

        def work(share: WorkerShare) -> int:
            own = [port[share.number] for port in ports]
            _close_all_but(own, every)
            return serve([*own, _private_listener(sockets[share.number])], share)

        gc.freeze()  # so that the garbage collector does not write to memory that the processes share
        workers = {f"worker-{share.number}": partial(work, share) for share in shares}
        return supervise(workers, helpers, partial(_close_all_but, [], every))


def _close_all_but(kept: list[socket.socket], listeners: list[socket.socket]) -> None:
    """Close all `listeners` except those in `kept`. A port stays open until every process has closed the port's
    listeners, so a process must not hold the listeners of other processes."""
    for listener in listeners:
        if listener not in kept:
            listener.close()


def _private_listener(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    return listener


async def _serve_registry(lifetime: ProcessLifetime, listener: socket.socket) -> int:
    registry = EmbeddedRegistry("", 0, listener)
    await registry.start(lambda: None)
    await lifetime.draining.wait()
    await registry.close()
    return 0


def _registry(settings: RouterSettings, share: WorkerShare) -> Registry:
    if settings.registry:
        return RedisRegistry(settings.registry, settings.cluster)
    if share.registry:
        return FollowedRegistry(share.registry)
    return EmbeddedRegistry(settings.registry_host or settings.host, settings.registry_port)


if __name__ == "__main__":
    sys.exit(main(settings_from_command_line(RouterSettings, sys.argv[1:], "python -m router")))
