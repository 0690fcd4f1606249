"""Worker for the greedy `generate` of transformers, which runs a model without a serving system."""

import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, StoppingCriteria, StoppingCriteriaList

from benchmarks.peers.worker import serve


class TokenTimes(StoppingCriteria):  # type: ignore[misc]
    """A stopping criterion that never stops generation, but records the time of each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Transformers:
    def __init__(self, model: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        self._model.generation_config.eos_token_id = None
        self.facts = {"version": transformers.__version__, "threads": threads, "attention": "sdpa"}

    @torch.inference_mode()
    def decode(self, batch: int, context: int, steps: int) -> float:
        """Return how many seconds `steps` steps of one `generate` call take, without the computation of the prompts."""
        cache = DynamicCache(config=self._model.config)
        tokens = torch.randint(3, 2048, (1, context))
        self._model(tokens[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.batch_repeat_interleave(batch)
        stamps = TokenTimes()
        self._model.generate(
            tokens.repeat(batch, 1),
            attention_mask=torch.ones(batch, context, dtype=torch.int64),
            past_key_values=cache,
            max_new_tokens=steps + 1,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([stamps]),
        )
        return stamps.times[steps] - stamps.times[0]


if __name__ == "__main__":
    serve(Transformers)
