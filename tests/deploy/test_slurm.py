"""Test deploy/slurm/baton.sbatch with a real Slurm: munged, slurmctld and three slurmd, which all run on this machine."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from shared.clock import now_ns
from tests.chaos.traffic import Load
from tests.cluster.harness import DEMO, ROOT, free_port, wait_for
from tests.deploy.remote import RETRIED, RouterClient, free_ports, is_lost, kill

MISSING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name)]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: apt-get install slurm-wlm munge"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd needs root"),
]
HOSTS = ("n1", "n2", "n3")
CONFIG = """
ClusterName=test
SlurmctldHost={machine}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={place}/munge.socket
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
SlurmdTimeout=30
MessageTimeout=30
ReturnToService=2
{hosts}
PartitionName=all Nodes=ALL Default=YES
"""


class Slurm:
    """A Slurm cluster of three hosts with 4 CPUs each, and at most one job of Baton on it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.port = free_ports(4)  # two ports for each router
        self.join_port = self.port + 1
        self.routers = [RouterClient(f"http://127.0.0.1:{self.port + more}") for more in (0, 2)]
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        self.environment = {"PATH": path, "HOME": str(place), "SLURM_CONF": str(place / "slurm.conf")}
        self.job = ""

    def start(self) -> None:
        machine = socket.gethostname().partition(".")[0]
        hosts = "\n".join(
            f"NodeName={name} NodeHostname={machine} NodeAddr=127.0.0.1 Port={free_port()} CPUs=4" for name in HOSTS
        )
        values = {"machine": machine, "controller": free_port(), "place": self.place, "hosts": hosts}
        (self.place / "slurm.conf").write_text(CONFIG.format(**values))
        (self.place / "state").mkdir()
        key = self.place / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"key-file": key, "socket": "munge.socket"}
        files |= {f"{name}-file": f"munge.{name}" for name in ("pid", "log", "seed")}
        flags = (f"--{name}={self.place / file}" for name, file in files.items())
        self.daemon("munged", "--foreground", "--force", *flags)
        wait_for((self.place / "munge.socket").exists, "munged listens")
        self.daemon("slurmctld", "-D")
        for host in HOSTS:
            self.daemon(host, "-D", "-N", host, program="slurmd")
        wait_for(
            lambda: self.command("sinfo", "-h", "-o", "%T %D", check=False).strip() == f"idle {len(HOSTS)}",
            "hosts are idle",
        )

    def daemon(self, name: str, *flags: str, program: str = "") -> None:
        with (self.place / f"{name}.out").open("ab") as log:
            command = [program or name, *flags]
            self.daemons[name] = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def command(self, *words: str, check: bool = True, **variables: object) -> str:
        environment = self.environment | {name: str(value) for name, value in variables.items()}
        done = subprocess.run(words, env=environment, cwd=self.place, check=False, capture_output=True, text=True)
        assert not check or done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def submit(self, **variables: object) -> None:
        """Start the job script with the hash model."""
        settings = {"MODEL": DEMO, "RUNNER": "hash", "NUM_BLOCKS": 4096, "THREADS": 1, "DISAGGREGATE": "always"}
        settings |= {"KV_DIRECTORY": self.place / "kv", "DRAIN_TIMEOUT_S": 60}
        variables |= {f"BATON_{name}": value for name, value in settings.items()}
        variables |= {"ROUTERS": len(self.routers), "PORT": self.port, "JOIN_PORT": self.join_port}
        script = str(ROOT / "deploy" / "slurm" / "baton.sbatch")
        self.job = self.command("sbatch", "--parsable", f"--nodes={len(HOSTS)}", script, **variables).strip()

    def wait_for_nodes(self, **counts: int) -> None:
        try:
            for router in self.routers:
                router.wait_for_nodes(**counts)
        except AssertionError as error:
            state = [self.command(*words, check=False) for words in (("sinfo", "-N", "-l"), ("squeue", "--steps"))]
            state += [f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.place.glob("*.out"))]
            raise AssertionError("\n".join((str(error), *state, self.log()))) from None

    def steps(self) -> dict[str, tuple[str, str]]:
        """Return the step id and the host of each running part."""
        lines = self.command("squeue", "--steps", "-h", "-o", "%j %i %N").split("\n")
        return {name: (step, host) for name, step, host in (line.split() for line in lines if line)}

    def pid(self, part: str) -> int:
        """Return the process id of a part. Its parent is a shell, whose parent is the slurmstepd of the step."""
        step = f"slurmstepd: [{self.steps()[part][0]}]"
        for process in psutil.process_iter(["cmdline"]):
            parents = process.parents() if "baton" in " ".join(process.info["cmdline"] or ()) else []
            if len(parents) > 1 and step in " ".join(parents[1].cmdline()):
                return process.pid
        raise AssertionError(f"no process of {part}: {self.log()}")

    def kill(self, part: str) -> tuple[int, int]:
        return kill(self.pid(part))

    def kill_host(self, host: str) -> tuple[int, int]:
        """Kill the slurmd, slurmstepds, shells and parts of a host. Return the times before and after the kill."""
        parts = [psutil.Process(self.pid(part)) for part, (_, at) in self.steps().items() if at == host]
        before = now_ns()
        for process in (
            psutil.Process(self.daemons[host].pid),
            *(one for each in parts for one in each.parents()[1::-1]),
        ):
            process.kill()
        for process in parts:
            process.kill()
        self.daemons.pop(host).wait()
        return before, now_ns()

    def drain(self, step: str = "") -> None:
        """Drain one step, or all steps of the job."""
        self.command("scancel", "--ctld", "--signal=TERM", step or self.job)

    def ended(self) -> str:
        """Wait for the end of the job, and return its state."""
        query = ("squeue", "-h", "-j", self.job, "-t", "all", "-o", "%T")
        wait_for(lambda: self.command(*query).strip() in {"COMPLETED", "FAILED", "CANCELLED"}, "the job ends")
        return self.command(*query).strip()

    def left_behind(self) -> list[Any]:
        """Return the processes and files that outlived the job."""
        files = list(self.place.glob(".baton*"))  # the next node removes a killed node's files in the KV directory
        return [line for line in command_lines() if str(self.join_port) in line or "slurmstepd:" in line] + files

    def log(self) -> str:
        return (self.place / f"baton-{self.job}.log").read_text()[-6000:]

    def close(self) -> None:
        if self.job:
            self.command("scancel", self.job, check=False)
            with contextlib.suppress(AssertionError):
                wait_for(lambda: not self.left_behind(), "the job is gone", 60)
        for process in reversed(self.daemons.values()):
            process.terminate()
        for process in self.daemons.values():
            process.wait(60)


