"""Test that `baton compare` rejects bad input: it prints one line on stderr, exits with status 2 and starts nothing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.cli import main
from compare.load.outcome import LatencySlo
from compare.main import prepare
from compare.options import CompareOptions
from compare.report.terminal import row_of, show
from compare.run.session import Experiment
from shared.errors import ConfigError
from shared.model_files import DEMO_MODEL
from tests.command_line import refusal
from tests.compare.reports import page_report


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    line = refusal(capsys, lambda: main(["compare", *arguments]))
    assert line.startswith("baton compare: ")
    return line


@pytest.fixture(autouse=True)
def in_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in a temporary working directory, because reports are written to the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--arms", "colocatd:2", "colocated:2"], "'colocatd:2' is not an arm; write colocated:N"),
        (["--arms", "colocated:999", "disaggregated:500p499d"], "999 devices need 999 cores"),
        (["--preset", "poetry"], "--preset poetry: must be chat, code, rag-long, agentic or mix"),
        (["--on", "paper"], "--on paper: must be live, emulated or sim"),
        (["--too-long", "no"], "--too-long no: must be error, cut or drop"),
        (["--rate", "3", "--find-capacity"], "--rate and --find-capacity: give only one of them"),
        (["--rate", "0"], "--rate 0.0: must be over 0"),
        (["--rate", "1e8"], "1e+08 requests/s for 20 s: a period has at most 1000000 requests; give a lower --rate"),
        (["--rate", "4", "--burstiness", "1e-9"], "Invalid value for '--burstiness'"),
        (["--tbt-slo-ms", "inf"], "--tbt-slo-ms inf: must be a number of at most 1e+09"),
        (["--timeout", "inf"], "--timeout inf: must be a number of at most 1e+09"),
        (["--trace", "t.csv", "--preset", "chat"], "--trace and --preset: give only one of them"),
        (["--trace-format", "azure"], "--trace-format: has no effect without --trace; give --trace, or leave out --trace-f"),
        (["--start", "5"], "--start: has no effect without --trace; give --trace, or leave out --start"),
        (["--trace", "t.csv", "--start", "5", "--rate", "3"], "--start and --rate: give only one of them"),
        (["--trace", "t.csv", "--start", "5", "--find-capacity"], "--start and --find-capacity: give only one of them"),
        (["--attainment", "0.8"], "--attainment: has no effect without --find-capacity; give --find-capacity, or leave"),
        (["--trace", "t.csv", "--burstiness", "0.5"], "--burstiness with --trace: has no effect without --rate or --find-"),
        (["--trace", "no.csv", "--burstiness", "0.5", "--rate", "3"], "no.csv: No such file"),
        (["--trace", "no.csv", "--burstiness", "0.5", "--find-capacity", "--attainment", "0.8"], "no.csv: No such file"),
        (["--trace", "missing.csv"], "missing.csv: No such file"),
        (["--trace", str(DEMO_MODEL / "config.json"), "--trace-format", "excel"], "--trace-format excel: must be auto, azure"),
        (["--url", "http://127.0.0.1:9", "--arms", "colocated:2"], "--url and --arms: give only one of them"),
        (["--url", "http://127.0.0.1:9", "--set", "block_size=16"], "--url and --set: give only one of them"),
        (["--url", "http://127.0.0.1:9", "--on", "emulated"], "--url: cannot be emulated; leave out --on, or give --arms"),
        (["--url", "http://127.0.0.1:9"], "--url: a comparison needs two"),
        (["--engines", "http://a:1,http://b:2"], "--engines: give --model too"),
        (["--engines", "a:1", "--model", str(DEMO_MODEL)], "--engines a:1: must be the URL"),
        (["--engines", "http://a:1", "--model", str(DEMO_MODEL)], "--engines: 1 servers, but the arms have 2 devices"),
        (["--engines", "http://a:1,http://b:2", "--on", "sim"], "--engines: cannot be simulated"),
        (["--emulate", "h900"], "--emulate h900: is neither a file nor one of"),
        (["--emulate", "h200-llama-3.1-8b", "--url", "http://127.0.0.1:9", "--control"], "--emulate: needs --arms"),
        (["--on", "sim", "--emulate", "h900"], "--emulate h900: is neither a file nor one of"),
        (["--on", "sim", "--url", "http://127.0.0.1:9"], "--url: cannot be simulated"),
        (["--on", "sim", "--set", "kv_channel=pool"], "kv_channel=pool is not simulated"),
        (["--on", "sim", "--set", "speculative_config=ngram"], "speculative_config is not simulated"),
        (["--model", "./nowhere"], "--model"),
        (["--scale-tokens", "9"], "requests exceed the model's 8192 tokens"),
    ],
)  # fmt: skip
def test_invalid_options_are_refused(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]):
    few = ["--duration", "60", "--seeds", "1"] if "--scale-tokens" in arguments else []
    assert complaint in refused([*arguments, *few], capsys)
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    "command",
    [["compare"], ["compare", "--on", "sim", "--model", str(DEMO_MODEL)], ["plan", "--validate", "emulated"]],
    ids=["compare", "sim", "plan"],
)
def test_prompts_with_tokens_outside_the_vocabulary_are_refused(command: list[str], capsys: pytest.CaptureFixture[str]):
    rows = [{"t": at_s, "prompt": [5, last], "max_tokens": 4} for at_s, last in enumerate((2047, 2048))]
    Path("own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    line = refusal(capsys, lambda: main([*command, "--trace", "own.jsonl"]))
    complaint = "prompt has 2048; give token ids of the model, which are from 0 to 2047"
    assert line.strip() == f"baton {command[0]}: own.jsonl, line 2, read as own: {complaint}"
    assert [path.name for path in Path().iterdir()] == ["own.jsonl"]


def test_an_output_directory_below_a_file_is_refused(capsys: pytest.CaptureFixture[str]):
    Path("file").write_text("")
    assert "--out file/report" in refused(["--out", "file/report"], capsys)


def test_urls_that_do_not_answer_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:  # `refused` expects one line, but the plan is printed first
        main(["compare", "--url", "http://127.0.0.1:9", "--url", "http://127.0.0.1:11", "--out", "o"])
    assert caught.value.code == 2
    assert "nothing answers at http://127.0.0.1:9" in capsys.readouterr().err


def test_the_table_has_a_row_for_each_arm():
    report = {
        "summary": {"a": {"attainment": {"mean": 0.934}, "ttft_p50_ms": {"mean": 12.34}, "tbt_p99_ms": {"mean": None}}},
        "busy": {"a": {"n0": {"prefill": 0.2, "decode": 0.4}, "n1": {"prefill": 0.4, "decode": 0.4}}},
        "miss_causes": {"a": {"TBT: transfer": 1, "TTFT: prefill queue": 3}},
    }
    row = row_of(report, "a")
    assert row[:3] == ["a", "-", "93.4"]
    assert row[4] == "12.3"
    assert row[7] == "-"
    assert row[-2:] == ["30/40", "TTFT: prefill queue (75%)"]
    assert row_of(json.loads(json.dumps(report)), "absent")[1:] == ["-"] * 9 + ["-/-", "-"]


def ready(out: Path) -> Experiment:
    lines = [json.dumps({"t": 0.5 * number, "prompt": "three little words", "max_tokens": 4}) for number in range(80)]
    Path("own.jsonl").write_text("\n".join(lines))
    for name in ("tokenizer.json", "config.json"):
        Path(name).write_bytes((DEMO_MODEL / name).read_bytes())
    urls = ["http://127.0.0.1:9", "http://127.0.0.1:11"]
    options = CompareOptions(url=urls, trace=Path("own.jsonl"), model=str(Path().resolve()), seeds=2, out=out)
    return prepare(options)[0]


def test_trace_and_tokenizer_are_read_once(tmp_path: Path):
    """A search for a capacity draws traffic for dozens of rates and seeds, and must read the files only once."""
    made = ready(tmp_path)
    for name in ("own.jsonl", "tokenizer.json", "config.json"):
        Path(name).unlink()
    assert len(made.traffic(2, 5.0).arrivals[0].prompt) > 1
    assert made.traffic(1, None).arrivals


def test_a_request_with_one_limit_keeps_the_other_limit_of_the_run():
    slos = {"ttft_ms": 90}, {"tbt_ms": 7}, {"ttft_ms": 0, "tbt_of": "max"}
    lines = [json.dumps({"t": 0, "prompt_len": 8, "max_tokens": 4, "slo": slo}) for slo in slos]
    Path("own.jsonl").write_text("\n".join(lines))
    options = CompareOptions(on="sim", trace=Path("own.jsonl"), ttft_slo_ms=300.0, tbt_slo_ms=30.0, seeds=1)
    arrivals = prepare(options)[0].traffic(1, None).arrivals
    assert [arrival.slo for arrival in arrivals] == [LatencySlo(90, 30), LatencySlo(300, 7), LatencySlo(0, 30, "max")]


def test_a_simulation_has_no_limits_of_the_demo_model():
    """The cost file describes a model with a larger vocabulary and a longer context."""
    line = {"t": 0, "max_tokens": 4}
    rows = line | {"prompt_len": 50_000}, line | {"prompt": [128_000]}
    Path("own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = CompareOptions(on="sim", trace=Path("own.jsonl"), seeds=1)
    first, second = prepare(options)[0].traffic(1, None).arrivals
    assert len(first.prompt) == 50_000
    assert second.prompt == (128_000,)
    with pytest.raises(ConfigError, match="give token ids of the model, which are from 0"):
        prepare(replace(options, model=str(DEMO_MODEL)))
    Path("own.jsonl").write_text(json.dumps(line | {"prompt_len": 900_000}))
    with pytest.raises(ConfigError, match="exceed the model's 880000 tokens"):
        prepare(options)


def test_a_trace_for_a_search_may_be_shorter_than_the_periods():
    """The search begins at the mean rate of the trace."""
    lines = [json.dumps({"t": number / 2, "prompt_len": 8, "max_tokens": 4}) for number in range(81)]
    Path("own.jsonl").write_text("\n".join(lines))
    made = prepare(CompareOptions(on="sim", trace=Path("own.jsonl"), find_capacity=True))[0]
    assert made.first_rate == 81 / 40
    assert 20 < len(made.traffic(6, None).arrivals) < 70


def test_notes_are_printed_with_the_verdict(capsys: pytest.CaptureFixture[str]):
    report = page_report() | {"notes": ["2 of 6 periods of colocated:2 are invalid and left out"]}
    show(report)
    assert "note: 2 of 6 periods of colocated:2 are invalid" in capsys.readouterr().out
