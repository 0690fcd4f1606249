"""Test security rules for the whole tree: forbidden imports and calls, published ports and minimum library versions."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.config.settings import RouterSettings

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = (
    "router",
    "prefill_node",
    "decode_node",
    "proxy_node",
    "node",
    "shared",
    "scheduler",
    "engine",
    "compare",
    "cluster",
    "baton",
)
TREES = (*PRODUCT, "benchmarks", "demo", "tests")

# The only allowed value of these options is the constant False. Modules and functions that can execute data that they
# read are banned by `banned-api` in pyproject.toml.
OPTIONS = {"shell", "allow_pickle", "trust_remote_code"}
CALLS = {"eval", "exec", "compile", "__import__"}
METHODS = {"recv_pyobj", "send_pyobj", "load_module"}


def python_files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def forbidden(tree: ast.AST) -> Iterator[str]:
    """Yield a description of each call that can execute data as code and that ruff cannot ban."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        if name in CALLS or name.rpartition(".")[2] in METHODS:
            yield f"calls {name}"
        if name.endswith("import_module") and not (node.args and isinstance(node.args[0], ast.Constant)):
            yield "imports a module whose name it computes"
        for option in node.keywords:
            if option.arg in OPTIONS and not (isinstance(option.value, ast.Constant) and option.value.value is False):
                yield f"passes {option.arg}"


def test_nothing_runs_bytes_that_it_has_read() -> None:
    named = re.compile("|".join(OPTIONS | CALLS | METHODS | {"import_module"}))  # parsing all other files takes seconds
    texts = {file: text for file in python_files(*TREES) if named.search(text := file.read_text())}
    assert [(str(file), what) for file, text in texts.items() for what in forbidden(ast.parse(text))] == []


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("eval(text)", "calls eval"),
        ("np.load(file, allow_pickle=True)", "passes allow_pickle"),
        ("run(words, shell=flag)", "passes shell"),
        ("socket.recv_pyobj()", "calls socket.recv_pyobj"),
        ("importlib.import_module(name)", "imports a module whose name it computes"),
        ("AutoModel.from_pretrained(name, trust_remote_code=True)", "passes trust_remote_code"),
    ],
)
def test_the_rule_detects_each_forbidden_call(source: str, what: str) -> None:
    assert what in set(forbidden(ast.parse(source)))


def test_only_the_config_readers_mention_remote_code() -> None:
    """The names of options for remote code occur only in the files that reject these options or turn them off."""
    texts = {str(file.relative_to(ROOT)): file.read_text() for file in python_files(*PRODUCT)}
    naming = {name for name, text in texts.items() if re.search("trust_remote|auto_map|remote_code", text)}
    rejecting = {"engine/models/config.py", "engine/foreign/config.py", "engine/foreign/load.py"}
    assert naming == rejecting | {"engine/foreign/vision.py"}
    for name in naming:
        off = texts[name].replace("trust_remote_code=False", "")
        assert not re.search("trust_remote|remote_code", off), f"{name} may turn remote code on"


# ---- what clients receive --------------------------------------------------------------------------------------------

ANSWERS = {"RequestError", "UnavailableError", "BatonError", "JSONResponse", "PlainTextResponse", "Response"}
ANSWERS |= {"error_response"}


def exposed_exceptions(tree: ast.AST) -> Iterator[int]:
    """Yield the numbers of the lines that put the text of an exception into an answer to a client."""
    for handler in (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name):
        for call in (node for node in ast.walk(handler) if isinstance(node, ast.Call)):
            if dotted(call.func).rpartition(".")[2] not in ANSWERS:
                continue
            values = [*call.args, *(keyword.value for keyword in call.keywords)]
            if any(isinstance(part, ast.Name) and part.id == handler.name and not is_a_field(part, value)
                   for value in values for part in ast.walk(value)):  # fmt: skip
                yield call.lineno


def is_a_field(name: ast.Name, within: ast.expr) -> bool:
    """Return whether only a field of the exception is read, such as `error.status`. `str(error)` may be any text."""
    return any(isinstance(part, ast.Attribute) and part.value is name for part in ast.walk(within))


def test_no_answer_contains_the_text_of_an_exception() -> None:
    exposed = {(str(file.relative_to(ROOT)), line)
               for file in python_files("router") for line in exposed_exceptions(ast.parse(file.read_text()))}  # fmt: skip
    assert exposed == set()


def test_the_rule_detects_an_exposed_exception() -> None:
    source = 'try:\n    f()\nexcept ValueError as error:\n    raise RequestError(f"no: {error}") from None'
    assert list(exposed_exceptions(ast.parse(source))) == [4]
    fine = source.replace("{error}", "{error.status}")
    assert list(exposed_exceptions(ast.parse(fine))) == []


# ---- libraries and containers ----------------------------------------------------------------------------------------

