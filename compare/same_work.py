"""Did the arms do the same work? Their answers to the same requests: token by token, or by length without ids.

Pure. The `recordings` are those of one traffic, by arm.
"""

from collections.abc import Mapping, Sequence

from compare.endpoint import Document
from compare.outcome import Outcome, Recording

LEAST_SHARE = 0.01  # of the tokens generated: so much of answers that end by themselves may differ


def different_tokens(recordings: Mapping[str, Recording]) -> tuple[int, list[Document]]:
    """Of one seed's recordings by arm: how many requests could be compared, and which were answered differently."""
    answers: dict[int, dict[str, list[int]]] = {}
    for arm, recording in recordings.items():
        for outcome in recording.outcomes:
            if outcome.finished and outcome.tokens:
                answers.setdefault(outcome.index, {})[arm] = outcome.tokens
    shared = {index: given for index, given in answers.items() if len(given) > 1}
    different = [
        {"index": index, "arms": sorted(given)}
        for index, given in sorted(shared.items())
        if len({tuple(tokens) for tokens in given.values()}) > 1
    ]
    return len(shared), different


def work_told(groups: Sequence[Mapping[str, Recording]]) -> tuple[str, str]:
    """What is wrong with the work that the arms were given or did, and what only has to be known of it; each one line,
    or empty. `groups`: of every traffic the recordings by arm.

    As text, a prompt is as many tokens as a server's tokenizer makes of it, and an answer ends where the model does.
    """
    shared = [given for group in groups for given in _finished(group) if len(given) > 1]
    prompts = sum(
        len({outcome.prompt_tokens for outcome in given.values() if outcome.prompt_tokens}) > 1 for given in shared
    )
    lengths = [[len(outcome.token_s) for outcome in given.values()] for given in shared]
    apart, total = sum(max(row) - min(row) for row in lengths), sum(map(max, lengths))
    if prompts:
        return f"not the same work: {prompts} of {len(shared)} prompts are not as many tokens in every arm", ""
    if not apart:
        return "", ""
    unequal = sum(max(row) > min(row) for row in lengths)
    told = f"{unequal} of {len(shared)} answers are not as long in every arm, by {apart / total:.1%} of their tokens"
    return (f"not the same work: {told}", "") if apart > LEAST_SHARE * total else ("", told)


def _finished(recordings: Mapping[str, Recording]) -> list[dict[str, Outcome]]:
    """Of each request, the arms that finished it."""
    rows: dict[int, dict[str, Outcome]] = {}
    for arm, recording in recordings.items():
        for outcome in recording.outcomes:
            if outcome.finished:
                rows.setdefault(outcome.index, {})[arm] = outcome
    return list(rows.values())
