"""Test the wheel: build it, install it outside the tree, and serve the demo model while other packages have the names
of Baton's packages."""

import os
import re
import signal
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["sources"]
DECOYS = ("shared", "router", "scheduler", "demo")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return next(directory.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a new environment, which finds this environment's libraries but not this checkout."""
    directory = tmp_path_factory.mktemp("installed") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    python = str(directory / "bin" / "python")
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        str(wheel),
    ]
    subprocess.run(command, check=True)
    # Python ignores the .pth files, such as that of an editable install, in directories that another .pth file adds.
    libraries = [path for path in sys.path if path.endswith("-packages")]
    (site_packages(directory) / "libraries.pth").write_text("\n".join(libraries))
    return directory


@pytest.fixture
def decoys(tmp_path: Path) -> Path:
    """Return a directory with packages that have the names of Baton's packages and must not be imported."""
    for name in DECOYS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('the {name} of the user')")
    return tmp_path


def site_packages(environment: Path) -> Path:
    return next((environment / "lib").glob("python*/site-packages"))


def variables(**own: str) -> dict[str, str]:
    """Return the environment variables without those that lead to the checkout. The kernels are not compiled, which
    saves 20 s."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "BATON_"))}
    return kept | {"NUMBA_CPU_FEATURES": "+sse2"} | own


def test_a_wheel_contains_each_file_of_the_packages(wheel: Path) -> None:
    expected = {
        f"{place}/{path.relative_to(ROOT / folder)}"
        for folder, place in ({"baton": "baton"} | FOLDERS).items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    # Of the files of `demo`, the wheel contains only those in `demo/model`.
    expected = {name for name in expected if not name.startswith("baton/demo/") or name.startswith("baton/demo/model/")}
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.startswith("baton/")} == expected


def test_an_installation_adds_one_package(environment: Path) -> None:
    added = {path.name for path in site_packages(environment).iterdir()} - {"libraries.pth"}
    assert {re.sub(r"-[\d.]+\.dist-info", ".dist-info", name) for name in added} == {"baton", "baton_serve.dist-info"}


@pytest.mark.parametrize("path", [{}, {"PYTHONPATH": "."}, {"PYTHONPATH": ".", "PYTHONSAFEPATH": "1"}])
@pytest.mark.parametrize("command", [("baton",), ("python", "-m", "baton")])
def test_the_module_is_the_command(
    environment: Path, decoys: Path, path: dict[str, str], command: tuple[str, ...]
) -> None:
    program = str(environment / "bin" / command[0])
    done = subprocess.run(
        [program, *command[1:], "--version"],
        cwd=decoys,
        env=variables(**path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("baton 0.")


@pytest.mark.parametrize("safe_path", ["", pytest.param("1", marks=pytest.mark.exhaustive)])
def test_an_installation_serves_the_demo_model_next_to_packages_of_the_same_names(
    environment: Path, decoys: Path, safe_path: str
) -> None:
    command = [str(environment / "bin" / "baton"), "up", "--port", "0", "--drain-timeout-s", "1"]
    own = variables(PYTHONPATH=str(decoys), PYTHONSAFEPATH=safe_path)
    with subprocess.Popen(
        command, cwd=decoys, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        output = []
        try:
            for line in process.stdout:
                output.append(line)
                if "complete: disaggregated, 1 prefill and 1 decode" in line:
                    break
            (url,) = re.findall(r"serving at (http://\S+)", "".join(output))
            message = {"role": "user", "content": "What news?"}  # the template is rendered in a separate process
            with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
                answer = client.post(
                    "/v1/chat/completions", json={"messages": [message], "max_tokens": 4, "model": "model"}
                )
                assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 4), answer.text
                assert client.get("/").headers["content-type"].startswith("text/html")
        finally:
            process.send_signal(signal.SIGTERM)
            output += process.communicate(timeout=60)[0]
    assert process.returncode == 0, "".join(output)