# The oldest release of each library without a known vulnerability that affects Baton; see docs/security.md.
FLOORS = {
    "h2": (4, 3),  # CVE-2025-57804: request splitting
    "hpack": (4, 0),  # CVE-2016-6581: decompression bombs
    "h11": (0, 16),  # CVE-2025-43859: lenient parsing of chunks
    "redis": (4, 5, 4),  # CVE-2023-28858, -28859: the reply to another query after a cancellation
    "jinja2": (3, 1, 6),  # CVE-2025-27516: escape from the sandbox
    "starlette": (0, 40),  # CVE-2024-47874: forms without a size limit
    "aiohttp": (3, 10, 11),  # CVE-2024-52304: request smuggling
}
PIN = re.compile(r"^([\w.-]+)==([\w.]+)", re.MULTILINE)


def release(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def direct() -> dict[str, tuple[int, ...]]:
    """Return, for each library, the lowest release that pyproject.toml allows."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    split = [text.partition(">=") for text in wanted]
    assert all(floor for _, _, floor in split), "a dependency has no minimum version"
    return {name: release(floor) for name, _, floor in split}


def locked() -> dict[str, str]:
    """Return the entries of requirements.lock by library."""
    entries = re.split(r"^(?=[\w.-]+==)", (ROOT / "requirements.lock").read_text(), flags=re.MULTILINE)[1:]
    return {entry.partition("==")[0]: entry for entry in entries}


def test_no_library_may_have_a_known_vulnerability() -> None:
    for name, floor in direct().items():
        assert floor >= FLOORS.get(name, ()), f"pyproject.toml: {name}"
    versions = {name: release(PIN.match(entry)[2]) for name, entry in locked().items()}
    for name, floor in FLOORS.items():
        assert versions[name] >= floor, f"requirements.lock: {name}; run `make lock`"


def test_the_lock_has_every_library_and_hashes_of_each() -> None:
    entries = locked()
    for name, floor in direct().items():
        if name != "torch":  # the build of the image chooses the torch package
            assert release(PIN.match(entries[name])[2]) >= floor, name
    for name, entry in entries.items():
        assert "--hash=sha256:" in entry, f"{name} has no hash"


COMPOSE = ROOT / "docker-compose.yml"


def services() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load(COMPOSE.read_text())["services"])


def test_only_the_router_and_grafana_are_published_and_only_on_loopback() -> None:
    published = {name: service["ports"] for name, service in services().items() if "ports" in service}
    assert set(published) == {"router", "grafana"}
    for ports in published.values():
        assert all(re.fullmatch(r"\$\{\w+:-127\.0\.0\.1:\d+\}:\d+", port) for port in ports)
    networks = yaml.safe_load(COMPOSE.read_text())["networks"]
    assert networks["inside"]["internal"] is True
    for name, service in services().items():
        reachable = set(service.get("networks", [])) == {"inside"} or service.get("network_mode") == "none"
        assert reachable or name in published, name


def test_containers_have_no_rights_that_they_do_not_need() -> None:
    for name, service in services().items():
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert "privileged" not in service, name
        assert "cap_add" not in service, name
        if name not in {"prometheus", "grafana"}:  # third-party images have their own settings
            assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", service["user"]), name
            assert service["read_only"] is True, name


def test_containers_may_take_10_s_longer_to_stop_than_to_drain() -> None:
    drain_s = RouterSettings.model_fields["drain_timeout_s"].default
    for name in ("router", "prefill", "decode", "colocated"):
        assert float(services()[name]["stop_grace_period"].removesuffix("s")) >= drain_s + 10, name


def test_the_logs_of_containers_do_not_fill_the_disk() -> None:
    for name in ("router", "prefill", "decode", "colocated"):  # a router logs each request
        assert services()[name]["logging"] == {"driver": "local"}, name


def test_one_service_builds_the_image_of_all() -> None:
    gpu = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())["services"]
    for image, changed in (("baton", {}), ("baton-gpu", gpu)):
        own = {name: service | changed.get(name, {}) for name, service in services().items()}
        assert {name for name, service in own.items() if "build" in service} == {"secret"}
        using = {name: service["pull_policy"] for name, service in own.items() if service["image"] == image}
        assert using == dict.fromkeys(("secret", "router", "prefill", "decode", "colocated"), "never")
        assert all("secret" in own[name]["depends_on"] for name in set(using) - {"secret"})


def test_the_image_is_built_from_every_package_of_the_wheel() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(wheel["only-include"]) <= sent, "add it to .dockerignore"


def test_every_node_and_router_in_a_container_has_the_secret() -> None:
    for name in ("router", "prefill", "decode", "colocated"):
        service = services()[name]
        assert service["environment"]["BATON_CLUSTER_SECRET_FILE"] == "/run/secret/cluster", name
        assert "secret:/run/secret:ro" in service["volumes"], name
        assert service["depends_on"]["secret"]["condition"] == "service_completed_successfully", name


def test_the_image_does_not_run_as_root() -> None:
    users = re.findall(r"^USER (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert users
    assert users[-1] not in {"root", "0"}
