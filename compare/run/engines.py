"""The counters of the arms' vLLM servers, which show whether KV moved between the servers."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compare.endpoint import EndpointError
from proxy_node.probe import deadline
from proxy_node.vllm import VllmEngine
from proxy_node.wire import EngineFailure, probe_request
from shared.errors import ConfigError

COMPUTED = "prompt_tokens_by_source_total:local_compute"
READ = "prompt_tokens_by_source_total:external_kv_transfer"
BYTES = "nixl_bytes_transferred_sum"
FAILURES = {
    "nixl_num_kv_expired_reqs_total": "prompts were not read before the lease of their KV ended",
    "nixl_num_failed_transfers_total": "transfers of KV failed",
    "nixl_num_notifications_after_expiry_total": "reads of KV ended after its lease",
}
Counters = Sequence[Mapping[str, float]]  # values by name, for each server in order


@dataclass(frozen=True, slots=True)
class EngineMeter:
    """Reads the counters of servers, which must have no other traffic."""

    urls: tuple[str, ...]
    key: str
    vocab_size: int

    async def read(self) -> Counters:
        """Return the counters of all servers. Raises EndpointError."""
        return await asyncio.gather(*map(self._read, self.urls))

    async def _read(self, url: str) -> Mapping[str, float]:
        engine = VllmEngine(url, self.key, self.vocab_size)
        try:
            async with engine.open(), deadline():
                await engine.describe()
                await engine.collect(probe_request([0], 2, temperature=0.0), [0])  # an idle server updates no counters
                return await engine.metrics()
        except (EngineFailure, ConfigError) as error:
            raise EndpointError(f"{url}: {error}") from None


def check_moved(
    before: Counters, after: Counters, num_prefill: int, num_handoffs: int, *, splits: bool | None
) -> list[str]:
    """Return the problems that the counters show. `splits` is the result of `splits_of`.

    The first `num_prefill` servers are prefill servers; the others decode. If a decode server reads the KV of a prompt,
    it must not compute more than the last token of the prompt.
    """
    names = (*FAILURES, COMPUTED, READ, BYTES)
    grown = [
        {name: now.get(name, 0.0) - was.get(name, 0.0) for name in names}
        for was, now in zip(before, after, strict=True)
    ]
    totals = {name: sum(each[name] for each in grown) for name in names}
    problems = [f"{totals[name]:g} {text}" for name, text in FAILURES.items() if totals[name]]
    decode = grown[num_prefill:]
    # Subtract the token that each server computed for the request of the second `EngineMeter.read`.
    computed = sum(each[COMPUTED] for each in decode) - len(decode)
    if splits and not totals[BYTES]:
        problems.append(f"no KV moved: the decode servers computed {computed:g} tokens of prompts themselves")
    elif splits and (computed > num_handoffs or not totals[READ]):
        text = f"read {totals[READ]:g} tokens of prompts and computed {computed:g}"
        problems.append(f"the decode servers {text}, for {num_handoffs} handoffs")
    elif splits is False and totals[BYTES]:
        problems.append(f"co-located, but {totals[BYTES]:g} bytes of KV moved between the servers")
    return problems
