"""Reads descriptions of emulated devices from JSON files: step times, KV capacity and link speed.

The files in `costs/` state the source of each number. They also state how far predicted step times differ from
published step times.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from scheduler.cost import CostModel

COSTS = Path(__file__).parent / "costs"
MAX_NUMBER = 1e15
VERSION = 1  # version of the files
GPU_NUM_SEQS = 256  # the default of --max-num-seqs on GPUs, as in vLLM


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The speed of a link: a push of n bytes of KV takes `latency_s` + n / `bytes_per_s` seconds."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class ServingTimes:
    """Times of work outside the device, in seconds. Emulated nodes do not sleep to imitate these times, because they
    really do this work."""

    step_s: float = 0.0  # host time for each step
    slice_s: float = 0.0  # host time for each request in a step
    request_s: float = 0.0  # time from the client's request until the router has queued it
    rpc_s: float = 0.0  # time for a message from one process to another
    answer_s: float = 0.0  # time from the end of a step until the client has its tokens
    push_s: float = 0.0  # time for a push of KV, in addition to its time on the link


class Residuals(NamedTuple):
    """The distribution of the ratio measured / predicted duration, for steps with a predicted duration of at most
    `up_to_s`. The quantiles are for evenly spaced probabilities from 0 to 1."""

    up_to_s: float
    quantiles: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Emulation:
    """An emulated device that runs one model. Its memory holds the KV of `kv_tokens` tokens.

    `residuals` are quantiles of measured / predicted step duration (see `Residuals`). Steps with prompts use
    `prefill_residuals` instead. These are in ascending order of `up_to_s`. The last entry also applies to longer steps.
    If `prefill_residuals` is empty, `residuals` apply to all steps."""

    name: str
    cost: CostModel
    kv_bytes_per_token: int
    kv_tokens: int
    link: LinkSpeed
    times: ServingTimes = ServingTimes()
    residuals: tuple[float, ...] = (1.0,)
    block_tokens: int = 16
    prefill_residuals: tuple[Residuals, ...] = ()
    max_num_seqs: int = GPU_NUM_SEQS  # the default of --max-num-seqs on this device


def load_emulation(name: str) -> Emulation:
    """Load an emulation. `name` is a JSON file or a name in `costs/`, optionally followed by a link, such as @100gbe.

    Raises ValueError if the file or a field is missing or invalid. The error message names the file and the field.
    """
    base, _, link = (name, "", "") if Path(name).is_file() else name.partition("@")
    path = Path(base) if Path(base).is_file() else COSTS / f"{base}.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in COSTS.glob("*.json")))
        raise ValueError(f"--emulate {name}: is neither a file nor one of {known}")
    try:
        return _emulation(json.loads(path.read_text()), name if link else path.stem, link)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"--emulate {path}: not valid JSON: {error}") from None
    except (TypeError, ValueError) as error:
        message = " ".join(str(error)[:300].split())  # keys in the file may contain newlines
        raise ValueError(f"--emulate {path}: {message}") from None


def _emulation(data: Any, name: str, link: str) -> Emulation:
    if not isinstance(data, dict):
        raise ValueError("the file must contain an object")
    if (version := data.get("version")) != VERSION:
        raise ValueError(f"version is {version!r:.20}, but must be {VERSION}: see the files in {COSTS}")
    cost = _get(data, "cost")
    known = [field.name for field in fields(CostModel)]
    if unknown := sorted(set(cost) - set(known)):
        raise ValueError(f"cost.{unknown[0]} is not one of {', '.join(known)}")
    model = CostModel(**{field: _number(cost, field, "cost.") for field in cost})
    if not any(model.packed()):
        raise ValueError("cost has only zeros, so steps would take no time")
    links, chosen = _get(data, "links"), link or data.get("link", "")
    if chosen not in links:
        raise ValueError(f"link {chosen!r} is not one of {', '.join(sorted(links))}")
    return Emulation(
        name,
        model,
        int(_number(data, "kv_bytes_per_token", least=1)),
        int(_number(data, "kv_tokens", least=1024)),
        LinkSpeed(
            _number(links[chosen], "latency_s", f"links.{chosen}."),
            _number(links[chosen], "bytes_per_s", f"links.{chosen}.", least=1),
        ),
        ServingTimes(*(_number(_get(data, "serving"), each.name, "serving.") for each in fields(ServingTimes))),
        _quantiles(data, "residuals"),
        int(_number(data, "block_tokens", least=1)),
        _prefill_residuals(data.get("prefill_residuals", [])),
        int(_number({"max_num_seqs": GPU_NUM_SEQS} | data, "max_num_seqs", least=1)),
    )


def _prefill_residuals(rows: Any) -> tuple[Residuals, ...]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("prefill_residuals must be a list of objects with up_to_s and quantiles")
    found = [Residuals(_number(row, "up_to_s", "prefill_residuals."), _quantiles(row, "quantiles")) for row in rows]
    return tuple(sorted(found))


def _quantiles(data: Any, name: str) -> tuple[float, ...]:
    values = data.get(name)
    is_list = isinstance(values, list) and 0 < len(values) <= 1000
    if not is_list or not all(isinstance(each, int | float) and 0 < each < 1000 for each in values):
        raise ValueError(f"{name} must be a list of ratios of measured to predicted duration: see the files in {COSTS}")
    return tuple(sorted(map(float, values)))


def _get(data: Any, name: str) -> Mapping[str, Any]:
    value = data.get(name) if isinstance(data, dict) else None
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object; see the files in {COSTS}")
    return value


def _number(data: Any, name: str, where: str = "", least: float = 0) -> float:
    value = data.get(name) if isinstance(data, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= MAX_NUMBER:
        raise ValueError(f"{where}{name} must be a number from {least} to {MAX_NUMBER:g}, not {value!r:.60}")
    return float(value)