def command_lines() -> Iterator[str]:
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE:
            yield " ".join(process.info["cmdline"] or ())


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with tempfile.TemporaryDirectory(prefix="baton-") as directory:
        running = Slurm(Path(directory))
        try:
            running.start()
            yield running
        finally:
            running.close()


def load(slurm: Slurm, least: int, urls: Sequence[str] = (), **options: Any) -> Load:
    return Load(urls or [router.url for router in slurm.routers], "model", 4, least, **options)


def test_a_job_serves_restarts_a_killed_node_and_drains_without_a_lost_request(slurm: Slurm) -> None:
    slurm.submit(PREFILL=1, DECODE=2)
    slurm.wait_for_nodes(prefill=1, decode=2)
    first = slurm.steps()["decode-0"]
    with load(slurm, 60) as requests:
        wait_for(lambda: len(requests.outcomes) > 10, "requests end")
        slurm.kill("decode-0")
        wait_for(lambda: slurm.steps().get("decode-0", first) != first, "decode-0 starts again")
        slurm.wait_for_nodes(prefill=1, decode=2)
    assert requests.failures() == []

    slurm.drain(slurm.steps()["decode-1"][0])
    wait_for(lambda: "decode-1" not in slurm.steps(), "the node drains")
    with load(slurm, 20) as requests:  # the clients send their last requests before the job drains
        wait_for(lambda: len(requests.outcomes) > 5, "requests end")
    assert requests.failures() == []
    assert "decode-1" not in slurm.steps(), "a drained node was started again"
    slurm.drain()
    assert slurm.ended() == "COMPLETED", slurm.log()
    wait_for(lambda: not slurm.left_behind(), f"nothing is left: {slurm.left_behind()}", 60)


def test_a_job_whose_settings_are_invalid_ends_with_status_2(slurm: Slurm) -> None:
    slurm.submit(BATON_MAX_NUM_SEQS="many")
    assert slurm.ended() == "FAILED", slurm.log()
    assert "BATON_MAX_NUM_SEQS 'many'" in slurm.log()
    wait_for(lambda: not slurm.left_behind(), f"nothing is left: {slurm.left_behind()}", 60)


@pytest.mark.exhaustive
def test_a_job_survives_the_loss_of_a_host_and_of_a_router(slurm: Slurm) -> None:
    slurm.submit(PREFILL=1, DECODE=1)
    slurm.wait_for_nodes(prefill=1, decode=1)
    first, second = (router.url for router in slurm.routers)
    host = slurm.steps()["router-1"][1]
    (victim,) = (part for part, (_, at) in slurm.steps().items() if at == host and part != "router-1")
    for router, other, lose in (
        (second, first, lambda: slurm.kill_host(host)),
        (first, second, lambda: slurm.kill("router-0")),
    ):
        with load(slurm, 60, urls=[other]) as ours, load(slurm, 60, urls=[router, other], refusals=RETRIED) as theirs:
            wait_for(lambda theirs=theirs: len(theirs.outcomes) > 10, "requests end")
            steps = slurm.steps()
            killed = lose()
            wait_for(lambda steps=steps: slurm.steps().items() ^ steps.items(), "Slurm notices it", 120)
            slurm.wait_for_nodes(prefill=1, decode=1)
        assert ours.failures() == []
        assert [outcome.lost for outcome in theirs.outcomes if is_lost(outcome, killed)] == []
        assert slurm.steps()[victim][1] != host
    slurm.drain()
    assert slurm.ended() == "COMPLETED", slurm.log()
    wait_for(lambda: not slurm.left_behind(), f"nothing is left: {slurm.left_behind()}", 60)
