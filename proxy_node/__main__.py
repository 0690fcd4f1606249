"""Run a proxy node: `python -m proxy_node --help`. Its engine, a vLLM or SGLang server, may stop and come back."""

import asyncio
import logging
import secrets
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from node.engine_steps import StepSocket
from node.identity import advertised, default_id
from node.probes import NodeProbes
from node.router_sessions import FLUSH_S
from proxy_node.client import EngineClient, EngineFacts, read_key
from proxy_node.connectors import NIXL_CONFIG
from proxy_node.node import ProxyNode
from proxy_node.probe import connector, deadline, resumes
from proxy_node.sglang import SglangEngine
from proxy_node.vllm import VllmEngine
from proxy_node.wire import EngineFailure
from shared import logs
from shared.config.command_line import settings_from_command_line
from shared.config.settings import ProxySettings
from shared.errors import ConfigError
from shared.lifecycle import ProcessLifetime, listen, result_before, run
from shared.model_files import read_end_tokens, read_limits, resolve
from shared.registry import announcer
from shared.rpc import tls
from shared.rpc.messages import NodeInfo, NodeStats
from shared.rpc.methods import RpcServer
from shared.version import package_version

log = logging.getLogger("baton.proxy")
RETRY_S = 0.5
REPORT_S = 15.0  # time between two reports on an engine that does not answer
# Attributes of a node whose engine can have only one role, keyed by this role (`EngineFacts.role`).
PAIRED = {"prefill": {"generates": "no"}, "decode": {"computes_prompts": "no"}}
STEP_TOKENS = 2048  # vLLM's default maximum of tokens in a step, used if the engine does not report its steps


def main(settings: ProxySettings) -> int:
    """Run a proxy node until SIGTERM, and return the exit status. If the node cannot start, print one line and return
    2."""
    logs.configure(settings.log_level, settings.log_format, settings.id or "proxy")
    try:
        tls.configure(settings.cluster_secret_file, {"--host": settings.host})
        directory = resolve(settings.model)
        (max_len, vocab_size), end_tokens = read_limits(directory), read_end_tokens(directory)
        key = read_key(settings.engine_api_key_file)
        settings = settings.model_copy(update={"advertise": advertised(settings)})
    except (ValueError, OSError) as error:
        return _start_failed(error)
    kind = SglangEngine if settings.engine_kind == "sglang" else VllmEngine
    engine = kind(settings.engine, key, vocab_size, settings.advertise, end_tokens)
    process = ProxyProcess(settings, engine, settings.max_model_len or max_len)
    return run(process.serve)


def _start_failed(error: Exception) -> int:
    print(f"proxy: {error}", file=sys.stderr)
    return 2


