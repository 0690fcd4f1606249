"""`baton ray`: runs a cluster on the hosts of a Ray cluster, each process under an actor that restarts it.

Ray places the actors, which are detached and named, and restarts them on other hosts. Requests and tokens do not
pass through Ray. Baton and the model must be installed on every host under the same paths.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.local import BAD_SETTINGS, GRACE_S, restart_delay_s
from cluster.plan import ROUTER, Child, RaySettings, inherited, plan, with_model
from cluster.secret import new_pem
from shared.lifecycle import python_path, set_parent_death_signal

NAMESPACE = "baton"
LABEL = "baton.role"
PLACED_S = 30.0  # how long Ray may take to start an actor
ANSWER_S = 5.0  # how long a running actor may take to answer
POLL_S = 1.0


class Supervisor:
    """Runs one process of Baton on the host where Ray placed this actor, and restarts it when it fails.

    One thread owns the process; Ray calls the methods on another thread. The process dies with the actor.

    If the process is a node, it joins all routers of the cluster. The names of the routers' actors begin with the
    prefix `routers`. A node joins a router at `port` plus the router's `_port_offset`. The node reads the routers'
    addresses from a file, which this actor rewrites when a router is added or has moved.
    """

    def __init__(self, child: Child, secret: bytes, routers: str, port: int) -> None:
        self._routers, self._port = routers, port
        self._address = str(ray.util.get_node_ip_address())
        self._found: dict[str, str] = {}  # the address of each router
        self._secret = secret
        self._process: subprocess.Popen[bytes] | None = None
        self._restarts: list[float] = []
        self._exit_status: int | None = None  # set when the process has ended and will not be restarted
        self._draining = threading.Event()
        self._keeper: threading.Thread | None = None
        self.start(child)

    def address(self) -> str:
        return self._address

    def secret(self) -> bytes:
        return self._secret

    def status(self) -> dict[str, Any]:
        state = "draining" if self._draining.is_set() else "running"
        if self._exit_status is not None:
            state = f"ended with status {self._exit_status}"
        pid = self._process.pid if self._process is not None else 0
        return {"host": self._address, "process": pid, "state": state, "restarts": len(self._restarts)}

    def start(self, child: Child) -> None:
        """Start the process, unless it is running."""
        if self._keeper is None or not self._keeper.is_alive():
            self._child, self._exit_status = child, None
            self._draining.clear()
            self._keeper = threading.Thread(target=self._keep, daemon=True)
            self._keeper.start()

    def drain(self) -> None:
        """Send SIGTERM to the process, and do not restart it."""
        self._draining.set()
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Kill a process that drains too long, and wait until its files, such as the secret, are removed."""
        if self._process is not None:
            self._process.kill()
        if self._keeper is not None:
            self._keeper.join(ANSWER_S)

    def has_ended(self) -> bool:
        return self._exit_status is not None

    def _keep(self) -> None:
        status = 0
        while not self._draining.is_set():
            try:
                with tempfile.TemporaryDirectory(prefix="baton-") as directory:
                    status = self._run(Path(directory))
            except OSError as error:  # for example, the disk is full
                print(f"{self._child.name}: cannot start: {error}", file=sys.stderr)
                status = 1
            if status in {0, BAD_SETTINGS}:
                break
            self._draining.wait(restart_delay_s(self._restarts, time.monotonic()))
            self._restarts.append(time.monotonic())
        self._exit_status = status

    def _run(self, directory: Path) -> int:
        """Run the process once, and return its exit status. Raises OSError if it cannot be started."""
        secret = directory / "secret"
        secret.touch(mode=0o600)
        secret.write_bytes(self._secret)
        environment = inherited(os.environ) | self._child.environment
        environment["BATON_CLUSTER_SECRET_FILE"] = str(secret)
        registry = directory / "registry"
        if self._routers:
            self._find_routers(registry)
            environment |= {"BATON_REGISTRY": f"file:{registry}", "BATON_ADVERTISE": self._address}
        process = self._process = subprocess.Popen(
            (sys.executable, *self._child.command[1:]),
            env=environment,
            start_new_session=True,
            preexec_fn=set_parent_death_signal(os.getpid()),  # noqa: PLW1509 - it makes two system calls
        )
        if self._draining.is_set():
            process.terminate()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(POLL_S)
            if self._routers:
                with contextlib.suppress(OSError):  # the next iteration writes the file
                    self._find_routers(registry)

    def _find_routers(self, registry: Path) -> None:
        """Write the routers' addresses to the file `registry`. While Ray restarts a router's actor, keep the router's
        last address."""
        actors = dict[str, Any]()
        with contextlib.suppress(RayError, ValueError):
            actors = _actors(self._routers)
        for name, actor in actors.items():
            with contextlib.suppress(RayError):
                host = ray.get(actor.address.remote(), timeout=ANSWER_S)
                self._found[name] = f"{host}:{self._port + _port_offset(name)}"
        text = "\n".join(self._found.values())
        if not registry.exists() or registry.read_text() != text:
            new = registry.with_suffix(".new")
            new.write_text(text)
            new.replace(registry)


# ---- the commands ----------------------------------------------------------------------------------------------------


