"""Batching policies as data of the one scheduler, each named after what its system calls it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """`prompts_first`: prompts take the budget before decodes. `mixed`: both may share a step.
    `chunked`: a prompt may be computed in several steps."""

    name: str
    prompts_first: bool
    mixed: bool
    chunked: bool


# Sarathi-Serve (Agrawal et al., OSDI 2024), vLLM v1: decodes never wait for a prompt, prompts fill what is left.
STALL_FREE = Policy("stall_free", prompts_first=False, mixed=True, chunked=True)
# vLLM v0: whole prompts as soon as they arrive; decodes stand still meanwhile.
PREFILL_FIRST = Policy("prefill_first", prompts_first=True, mixed=False, chunked=False)
POLICIES = {policy.name: policy for policy in (STALL_FREE, PREFILL_FIRST)}
