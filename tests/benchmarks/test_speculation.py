"""Test the benchmark of speculative decoding at toy size."""

from pathlib import Path

from benchmarks.models import checkpoint
from benchmarks.speculation import ANSWER, PROMPT, engines_of, measure, scripts_of
from engine.components import build
from engine.options import BuildOptions


def test_edits_repeat_their_prompt_and_prose_does_not() -> None:
    edits, prose = scripts_of("edits", 3), scripts_of("prose", 3)
    for script in (*edits, *prose):
        assert (len(script.prompt), len(script.answer)) == (PROMPT, ANSWER)
    assert len({tuple(script.prompt) for script in edits}) == 3

    def repeated(prompt: list[int], answer: list[int]) -> float:
        known = set(zip(prompt, prompt[1:], prompt[2:], strict=False))
        return sum(three in known for three in zip(answer, answer[1:], answer[2:], strict=False)) / len(answer)

    assert all(repeated(script.prompt, script.answer) > 0.6 for script in edits)
    assert all(repeated(script.prompt, script.answer) < 0.3 for script in prose)


def test_right_guesses_are_counted_and_answers_are_complete(tmp_path: Path) -> None:
    parts = build(BuildOptions(str(checkpoint("tiny", tmp_path)), threads=1, kv_cache_memory=2**26))
    engines = engines_of(parts)
    row, run = measure(engines, "edits", 2, 1)
    for engine in engines.values():
        engine.close()
    assert row[0] == "edits, batch 2"
    assert 0 < run["accepted"] <= run["drafted"]
    assert all(rate > 0 for rates in run["tokens_per_s"].values() for rate in rates)