def up(settings: RaySettings) -> int:
    """Start the processes that are not running, print the URLs of the cluster, and return the exit status.

    Raises ConfigError if the model or the secret cannot be used on this host.
    """
    local = with_model(settings)
    secret = Path(settings.cluster_secret_file).read_bytes() if settings.cluster_secret_file else new_pem()
    router, *nodes = plan(local.model_copy(update={"cluster_secret_file": ""}), ())
    urls = []
    for name in (f"{ROUTER}-{number}" for number in range(settings.routers)):
        port, join_port = (each + _port_offset(name) for each in (settings.port, settings.registry_port))
        own = {"BATON_PORT": str(port), "BATON_REGISTRY_PORT": str(join_port)}
        actor = _start(settings, Child(name, router.command, router.environment | own), secret, "")
        if not (host := _placed(settings, {name: actor}).get(name)):
            return 1
        urls.append(f"http://{host}:{port}")
        secret = ray.get(actor.secret.remote())  # a router that already runs keeps its first secret
    joined = "" if settings.registry else _actor_name(settings.cluster, f"{ROUTER}-")
    actors = {child.name: _start(settings, child, secret, joined) for child in nodes}
    if len(_placed(settings, actors)) < len(actors):
        return 1
    print(f"started; the API will be at {' and '.join(urls)}; `baton ray status` shows whether the processes run")
    return 0


def _port_offset(name: str) -> int:
    """Return the difference between the ports of the router `name` and those of the first router.

    Routers have different ports, because several of them may run on one host.
    """
    return 2 * int(name.rpartition("-")[2])


def _start(settings: RaySettings, child: Child, secret: bytes, routers: str) -> Any:
    """Return the actor of a process. If the actor does not exist, create it. The actor starts the process if needed."""
    role = child.name.partition("-")[0]
    gpus = 1 if settings.placement == "gpu" and role != ROUTER else 0
    # On Ray, each node has a device of its own, so nodes do not divide a device's memory among them.
    own = {"BATON_HOST": settings.host, "BATON_GPU_MEMORY_UTILIZATION": str(settings.gpu_memory_utilization)}
    placed = Child(child.name, child.command, child.environment | own)
    actor: Any = (
        ray.remote(Supervisor)
        .options(
            name=_actor_name(settings.cluster, child.name),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=-1,
            num_cpus=settings.threads or 1,
            num_gpus=gpus,
            scheduling_strategy="SPREAD",
            label_selector={LABEL: role} if settings.placement == "label" else {},
            runtime_env={"env_vars": {"PYTHONPATH": python_path(os.environ)}},
        )
        .remote(placed, secret, routers, settings.registry_port)
    )
    actor.start.remote(placed)
    return actor


def _placed(settings: RaySettings, actors: dict[str, Any]) -> dict[str, str]:
    """Return the host address of each actor that Ray has placed. For each other actor, print what kind of host it
    needs."""
    addresses = _addresses(actors, PLACED_S)
    for name in actors.keys() - addresses.keys():
        label = f"the label {LABEL}={name.partition('-')[0]}"
        wanted = {"label": label, "gpu": "a free GPU", "spread": "a running raylet"}[settings.placement]
        cpus = f"{settings.threads or 1} free CPUs (--threads)"
        text = f"{name}: not started within {PLACED_S:.0f} s: it needs a host with {wanted} and {cpus}"
        print(f"baton ray up: {text}", file=sys.stderr)
    return addresses


def _addresses(actors: dict[str, Any], timeout_s: float) -> dict[str, str]:
    """Return the host address of each actor that answers in time."""
    asked = {actor.address.remote(): name for name, actor in actors.items()}
    found: dict[str, str] = {}
    for answer in ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s)[0] if asked else []:
        with contextlib.suppress(RayError):
            found[asked[answer]] = str(ray.get(answer))
    return found


def status(cluster: str) -> int:
    """Print one line for each process of the cluster. Return 1 if there is none."""
    actors = _actors(_actor_name(cluster, ""))
    for name, actor in actors.items():
        try:
            found = ray.get(actor.status.remote(), timeout=ANSWER_S)
            details = f"{found['host']:16} process {found['process']:<8} {found['state']}, {found['restarts']} restarts"
        except RayError as error:
            details = f"no host for this process, or no answer ({type(error).__name__})"
        print(f"{name:12} {details}")
    if not actors:
        print(f"baton ray: no cluster {cluster!r} runs here; `baton ray up` starts one", file=sys.stderr)
    return 0 if actors else 1


def down(cluster: str, timeout_s: float) -> int:
    """Drain the routers and then the nodes for at most `timeout_s` each, and remove the actors."""
    actors = _actors(_actor_name(cluster, ""))
    live = _addresses(actors, ANSWER_S)
    for is_router in (True, False):
        part = [actors[name] for name in live if name.startswith(ROUTER) == is_router]
        with contextlib.suppress(RayError):  # if an actor's host has just failed, there is no process to drain
            _drain(part, timeout_s + GRACE_S)
            ray.get([actor.kill.remote() for actor in part], timeout=ANSWER_S)
    for actor in actors.values():
        ray.kill(actor)
    return 0


def _drain(actors: Sequence[Any], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    ray.get([actor.drain.remote() for actor in actors], timeout=timeout_s)
    while not all(ray.get([actor.has_ended.remote() for actor in actors], timeout=timeout_s)):
        if time.monotonic() > deadline:
            return
        time.sleep(0.1)


def _actor_name(cluster: str, name: str) -> str:
    return f"baton-{cluster}-{name}"


def _actors(prefix: str) -> dict[str, Any]:
    """Return the actors whose names begin with `prefix`. Each key is an actor's name without the prefix."""
    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE]
    return {
        name.removeprefix(prefix): ray.get_actor(name, NAMESPACE) for name in sorted(names) if name.startswith(prefix)
    }


def connected(run: Callable[[], int]) -> int:
    """Connect to the Ray cluster at RAY_ADDRESS or on this host. Return the result of `run`, or 1 if there is no
    cluster."""
    try:
        ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, logging_level="warning")
    except (ConnectionError, RuntimeError) as error:
        print(f"baton ray: no Ray cluster at RAY_ADDRESS or on this host (`ray start`): {error}", file=sys.stderr)
        return 1
    try:
        return run()
    finally:
        ray.shutdown()
