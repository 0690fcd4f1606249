"""Worker for llama.cpp. It calls the C interface as llama-batched-bench does, without sampling or detokenization."""

import ctypes
import time
from typing import Any

import llama_cpp as api  # type: ignore[import-not-found]

from benchmarks.peers.worker import serve

MAX_SEQS = 32
N_BATCH, N_UBATCH = 2048, 512
TOKEN = 7


class LlamaContext:
    """A context of several sequences with up to `room` tokens each. It keeps prompts' KV between calls of `decode`."""

    def __init__(self, model: Any, threads: int, sequences: int, room: int, flash: bool) -> None:
        params = api.llama_context_default_params()
        params.n_ctx = sequences * room
        params.n_batch, params.n_ubatch, params.n_seq_max = N_BATCH, N_UBATCH, sequences
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 1 if flash else 0
        params.kv_unified = False
        params.no_perf = True
        self._context = api.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot create a context of {sequences} sequences of {room} tokens")
        self._memory = api.llama_get_memory(self._context)
        self._batch = api.llama_batch_init(N_BATCH, 0, 1)
        self._held = 0  # number of sequences whose prompt is in the context

    def prefill(self, tokens: int) -> float:
        """Return how many seconds the prefill of a prompt takes. The context is empty afterwards."""
        self._clear()
        began_s = time.perf_counter()
        for start in range(0, tokens, N_BATCH):
            self._decode([(0, at) for at in range(start, min(tokens, start + N_BATCH))])
        api.llama_synchronize(self._context)
        seconds = time.perf_counter() - began_s
        self._clear()
        return seconds

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Return how many seconds `steps` steps of `batch` sequences take, after one step that is not timed."""
        for sequence in range(self._held, batch):
            if sequence == 0:
                self._decode([(0, at) for at in range(context)])
            else:  # a copy of sequence 0, because speed does not depend on the values
                api.llama_memory_seq_rm(self._memory, 0, context, -1)
                api.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)
        self._held = max(self._held, batch)
        for sequence in range(batch):
            api.llama_memory_seq_rm(self._memory, sequence, context, -1)
        began_s = 0.0
        for step in range(steps + 1):
            self._decode([(sequence, context + step) for sequence in range(batch)], every_logit=True)
            api.llama_synchronize(self._context)
            if step == 0:
                began_s = time.perf_counter()
        return time.perf_counter() - began_s

    def logits(self, tokens: list[int], vocab_size: int) -> list[float]:
        """Return the logits after the last of `tokens`."""
        self._clear()
        self._decode([(0, at) for at in range(len(tokens))], tokens=tokens)
        found = api.llama_get_logits_ith(self._context, len(tokens) - 1)
        values = [float(found[index]) for index in range(vocab_size)]
        self._clear()
        return values

    def _clear(self) -> None:
        api.llama_memory_clear(self._memory, True)
        self._held = 0

    def _decode(
        self, places: list[tuple[int, int]], every_logit: bool = False, tokens: list[int] | None = None
    ) -> None:
        batch = self._batch
        batch.n_tokens = len(places)
        for index, (sequence, position) in enumerate(places):
            batch.token[index] = tokens[index] if tokens else (TOKEN + 31 * position + sequence) % 2048
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = every_logit or index == len(places) - 1
        if status := api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode of {len(places)} tokens: {status}")


class LlamaCpp:
    def __init__(self, model: str, threads: int, flash: bool) -> None:
        """Load the GGUF file `model`."""
        quiet = api.llama_log_callback(lambda *_: None)
        self._quiet = quiet  # must outlive every call
        api.llama_log_set(quiet, ctypes.c_void_p(0))
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self._options = threads, flash
        self._sizes = {"prefill": (1, 2048 + 64), "decode": (MAX_SEQS, 640)}
        self._contexts: dict[str, LlamaContext] = {}
        self.facts = {"version": api.__version__, "system": api.llama_print_system_info().decode(), "flash": flash}

    def prefill(self, tokens: int) -> float:
        return self._context("prefill").prefill(tokens)

    def decode(self, batch: int, context: int, steps: int) -> float:
        return self._context("decode").decode(batch, context, steps)

    def logits(self, tokens: list[int]) -> list[float]:
        vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        return self._context("prefill").logits(tokens, vocab_size)

    def _context(self, kind: str) -> LlamaContext:
        if kind not in self._contexts:
            threads, flash = self._options
            self._contexts[kind] = LlamaContext(self._model, threads, *self._sizes[kind], flash)
        return self._contexts[kind]


if __name__ == "__main__":
    serve(LlamaCpp)
