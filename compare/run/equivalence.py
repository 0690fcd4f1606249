"""Checks that arms are equivalent: before the trials, by facts and greedy answers; after them, by tokens and work."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from compare.arms import Arm
from compare.endpoint import Document, Endpoint, alive_nodes
from compare.load.outcome import LoadRecording, Outcome

ANSWER_TOKENS = 12
# Tolerated difference in the lengths of answers, as a share of their tokens, if the model decides where answers end.
MAX_DIFFERENCE = 0.01
UNKNOWN = "unknown"  # the value of a fact that an arm does not publish
# The settings that determine each fact. A fact that has the name of a setting is also determined by that setting.
SETTINGS_OF = {
    "adapters": ("lora_modules",),
    "prefix_caching": ("enable_prefix_caching",),
    "num_blocks": ("kv_cache_memory", "block_size"),
    "block_tokens": ("block_size",),
    "block_bytes": ("block_size", "dtype"),
    "fingerprint": ("block_size", "dtype"),
    "max_step_tokens": ("max_num_batched_tokens", "tbt_slo_ms"),
}


# ---- before the trials: facts and greedy answers -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ParityCheck:
    """The facts of all arms. `equal` is true if no facts differ, except those that were declared to differ."""

    equal: bool
    facts: list[Document]

    @property
    def problems(self) -> list[str]:
        wrong = [fact for fact in self.facts if not fact["equal"] and not fact["declared"]]
        values = [", ".join(f"{arm}: {value}" for arm, value in fact["values"].items()) for fact in wrong]
        return [f"not comparable: {fact['fact']} differs ({own})" for fact, own in zip(wrong, values, strict=True)]


def check_parity(
    arms: Sequence[Arm], facts_by_arm: Mapping[str, Mapping[str, str]], treatment: Sequence[str] = ()
) -> ParityCheck:
    """Compare the facts of the arms. Facts may differ if they are in `treatment` or follow from differing settings."""
    names = list(dict.fromkeys(name for facts in facts_by_arm.values() for name in facts))
    declared = set(treatment) | settings_that_differ(arms)
    rows = []
    for name in names:
        values = {arm.name: facts_by_arm[arm.name].get(name, UNKNOWN) for arm in arms}
        is_declared = not declared.isdisjoint({name, *SETTINGS_OF.get(name, ())})
        rows.append({"fact": name, "values": values, "equal": len(set(values.values())) == 1, "declared": is_declared})
    return ParityCheck(all(row["equal"] or row["declared"] for row in rows), rows)


def settings_that_differ(arms: Sequence[Arm]) -> set[str]:
    names = {name for arm in arms for name in arm.settings}
    return {name for name in names if len({arm.settings.get(name) for arm in arms}) > 1}


def facts_of(endpoint: Endpoint, status: Document | None) -> dict[str, str]:
    """Return the facts that must be equal, from the router's status. Values that differ between nodes are joined."""
    facts = {"engine": "baton" if status else "not Baton, so nothing else can be verified", "model": endpoint.model}
    facts["max_model_len"] = str(endpoint.max_model_len or UNKNOWN)
    if not status:
        return facts
    nodes = alive_nodes(status)
    facts["devices"] = str(len(nodes))
    by_fact: dict[str, list[str]] = {}
    for node in nodes:
        own = {"fingerprint": node["fingerprint"], "block_tokens": node["block_tokens"]}
        own |= {"block_bytes": node["block_bytes"], "num_blocks": node["blocks"]["total"]}
        for name, value in (own | (node.get("facts") or {})).items():
            by_fact.setdefault(name, []).append(str(value))
    for name, values in by_fact.items():
        missing = [UNKNOWN] * (len(nodes) > len(values))
        facts[name] = " | ".join(sorted({*values, *missing}))
    return facts


async def greedy_answers(endpoint: Endpoint, prompts: Sequence[Sequence[int]], salt: str) -> list[list[int]]:
    """Send, at the same time, all prompts that fit the context. Return the answers. The requests also warm the arm up.
    Raises EndpointError."""
    fitting = [prompt for prompt in prompts if not endpoint.max_model_len or fits(prompt, endpoint.max_model_len)]
    return list(await asyncio.gather(*(endpoint.complete(prompt, ANSWER_TOKENS, salt) for prompt in fitting)))


def fits(prompt: Sequence[int], max_model_len: int) -> bool:
    return len(prompt) + ANSWER_TOKENS <= max_model_len


def different_answers(answers: Mapping[str, Sequence[Sequence[int]]]) -> list[str]:
    """Return a line for each answer that differs from the answer of the first arm. `answers` is keyed by arm.

    The prompts are in ascending order of length, so an arm with a shorter context lacks only the last answers.
    """
    first = next(iter(answers))
    return [
        f"{name} answers greedy prompt {number} with {list(answer)[:8]}..., {first} with {list(expected)[:8]}..."
        for name, given in answers.items()
        for number, (answer, expected) in enumerate(zip(given, answers[first], strict=False))
        if list(answer) != list(expected)
    ]


# ---- after the trials: tokens and work of the arms under equal traffic ---------------------------------------------


def different_tokens(recordings: Mapping[str, LoadRecording]) -> tuple[int, list[Document]]:
    """Return how many requests were compared between arms, and the requests whose tokens differ."""
    answers = _by_request(recordings, lambda outcome: outcome.finished and bool(outcome.tokens))
    different = [
        {"index": index, "arms": sorted(given)}
        for index, given in sorted(answers.items())
        if len({tuple(outcome.tokens) for outcome in given.values()}) > 1
    ]
    return len(answers), different


def work_differences(groups: Sequence[Mapping[str, LoadRecording]]) -> tuple[str, str]:
    """Return a problem and a note about differing amounts of work. Each is one line, or empty.

    If prompts are sent as text, the server's tokenizer decides their length, and the model decides where answers end.
    """
    shared = [given for group in groups for given in _by_request(group, lambda outcome: outcome.finished).values()]
    counts = [{outcome.prompt_tokens for outcome in given.values() if outcome.prompt_tokens} for given in shared]
    if prompts := sum(len(row) > 1 for row in counts):
        return f"not the same work: {prompts} of {len(shared)} prompts have different lengths in the arms", ""
    lengths = [[len(outcome.token_s) for outcome in given.values()] for given in shared]
    apart, total = sum(max(row) - min(row) for row in lengths), sum(map(max, lengths))
    if not apart:
        return "", ""
    line = f"{sum(max(row) > min(row) for row in lengths)} of {len(shared)} answers have different lengths in the arms"
    line += f", by {apart / total:.1%} of the tokens"
    return (f"not the same work: {line}", "") if apart > MAX_DIFFERENCE * total else ("", line)


def _by_request(
    recordings: Mapping[str, LoadRecording], counts: Callable[[Outcome], bool]
) -> dict[int, dict[str, Outcome]]:
    """Return the outcomes for which `counts` is true, keyed by request and arm. Omit requests with a single outcome."""
    rows: dict[int, dict[str, Outcome]] = {}
    for arm, recording in recordings.items():
        for outcome in recording.outcomes:
            if counts(outcome):
                rows.setdefault(outcome.index, {})[arm] = outcome
    return {index: given for index, given in rows.items() if len(given) > 1}