@dataclass
class ProxyProcess:
    """A proxy node from its start to its exit. Each time the engine comes back, the node joins as a new incarnation.

    `settings.role` is the role of the next incarnation. It differs from `--role` if a router has changed the role.
    """

    settings: ProxySettings
    engine: EngineClient
    max_model_len: int  # maximum length of a request in tokens, the same as in the router
    steps: StepSocket = field(default_factory=StepSocket)
    node: ProxyNode | None = None  # None while the engine does not answer

    async def serve(self, lifetime: ProcessLifetime) -> int:
        async with self.engine.open(), AsyncExitStack() as cleanup:
            try:
                if path := self.settings.steps_socket:
                    cleanup.enter_context(self.steps.opened(Path(path)))
                await NodeProbes(self._stats, str, self._refusal).serve(self.settings, cleanup)
                info = await result_before(self._await_engine(is_first=True), lifetime.draining.wait())
                while info is not None and await self._serve_incarnation(info, lifetime):
                    info = await result_before(self._await_engine(is_first=False), lifetime.draining.wait())
            except (ConfigError, OSError) as error:
                return _start_failed(error)
        return 0

    def _stats(self) -> tuple[NodeInfo, NodeStats] | None:
        return (self.node.info, self.node.stats()) if self.node else None

    def _refusal(self) -> str:
        return self.node.refusal() if self.node else f"the engine at {self.engine.url} does not answer"

    async def _await_engine(self, *, is_first: bool) -> NodeInfo:
        """Wait until the engine answers, and return the description of its node.

        If `is_first` is set, raise ConfigError for an engine that answers but cannot be used. Otherwise, wait until an
        operator has repaired such an engine.
        """
        reported_at, now = 0.0, asyncio.get_running_loop().time
        while True:
            try:
                async with deadline():
                    return await self._probe()
            except (ConfigError, EngineFailure) as error:
                if is_first and isinstance(error, ConfigError):
                    raise
                if now() - reported_at > REPORT_S:
                    reported_at = now()
                    log.warning("waiting for the engine at %s: %s", self.engine.url, error)
            await asyncio.sleep(RETRY_S)

    async def _probe(self) -> NodeInfo:
        """Ask the engine for a few answers, and return the description of its node."""
        facts = await self.engine.describe()
        self._check(facts)
        found = await connector(self.engine) if facts.connector is None else facts.connector
        if self.settings.role == "prefill" and not found:
            flag = f"--kv-transfer-config '{NIXL_CONFIG}'" if facts.kind == "vllm" else "--disaggregation-mode prefill"
            raise ConfigError(f"--engine {self.engine.url}: has no KV connector; start it with {flag}")
        resumed = await resumes(self.engine, facts.resumes)
        if self.settings.steps_socket and self.steps.latest is None:
            log.warning("no step was reported to --steps-socket; see docs/engines.md#step-records")
        return self._info(facts, found, resumed)

    def _check(self, facts: EngineFacts) -> None:
        """Raise ConfigError if the engine has another role, or if its maximum length is below the router's."""
        role = self.settings.role
        if facts.role not in {"", role}:
            raise ConfigError(
                f"--role {role}: the server at {self.engine.url} runs with --disaggregation-mode {facts.role}; "
                f"give this proxy --role {facts.role}, or start the server with --disaggregation-mode {role}"
            )
        self.engine.check_length(facts, self.max_model_len)

    def _info(self, facts: EngineFacts, found: str, resumed: str) -> NodeInfo:
        settings, step = self.settings, self.steps.latest
        max_num_seqs = settings.max_num_seqs if step is None else step.max_num_seqs
        return NodeInfo(
            id=settings.id or default_id(settings.role),
            incarnation_id=secrets.token_hex(16),
            role=settings.role,
            address="",
            model=facts.model,
            fingerprint=facts.fingerprint(found),
            block_tokens=facts.block_tokens,
            block_bytes=facts.block_bytes,
            num_blocks=facts.num_blocks,
            max_model_len=self.max_model_len,
            max_num_seqs=max_num_seqs,
            version=package_version(),
            attributes={
                "engine": f"{facts.kind} {facts.version}",
                "engine_url": settings.engine,
                "connector": found or "none",
                "resumes": resumed,
                "max_num_seqs": str(max_num_seqs),
                "max_step_tokens": str(STEP_TOKENS if step is None else step.max_step_tokens),
            }
            | PAIRED.get(facts.role, {}),
        )

    async def _serve_incarnation(self, info: NodeInfo, lifetime: ProcessLifetime) -> bool:
        """Serve until the engine is lost or this process has drained. Return True if the engine is lost.

        Raises OSError if the port is in use.
        """
        settings = self.settings
        node = ProxyNode(info, self.engine, settings.heartbeat_s, settings.stuck_s, settings.kv_lease_s, self.steps)
        async with AsyncExitStack() as cleanup:
            server = RpcServer(node.handlers())
            port = await listen(server.start, settings.host, settings.port, "--port")
            cleanup.push_async_callback(node.close)
            cleanup.push_async_callback(server.close)
            node.info = replace(node.info, address=f"{settings.advertise}:{port}")
            registry = announcer(settings.registry, settings.cluster, settings.heartbeat_s)
            await node.start(registry)
            self.node = node
            cleanup.callback(setattr, self, "node", None)
            cleanup.push_async_callback(registry.close)
            log.info("%s at %s: %s at %s", info.id, node.info.address, info.attributes["engine"], self.engine.url)
            reason = await result_before(asyncio.shield(node.lost), lifetime.draining.wait())
            if reason is not None:
                log.error("the engine at %s is lost: %s", self.engine.url, reason)
                await node.sessions.flush()
                await asyncio.sleep(FLUSH_S)
                self.settings = settings.model_copy(update={"id": info.id, "role": node.info.role})
                return True
            if moved := await node.end(settings.drain_timeout_s):
                log.warning("%d requests did not end within %g s: they are retried", moved, settings.drain_timeout_s)
        return False


if __name__ == "__main__":
    sys.exit(main(settings_from_command_line(ProxySettings, sys.argv[1:], "python -m proxy_node")))
