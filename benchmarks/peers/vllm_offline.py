"""Worker for vLLM on a CPU. The engine runs in this process, and its steps are called and timed one by one.

The prefix cache is on, so that the prompts of decodes are computed only once. Timed prefills use new prompts.
"""

import os
import random
import time
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}

import vllm  # type: ignore[import-not-found]

from benchmarks.peers.worker import serve

BUDGET_TOKENS = 2048


class Vllm:
    def __init__(self, model: str, threads: int) -> None:
        self._llm = vllm.LLM(
            model=model,
            dtype="float32",
            max_model_len=4608,
            max_num_batched_tokens=BUDGET_TOKENS,
            max_num_seqs=64,
            enable_prefix_caching=True,
            disable_log_stats=True,
        )
        self._random = random.Random(0)
        self._prompts: dict[tuple[int, int], list[int]] = {}
        self._count = 0
        self.facts: dict[str, Any] = {"version": vllm.__version__, "threads": threads}

    def prefill(self, tokens: int) -> float:
        """Return the seconds from a prompt's arrival to its first token."""
        prompt = self._prompt(tokens)
        began_s = time.perf_counter()
        self._add(prompt, 1)
        self._until_done()
        return time.perf_counter() - began_s

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Return the seconds that `steps` steps of `batch` decodes take. The first call caches the prompts' KV."""
        for index in range(batch):
            if (context, index) not in self._prompts:
                self._prompts[context, index] = self._prompt(context)
                self._add(self._prompts[context, index], 1)
                self._until_done()
        for index in range(batch):
            self._add(self._prompts[context, index], steps + 4)
        stamps: list[float] = []
        engine = self._llm.llm_engine
        while engine.has_unfinished_requests():
            outputs = engine.step()
            num_decoded = sum(len(output.outputs[0].token_ids) > 1 for output in outputs)
            if num_decoded == batch:
                stamps.append(time.perf_counter())
        return stamps[steps] - stamps[0]

    def _add(self, prompt: list[int], max_tokens: int) -> None:
        self._count += 1
        params = vllm.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._llm.llm_engine.add_request(str(self._count), {"prompt_token_ids": prompt}, params)

    def _until_done(self) -> None:
        while self._llm.llm_engine.has_unfinished_requests():
            self._llm.llm_engine.step()

    def _prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(3, 2048) for _ in range(tokens)]


if __name__ == "__main__":
    serve(Vllm)
