"""What a device did, from its step records: how busy it was, with what, and why it was idle."""

from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.cost import CostModel, StepWork

Pass = Mapping[str, Any]  # one row of /v1/steps, by its columns


def busy(passes: Sequence[Pass], window_ms: tuple[float, float], model: CostModel | None) -> dict[str, float]:
    """Shares of the window, which sum to 1: "prefill" and "decode" ("busy" together), "idle_empty" with nothing to do,
    and "idle_blocked" while requests waited.

    A mixed pass is split by what the model says its prompts and its decodes cost alone; without a model by tokens.
    """
    length = window_ms[1] - window_ms[0]
    shares = {"prefill": 0.0, "decode": 0.0, "idle_empty": 0.0, "idle_blocked": 0.0}
    reached, blocked = window_ms[0], False
    for each in sorted(passes, key=lambda each: float(each["start_ms"])):
        start = min(max(each["start_ms"], reached), window_ms[1])
        end = min(max(each["start_ms"] + each["duration_ms"], reached), window_ms[1])
        shares["idle_blocked" if blocked else "idle_empty"] += start - reached
        prompts = _prompt_share(each, model)
        shares["prefill"] += (end - start) * prompts
        shares["decode"] += (end - start) * (1 - prompts)
        reached, blocked = end, each["waiting"] > 0
    shares["idle_blocked" if blocked else "idle_empty"] += window_ms[1] - reached
    shares = {name: value / length for name, value in shares.items()}
    return {"busy": shares["prefill"] + shares["decode"]} | shares


def _decodes(each: Pass) -> StepWork:
    return StepWork(num_decodes=each["num_decodes"], decode_context=each["decode_context"])


def _prompt_share(each: Pass, model: CostModel | None) -> float:
    if not each["prefill_tokens"] or not each["num_decodes"]:
        return 1.0 if each["prefill_tokens"] else 0.0
    if model is None:
        return float(each["prefill_tokens"] / (each["prefill_tokens"] + each["num_decodes"]))
    idle_s = model.overhead + model.per_token * model.knee_tokens
    total = StepWork(each["num_prefills"], each["prefill_tokens"], 0, each["num_decodes"], each["decode_context"])
    prompts_s = model.seconds(total) - model.seconds(_decodes(each))
    decodes_s = max(0.0, model.seconds(_decodes(each)) - idle_s)
    return prompts_s / (prompts_s + decodes_s) if prompts_s + decodes_s else 0.5
