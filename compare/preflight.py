"""Before anything is timed: are the arms alike in all but what is being compared, and do they answer alike?"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compare.arms import Arm
from compare.endpoint import Document, Endpoint

ANSWER_TOKENS = 12
# Settings that make a fact of a node, where the two are called differently.
SETTINGS_OF = {
    "prefix_caching": ("enable_prefix_caching",),
    "num_blocks": ("kv_cache_memory", "block_size"),
    "block_tokens": ("block_size",),
    "block_bytes": ("block_size", "dtype"),
    "fingerprint": ("block_size", "dtype"),
    "max_step_tokens": ("max_num_batched_tokens", "tbt_slo_ms"),
}


@dataclass(frozen=True, slots=True)
class Parity:
    """What each arm says of itself, side by side; `equal`: nothing differs that was not declared the treatment."""

    equal: bool
    facts: list[Document]

    @property
    def problems(self) -> list[str]:
        wrong = [fact for fact in self.facts if not fact["equal"] and not fact["declared"]]
        return [f"not comparable: {fact['fact']} differs ({told(fact['values'])})" for fact in wrong]


def told(values: Mapping[str, str]) -> str:
    return ", ".join(f"{arm}: {value}" for arm, value in values.items())


def parity(arms: Sequence[Arm], told_by: Mapping[str, Mapping[str, str]], treatment: Sequence[str] = ()) -> Parity:
    """`told_by` are the `facts_of` each arm, by its name.

    Declared is what the arms themselves set to different values, and what `treatment` names.
    """
    names = list(dict.fromkeys(name for facts in told_by.values() for name in facts))
    declared = set(treatment) | settings_that_differ(arms)
    rows = []
    for name in names:
        values = {arm.name: told_by[arm.name].get(name, "not told") for arm in arms}
        is_declared = not declared.isdisjoint({name, *SETTINGS_OF.get(name, ())})
        rows.append({"fact": name, "values": values, "equal": len(set(values.values())) == 1, "declared": is_declared})
    return Parity(all(row["equal"] or row["declared"] for row in rows), rows)


def settings_that_differ(arms: Sequence[Arm]) -> set[str]:
    names = {name for arm in arms for name in arm.settings}
    return {name for name in names if len({arm.settings.get(name) for arm in arms}) > 1}


def facts_of(endpoint: Endpoint, status: Document | None) -> dict[str, str]:
    """What must be equal, from the status of its router; nodes that differ are told as "one | other"."""
    facts = {"engine": "baton" if status else "not Baton: nothing else can be verified", "model": endpoint.model}
    facts["max_model_len"] = str(endpoint.max_model_len or "not told")
    if not status:
        return facts
    nodes = status["nodes"]
    facts["devices"] = str(len(nodes))
    of_nodes: dict[str, list[str]] = {}
    for node in nodes:
        own = {"fingerprint": node["fingerprint"], "block_tokens": node["block_tokens"]}
        own |= {"block_bytes": node["block_bytes"], "num_blocks": node["blocks"]["total"]}
        for name, value in (own | (node.get("facts") or {})).items():
            of_nodes.setdefault(name, []).append(str(value))
    for name, values in of_nodes.items():
        missing = ["not told"] * (len(nodes) > len(values))
        facts[name] = " | ".join(sorted({*values, *missing}))
    return facts


async def greedy_answers(endpoint: Endpoint, prompts: Sequence[Sequence[int]], salt: str) -> list[list[int]]:
    """All at once, which also warms the arm up. Raises Unreachable."""
    fitting = [prompt for prompt in prompts if not endpoint.max_model_len or fits(prompt, endpoint.max_model_len)]
    return list(await asyncio.gather(*(endpoint.complete(prompt, ANSWER_TOKENS, salt) for prompt in fitting)))


def fits(prompt: Sequence[int], max_model_len: int) -> bool:
    return len(prompt) + ANSWER_TOKENS <= max_model_len


def different_answers(answers: Mapping[str, Sequence[Sequence[int]]]) -> list[str]:
    """One line for each prompt that an arm answers differently from the first arm; `answers` by arm."""
    first = next(iter(answers))
    return [
        f"{name} answers greedy prompt {number} with {list(answer)[:8]}..., {first} with {list(expected)[:8]}..."
        for name, given in answers.items()
        for number, (answer, expected) in enumerate(zip(given, answers[first], strict=True))
        if list(answer) != list(expected)
    ]
