"""Start `baton compare` for tests, and read its report."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cluster.harness import ROOT

# The limits are long, because other tests share the machine and these tests do not measure latencies.
QUICK = ["--preset", "chat", "--scale-tokens", "0.04", "--rate", "8", "--ttft-slo-ms", "60000", "--tbt-slo-ms", "60000"]


def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "baton", "compare", "--out", str(directory / "report"), *QUICK, *arguments]
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command, env=environment, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def report_in(directory: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((directory / "report" / "report.json").read_text())
    assert report["schema"] == "baton.compare/1"
    return report
