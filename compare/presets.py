"""Traffic without a trace: lengths drawn from log-normal fits of public ones, named after what they are like."""

from dataclasses import dataclass

import numpy as np

from compare.traces import Row


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution of numbers of tokens, cut off at the shortest and longest 1 % of its source."""

    mu: float
    sigma: float
    least: int
    most: int

    def draw(self, random: np.random.Generator) -> int:
        return int(np.clip(round(random.lognormal(self.mu, self.sigma)), self.least, self.most))


@dataclass(frozen=True, slots=True)
class Preset:
    """Prompts and answers. A share of the requests, `continues`, goes on with a session: all that was said in it
    so far, which its nodes may have cached, and `added` new tokens."""

    prompt: Lengths
    answer: Lengths
    source: str
    continues: float = 0.0
    added: Lengths = Lengths(0.0, 0.0, 1, 1)


PRESETS = {
    "chat": Preset(
        Lengths(6.713, 0.967, 40, 4122), Lengths(5.041, 0.908, 16, 612), "Azure LLM inference trace 2023, conversation"
    ),
    "code": Preset(
        Lengths(6.998, 1.344, 18, 7436), Lengths(2.775, 0.838, 6, 247), "Azure LLM inference trace 2023, code"
    ),
    "rag-long": Preset(
        Lengths(7.693, 0.805, 57, 3932), Lengths(5.201, 0.815, 34, 3415), "arXiv summarization, as processed by Vidur"
    ),
    "agentic": Preset(
        Lengths(8.733, 1.214, 1024, 94239),
        Lengths(5.359, 1.360, 3, 1056),
        "Mooncake conversation trace, its first 900 s",
        continues=0.305,
        added=Lengths(7.508, 1.167, 512, 33894),
    ),
}
MIX = {"chat": 0.5, "code": 0.25, "rag-long": 0.25}
NAMES = (*PRESETS, "mix")
OPEN_SESSIONS = 64  # that a request may go on with; the oldest is over when there is another


def source_of(name: str) -> str:
    """Where a preset's lengths are from, in words."""
    if name == "mix":
        return "; ".join(f"{share:.0%} {part}: {PRESETS[part].source}" for part, share in MIX.items())
    return PRESETS[name].source


def preset_rows(name: str, count: int, random: np.random.Generator) -> list[Row]:
    """`count` rows without times. "mix" takes each from one of the presets in MIX."""
    if name == "mix":
        # From numbers of their own: the same requests begin traffic of every rate, however many there are.
        parts = random.spawn(1)[0].choice(list(MIX), size=count, p=list(MIX.values()))
        return [_row(PRESETS[part], [], random, index) for index, part in enumerate(parts)]
    sessions: list[Row] = []
    return [_row(PRESETS[name], sessions, random, index) for index in range(count)]


def _row(preset: Preset, sessions: list[Row], random: np.random.Generator, index: int) -> Row:
    answer = preset.answer.draw(random)
    if not preset.continues:
        return Row((("", preset.prompt.draw(random)),), answer)
    before = None
    if sessions and random.random() < preset.continues:
        before = sessions.pop(int(random.integers(len(sessions))))
    if before is None:
        row = Row(((f"turn {index}", preset.prompt.draw(random)),), answer, session=f"session {index}")
    else:
        said = (f"answer {index}", before.max_tokens)  # drawn: what a model answers is not known before
        added = (f"turn {index}", preset.added.draw(random))
        row = Row((*before.pieces, said, added), answer, session=before.session)
    sessions.append(row)
    del sessions[:-OPEN_SESSIONS]
    return row
