"""Batching policies as data of the one scheduler, each named after what its system calls it; docs/policies.md shows
what each of them does to the same requests."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """The choices in which serving systems differ. The defaults are those of `stall_free`."""

    name: str
    prompts_first: bool = False  # prompts take a step's budget before decodes do
    mixed: bool = True  # prompts and decodes may share a step
    chunked: bool = True  # a prompt may be computed in several steps; whole, the first of a step may exceed its budget
    max_prompts: int | None = None  # prompts that one step computes at most
    fills: bool = False  # prompts fill a step to its last token, whatever the limits on chunks say
    together: bool = False  # requests are admitted all at once, and only when no other runs or lands


POLICIES = {
    policy.name: policy
    for policy in (
        # Sarathi-Serve (Agrawal et al., OSDI 2024), vLLM v1: no decode waits for a prompt; prompts fill what is left.
        Policy("stall_free"),
        # SARATHI (Agrawal et al., 2023): one chunk of one prompt, and every decode rides along.
        Policy("decode_maximal", max_prompts=1),
        # DeepSpeed-FastGen's Dynamic SplitFuse (Holmes et al., 2024): steps of one constant size.
        Policy("split_fuse", fills=True),
        # SGLang's default and mini-SGLang: chunks of prompts and decodes in steps of their own, chunks first.
        Policy("prefill_chunks_first", prompts_first=True, mixed=False),
        # vLLM v0 (Kwon et al., SOSP 2023): whole prompts as soon as they arrive; decodes stand still meanwhile.
        Policy("prefill_first", prompts_first=True, mixed=False, chunked=False),
        # Orca (Yu et al., OSDI 2022): whole prompts join the decodes of a step.
        Policy("whole_prompt_mixed", chunked=False),
        # The other extreme: no prompt while anything decodes.
        Policy("decode_first", mixed=False, chunked=False),
        # FasterTransformer's request-level batching: a batch is formed, and lives until its last request ends.
        Policy("static", prompts_first=True, mixed=False, together=True),
    )
}
STALL_FREE = POLICIES["stall_free"]
