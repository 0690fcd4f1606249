"""Run a text-generating class of transformers with Baton's KV pool, and compare its answers with transformers."""

import tempfile
from random import Random
from typing import Any

import torch
import transformers

from engine.components import build
from engine.options import BuildOptions
from tests.cluster.harness import FORK_SERVER
from tests.engine.build import Blocks, generate, states_in
from tests.sweep.tiny_configs import tiny_model

LIMIT_S = 600.0  # time limit of one class, many times the usual duration
COUNT = 12
VOCABULARY = 97
NUM_ROWS, BLOCK_TOKENS = 1024, 16
WRONG = "wrong: "  # prefix of the outcome of a class that is neither right nor refused


def classes() -> list[str]:
    """Return the names of the classes that generate text."""
    names = (name for name in dir(transformers) if name.endswith(("ForCausalLM", "LMHeadModel")))
    return sorted(name for name in names if not name.startswith("Auto"))


def isolated(name: str) -> str:
    """Return the `outcome` of a class, computed in a separate process."""
    here, there = FORK_SERVER.Pipe(duplex=False)
    process = FORK_SERVER.Process(target=_report, args=(name, there), daemon=True)
    process.start()
    there.close()
    try:
        return str(here.recv()) if here.poll(LIMIT_S) else f"{WRONG}no answer within {LIMIT_S:.0f} s"
    except EOFError:
        return f"{WRONG}the process died"
    finally:
        process.kill()
        process.join()


def _report(name: str, to: Any) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        to.send(outcome(name))
    except Exception as error:  # noqa: BLE001 - any error but ValueError at load is a defect
        to.send(f"{WRONG}{type(error).__name__}: {error}")


def outcome(name: str) -> str:
    """Load a tiny random model as a node does, and compare answers. Return "" if they equal those of transformers.

    Otherwise, return why the model is refused at load, or `WRONG` followed by a description of the defect.
    """
    with tempfile.TemporaryDirectory() as directory:
        tiny_model(name, VOCABULARY).save_pretrained(directory)
        options = BuildOptions(
            directory, model_impl="transformers", threads=1, num_blocks=NUM_ROWS, block_size=BLOCK_TOKENS
        )
        try:
            components = build(options)
        except ValueError as error:
            reason = str(error).removeprefix(directory).removeprefix("/config.json").removeprefix(": ")
            if reason.startswith("starting the engine"):  # an unexpected error
                return f"{WRONG}{reason}"
            return reason.removeprefix(f"{name} through transformers {transformers.__version__}: ")
        model = getattr(transformers, name).from_pretrained(directory, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    prompts = [[Random(seed).randrange(3, VOCABULARY) for _ in range(size)] for seed, size in enumerate((1, 41, 17))]
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    for budget in (7, 64):
        blocks, states = (
            Blocks(NUM_ROWS // 2, BLOCK_TOKENS, components.groups),
            states_in(components.groups, NUM_ROWS // 2),
        )
        requests = [blocks.request(prompt, max_tokens=COUNT) for prompt in prompts]
        found = generate(components.runner, requests, budget, states)
        if found != expected:
            return f"{WRONG}{found} instead of {expected} with a budget of {budget} tokens"
    return ""
