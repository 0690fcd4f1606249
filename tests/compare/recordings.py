"""Recordings made by hand."""

from compare.load.outcome import LoadRecording, Outcome


def recording(*answers: list[int], error: str = "") -> LoadRecording:
    rows = [
        Outcome(index, f"r{index}", 0.0, tokens=answer, finish="length", error=error, token_s=[0.1] * len(answer))
        for index, answer in enumerate(answers)
    ]
    return LoadRecording(outcomes=rows)
