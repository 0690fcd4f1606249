"""Test every fuzz target in a short run; `make fuzz` runs them longer."""

import tempfile
import time
from pathlib import Path

import pytest

from tests.fuzz.mutate import Finding, fuzz, run_one
from tests.fuzz.targets import TARGETS, Fuzzed, Target

SLOW = {
    "setting_values": 500,
    "http_requests": 500,
    "completion_bodies": 300,
    "trace_files": 500,
    "safetensors_files": 800,
}
RUNS = 1500


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_breaks_a_reader(name: str) -> None:
    fuzz(name, SLOW.get(name, RUNS), seed=1)


def _breaks(data: bytes) -> None:
    if b"]" in data:
        raise KeyError("unexpected")


def _allocates(data: bytes) -> None:
    bytearray(len(data) << 22)


def _is_slow(data: bytes) -> None:
    began = time.thread_time()
    while time.thread_time() - began < 0.12:
        pass


@pytest.mark.parametrize(
    ("fuzzed", "what"), [(_breaks, "KeyError: 'unexpected'"), (_allocates, "bytes for"), (_is_slow, r"0\.\d+ s")]
)
def test_a_finding_names_the_input_that_causes_it(
    fuzzed: Fuzzed, what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setitem(TARGETS, "broken", Target(fuzzed, (b"[1]",), 2))
    with pytest.raises(Finding, match=f"broken: .*{what}.*--input .*input"):
        _run_both_ways()


def _run_both_ways() -> None:
    for trace in (True, False):
        run_one("broken", b"[1]", trace=trace)
