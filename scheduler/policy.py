"""Batching policies, as parameters of one scheduler. Each policy has the name that its original system gives it.

docs/policies.md shows how each policy treats the same requests.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """The scheduling choices in which serving systems differ. The defaults are those of `stall_free`."""

    name: str
    prompts_first: bool = False  # prompts are scheduled before decodes
    mixed: bool = True  # prompts and decodes may share a step
    chunked: bool = True  # a prompt may span several steps; if not, a step's first prompt may exceed the budget
    max_prompts: int | None = None  # maximum number of prompts that one step computes
    fills: bool = False  # prompts fill the whole budget, regardless of the limits on chunks
    together: bool = False  # requests are admitted as one batch, and only when no request runs or receives KV


POLICIES = {
    policy.name: policy
    for policy in (
        # Sarathi-Serve (Agrawal et al., OSDI 2024), vLLM v1: decodes never wait; prompts get the rest of the budget.
        Policy("stall_free"),
        # SARATHI (Agrawal et al., 2023): one chunk of one prompt, together with all decodes.
        Policy("decode_maximal", max_prompts=1),
        # DeepSpeed-FastGen's Dynamic SplitFuse (Holmes et al., 2024): steps of one constant size.
        Policy("split_fuse", fills=True),
        # SGLang's default and mini-SGLang: separate steps for prompt chunks and decodes, chunks first.
        Policy("prefill_chunks_first", prompts_first=True, mixed=False),
        # vLLM v0 (Kwon et al., SOSP 2023): whole prompts as soon as they arrive, while decodes pause.
        Policy("prefill_first", prompts_first=True, mixed=False, chunked=False),
        # Orca (Yu et al., OSDI 2022): whole prompts join the decodes of a step.
        Policy("whole_prompt_mixed", chunked=False),
        # The opposite of prefill_first: no prompt is computed while any request decodes.
        Policy("decode_first", mixed=False, chunked=False),
        # FasterTransformer's request-level batching: a batch runs until its last request ends.
        Policy("static", prompts_first=True, mixed=False, together=True),
    )
}
STALL_FREE = POLICIES["stall_free"]
