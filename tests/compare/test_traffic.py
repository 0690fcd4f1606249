"""Test traffic, which is drawn once per seed, and traces: every format is read, and errors name file and line."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare.load.outcome import LatencySlo
from compare.load.traces import Encode, detect_form, read_trace
from compare.load.traffic import PRESET_NAMES, PromptVocabulary, Traffic, TrafficSource
from compare.options import CompareOptions
from shared.errors import ConfigError

VOCABULARY = PromptVocabulary(512, {0, 1, 2})


def written(directory: Path, *lines: str) -> Path:
    path = directory / "trace"
    path.write_text("\n".join(lines) + "\n")
    return path


def draw(
    source: Path | str,
    duration: float = 100.0,
    *,
    seed: int = 1,
    limit: int = 0,
    encode: Encode | None = None,
    **fields: Any,
) -> Traffic:
    """Return the traffic of `source`, the name of a preset or the path of a trace. `fields` are further options."""
    if isinstance(source, str):
        options, trace = CompareOptions(preset=source, duration=duration, **{"scale_tokens": 1.0} | fields), []
    else:
        options, trace = CompareOptions(trace=source, duration=duration, **fields), read_trace(source, encode=encode)
    return TrafficSource(options, VOCABULARY, trace, limit).draw(seed)


def own(**fields: object) -> str:
    return json.dumps({"t": 0, "prompt_len": 8, "max_tokens": 4} | fields)


# ---- formats -------------------------------------------------------------------------------------------------------

AZURE = ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:04.0319600,3180,8", "2023-11-16 18:17:03,4808,10")
AZURE_2024 = ("TIMESTAMP,ContextTokens,GeneratedTokens", "2024-05-10 00:00:00.009930+00:00,2162,5")
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "5,ChatGPT,472,18,490,Conversation log",
    "45,ChatGPT,1087,0,1087,Conversation log",
    "118,GPT-4,417,276,693,API log",
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [7, 8, 9]}',
    '{"timestamp": 1500, "input_length": 1100, "output_length": 6, "hash_ids": [7, 8, 10]}',
)


@pytest.mark.parametrize(
    ("lines", "form", "rows"),
    [
        (AZURE, "azure", [(0.0, 4808, 10), (1.03196, 3180, 8)]),
        (AZURE_2024, "azure", [(0.0, 2162, 5)]),
        (BURSTGPT, "burstgpt", [(0.0, 472, 18), (113.0, 417, 276)]),
        (MOONCAKE, "mooncake", [(0.0, 1200, 5), (1.5, 1100, 6)]),
        ((own(t=2), own(t=0.5)), "own", [(0.5, 8, 4), (2.0, 8, 4)]),
    ],
)
def test_every_format_is_recognised_and_read(tmp_path: Path, lines: tuple[str, ...], form: str, rows: list) -> None:
    path = written(tmp_path, *lines)
    assert detect_form(path) == form
    read = [(row.at_s, row.prompt_len, row.max_tokens) for row in read_trace(path)]
    assert [row[1:] for row in read] == [row[1:] for row in rows]
    assert [row[0] for row in read] == [row[0] if row[0] is None else pytest.approx(row[0]) for row in rows]


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ((*AZURE, "yesterday,1,2"), "line 4, read as azure: Invalid isoformat string: 'yesterday'"),
        (
            (*AZURE, "2023-11-16 18:17:09,many,2"),
            "line 4, read as azure: ContextTokens is 'many', which is not a number of tokens",
        ),
        ((*AZURE, "2023-11-16 18:17:09,-5,2"), "line 4, read as azure: ContextTokens is '-5', which is not a"),
        ((*AZURE, "2023-11-16 18:17:09,5"), "line 4, read as azure: GeneratedTokens is None, which is not a"),
        ((*MOONCAKE, '{"timestamp": 3}'), "line 3: field 'input_length' of the format mooncake is missing"),
        ((*MOONCAKE, "{"), "line 3, read as mooncake: Expecting property name"),
        (
            ('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7]}',),
            "line 1, read as mooncake: 1 hash_ids for 600 tokens",
        ),
        ((own(), "[1]"), "line 2, read as own: the line is not a JSON object"),
        ((own(max_token=3),), "line 1, read as own: unknown field 'max_token'"),
        ((own(prefix_len=3),), "line 1, read as own: prefix_len needs a prefix_id"),
        ((own(prompt="Hello"),), "line 1, read as own: prompt is text"),
        (
            (own(), own(prompt=[5, -1])),
            "line 2, read as own: prompt has -1; give token ids of the model, which are from 0",
        ),
        ((own(prompt=[True]),), "line 1, read as own: prompt has True; give token ids"),
        ((own(t=-1),), "line 1, read as own: -1 is not a time"),
        ((own(slo={"ttft": 3}),), "line 1, read as own: slo is {'ttft': 3}; it may have ttft_ms"),
        ((own(slo={"ttft_ms": "fast"}),), "line 1, read as own: slo: ttft_ms is 'fast'; it must be milliseconds"),
        ((own(slo={"tbt_ms": -1}),), "line 1, read as own: slo: tbt_ms is -1"),
        ((own(slo={"tbt_ms": 10**400}),), "line 1, read as own: slo: tbt_ms is 10000"),
        ((own(slo={"tbt_of": "p50"}),), "line 1, read as own: slo: tbt_of is 'p50'; it must be p99, max or mean"),
        ((own(t=float("nan")),), "line 1, read as own: nan is not a time"),
        ((own(), '{"t": 1, "prompt": ' + "[" * 100_000), "line 2, read as own: maximum recursion depth"),
        (("a,b,c", "1,2,3"), "its first line matches no known format"),
        ((BURSTGPT[0], BURSTGPT[2]), "contains no request"),
    ],
)
def test_the_error_for_an_invalid_trace_names_the_line(tmp_path: Path, lines: tuple[str, ...], complaint: str) -> None:
    path = written(tmp_path, *lines)
    with pytest.raises(ConfigError, match=re.escape(complaint)) as refused:
        read_trace(path)
    assert str(refused.value).startswith(str(path))
    assert "\n" not in str(refused.value)


def test_dos_line_ends_a_byte_order_mark_and_blank_lines_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([own(), "", own(t=1), "", ""]).encode())
    assert [row.at_s for row in read_trace(path)] == [0.0, 1.0]


# ---- times ---------------------------------------------------------------------------------------------------------


def test_a_window_of_a_trace_keeps_its_own_times(tmp_path: Path) -> None:
    path = written(tmp_path, *(own(t=at_s) for at_s in (0, 1.25, 2.5, 3, 7)))
    assert [arrival.at_s for arrival in draw(path, 2.0, start=1.0).arrivals] == [0.25, 1.5]
    assert [arrival.at_s for arrival in draw(path, 2.0, start=1.0, seed=2).arrivals] == [0.0]
    assert [arrival.at_s for arrival in draw(path, scale_tokens=0.5).arrivals] == [0, 1.25, 2.5, 3, 7]


@pytest.mark.parametrize("preset", ["chat", "mix", "agentic"])
def test_two_rates_of_a_seed_have_the_same_requests_at_scaled_times(preset: str) -> None:
    slow = draw(preset, 20.0, rate=2.0, seed=3).arrivals
    fast = draw(preset, 20.0, rate=4.0, seed=3).arrivals
    assert 20 < len(slow) < len(fast)
    fast = fast[: len(slow)]
    assert [arrival.at_s for arrival in slow] == pytest.approx([2 * each.at_s for each in fast])
    assert [(each.prompt, each.max_tokens) for each in slow] == [(each.prompt, each.max_tokens) for each in fast]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_have_the_given_rate_and_burstiness(tmp_path: Path, burstiness: float, variation: float) -> None:
    path = written(tmp_path, *[own()] * 10)
    gaps = np.diff([arrival.at_s for arrival in draw(path, 800.0, rate=5.0, burstiness=burstiness).arrivals])
    assert np.mean(gaps) == pytest.approx(0.2, rel=0.1)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(variation, rel=0.1)


def test_a_short_trace_is_repeated_with_other_tokens(tmp_path: Path) -> None:
    path = written(tmp_path, *(own(prefix_id="a", prefix_len=6, prompt_len=8) for _ in range(3)))
    traffic = draw(path, 7.0, rate=1.0)
    count = len(traffic.arrivals)
    assert traffic.notes["laps"] == -(-count // 3) > 1
    prefixes = [arrival.prompt[:6] for arrival in traffic.arrivals]
    assert len(set(prefixes)) >= 2
    assert len({arrival.prompt for arrival in traffic.arrivals}) == count


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"rate": 0.0}, "--rate 0.0: must be over 0"),
        ({"duration": float("inf"), "rate": 1.0}, "--duration inf: must be over 0"),
        ({"rate": 1.0, "scale_tokens": 0}, "--scale-tokens 0: must be over 0"),
        ({"duration": 0.01, "rate": 0.01}, "chat: no request is left to send"),
    ],
)
def test_the_error_for_an_impossible_option_names_its_flag(options: dict[str, float], complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        draw("chat", **options)


# ---- tokens --------------------------------------------------------------------------------------------------------


def test_traffic_is_the_same_for_one_seed_and_differs_between_seeds() -> None:
    one, again, two = (draw("mix", 4.0, rate=5.0, seed=seed).arrivals for seed in (1, 1, 2))
    assert one == again
    assert [arrival.at_s for arrival in one] != [arrival.at_s for arrival in two]
    assert not {arrival.prompt for arrival in one} & {arrival.prompt for arrival in two}


def test_prompts_contain_every_id_except_the_excluded() -> None:
    drawn = set(PromptVocabulary(40, {3, 39}).draw(1, "text", 2000))
    assert drawn == set(range(40)) - {3, 39}
    assert VOCABULARY.draw(1, "text", 30) == VOCABULARY.draw(1, "text", 100)[:30]
    with pytest.raises(ConfigError, match="vocabulary has 2 tokens, all special"):
        PromptVocabulary(2, {0, 1})


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.013])
def test_equal_hashes_are_equal_tokens_at_every_scale(tmp_path: Path, scale: float) -> None:
    path = written(tmp_path, *MOONCAKE)
    one, two = draw(path, scale_tokens=scale).arrivals
    shared = round(1024 * scale)
    assert one.prompt[:shared] == two.prompt[:shared]
    assert one.prompt[shared:] != two.prompt[shared:]
    assert (len(one.prompt), len(two.prompt)) == (round(1200 * scale), round(1100 * scale))
    assert min(one.max_tokens, two.max_tokens) >= 1


def test_own_rows_share_a_prefix_and_keep_their_slo(tmp_path: Path) -> None:
    lines = [own(t=at_s, prefix_id="system", prefix_len=5, session="s", slo={"ttft_ms": 9}) for at_s in (0, 1)]
    path = written(tmp_path, *lines, own(t=2, prompt=[4, 5, 6]), own(t=3, prompt="Hi"))
    arrivals = draw(path, encode=lambda text: [10 + len(text)]).arrivals
    assert arrivals[0].prompt[:5] == arrivals[1].prompt[:5]
    assert arrivals[0].prompt[5:] != arrivals[1].prompt[5:]
    assert arrivals[0].slo == LatencySlo(ttft_ms=9)
    assert arrivals[2].prompt == (4, 5, 6)
    assert arrivals[3].prompt == (12,)


# ---- lengths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_presets_draw_plausible_lengths(name: str) -> None:
    notes = draw(name, 200.0, rate=5.0, scale_tokens=0.1).notes
    assert notes["num_requests"] == pytest.approx(1000, rel=0.1)
    assert notes["source"]
    assert 3 <= notes["prompt_tokens"]["p50"] <= notes["prompt_tokens"]["p99"]
    assert notes["output_tokens"]["p50"] >= 1
    medians = {"chat": 82, "code": 109, "rag-long": 219}
    if name in medians:
        assert notes["prompt_tokens"]["p50"] == pytest.approx(medians[name], rel=0.25)


def test_an_agentic_session_continues_with_its_whole_history() -> None:
    prompts = [arrival.prompt for arrival in draw("agentic", 12.0, rate=5.0, scale_tokens=0.01).arrivals]
    continued = [
        later for number, later in enumerate(prompts) if any(later[: len(one)] == one for one in prompts[:number])
    ]
    assert 8 <= len(continued) <= 30


def test_prompts_over_the_context_are_refused_cut_or_dropped_and_counted(tmp_path: Path) -> None:
    """A request that fits the context is not changed, even if its answer is longer than half of the context."""
    path = written(tmp_path, own(max_tokens=50), own(t=1, prompt_len=100, max_tokens=20), own(t=2, max_tokens=90))
    with pytest.raises(
        ConfigError, match=r"2 of 3 requests exceed the model's 64 tokens .* --scale-tokens 0\.53 or less"
    ):
        draw(path, limit=64)
    with pytest.raises(ConfigError, match="1 of 3 requests exceed"):  # although the first period has no such request
        TrafficSource(CompareOptions(trace=path, duration=1), VOCABULARY, read_trace(path), 110).check_trace()
    cut, dropped, scaled = (
        draw(path, limit=64, **options)
        for options in ({"too_long": "cut"}, {"too_long": "drop"}, {"scale_tokens": 0.53})
    )
    assert [(len(each.prompt), each.max_tokens) for each in cut.arrivals] == [(8, 50), (44, 20), (8, 32)]
    assert (cut.notes["cut"], cut.notes["refused"]) == (2, 0)
    assert [(arrival.at_s, arrival.max_tokens) for arrival in dropped.arrivals] == [(0, 50)]
    assert (dropped.notes["cut"], dropped.notes["refused"]) == (0, 2)
    assert max(len(each.prompt) + each.max_tokens for each in scaled.arrivals) <= 64


def test_both_lengths_are_scaled_to_at_least_1_unless_the_trace_has_tokens(tmp_path: Path) -> None:
    path = written(tmp_path, own(prompt_len=200, max_tokens=50), own(t=1, prompt_len=2, max_tokens=1))
    arrivals = draw(path, scale_tokens=0.1).arrivals
    assert [(len(each.prompt), each.max_tokens) for each in arrivals] == [(20, 5), (1, 1)]
    with pytest.raises(ConfigError, match="--scale-tokens cannot change"):
        draw(written(tmp_path, own(prompt=[3, 4])), scale_tokens=0.5)
