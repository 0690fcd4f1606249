"""Test that clusters serve a model and two LoRA adapters at once, with the same tokens as peft."""

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster.harness import DEMO_VOCABULARY, START_S, Cluster, cluster, copy_tokenizer, prompt_of, wait_for
from tests.engine.build import thinned
from tests.engine.families import CONFIGS, save
from tests.engine.lora_files import save_adapter

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # peft reads this attribute
COUNT = 24
STEM = prompt_of(9, 40)  # all prompts begin with it, so that KV shared between adapters would change answers
PROMPTS = [STEM + prompt_of(seed, length) for seed, length in enumerate((1, 30, 90))]


def made(name: str, directory: Path) -> tuple[list[str], dict[str, list[list[int]]]]:
    """Write a tiny model and two adapters. Return the --lora-modules, and the expected tokens by model and adapter."""
    config = deepcopy(CONFIGS[name])
    config.vocab_size = DEMO_VOCABULARY
    base = save(config, directory)
    copy_tokenizer(directory)
    models: dict[str, Any] = {directory.name: base}
    for seed, adapter in enumerate(("sql", "poems")):
        models[adapter] = save_adapter(deepcopy(base), directory / adapter, seed)
    expected = {}
    for adapter, model in models.items():
        model.generation_config.eos_token_id = None
        with torch.inference_mode():
            answers = [
                model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False)
                for prompt in PROMPTS
            ]
        expected[adapter] = [answer[0, len(prompt) :].tolist() for answer, prompt in zip(answers, PROMPTS, strict=True)]
    return [f"{adapter}={directory / adapter}" for adapter in ("sql", "poems")], expected


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3.5", marks=pytest.mark.exhaustive)])
def test_the_model_and_two_adapters_in_one_batch_give_the_tokens_of_peft(name: str, tmp_path: Path) -> None:
    modules, expected = made(name, tmp_path)
    assert expected["sql"] != expected["poems"] != expected[tmp_path.name]
    cases = [(adapter, index) for index in range(len(PROMPTS)) for adapter in expected]
    for prefill, channel, budget, num_blocks in ((1, "shm", 7, 4096), (1, "tcp", 64, 4096), (0, "auto", 512, 24)):
        settings = {
            "model": tmp_path, "runner": "torch", "kv_channel": channel, "max_num_batched_tokens": budget,
            "num_blocks": num_blocks if name == "llama" else 4096, "lora_modules": ",".join(modules),
        }  # fmt: skip
        with cluster(prefill, 1, **settings) as running, ThreadPoolExecutor(len(cases)) as pool:
            assert [card["id"] for card in running.get("/v1/models")["data"]] == [tmp_path.name, "poems", "sql"]

            def ask(case: tuple[str, int], running: Any = running) -> list[int]:
                return list(running.complete(PROMPTS[case[1]], COUNT, model=case[0]))

            for _ in range(2):  # the second time, prefixes are in the cache
                found = list(pool.map(ask, cases))
                assert found == [expected[adapter][index] for adapter, index in cases], f"{channel}, budget {budget}"
            assert (running.settled()["handoffs"] > 0) == (prefill > 0)
            with pytest.raises(urllib.error.HTTPError, match="404"):
                running.complete(PROMPTS[0], 1, model="other")


def test_a_request_with_an_adapter_survives_the_death_of_its_decode_node(tmp_path: Path) -> None:
    modules, expected = made("llama", tmp_path)
    settings = {"model": tmp_path, "runner": "torch", "lora_modules": ",".join(modules)}
    with cluster(1, 2, **settings) as running, ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(running.complete, prompt, COUNT, model="sql") for prompt in PROMPTS]
        running.processes["decode-0"].kill()
        assert [answer.result() for answer in asked] == expected["sql"]


def test_a_node_without_the_adapter_gets_no_request_for_it(tmp_path: Path) -> None:
    modules, expected = made("llama", tmp_path)
    own: dict[str, dict[str, object]] = {"decode-0": {"lora_modules": ",".join(modules)}}
    settings = {"model": tmp_path, "runner": "torch", "node_timeout_s": 30.0}
    with cluster(0, 2, own=own, **settings) as running, ThreadPoolExecutor(9) as pool:
        cases = [(adapter, index) for index in range(3) for adapter in expected]
        found = pool.map(lambda case: running.complete(PROMPTS[case[1]], COUNT, model=case[0]), cases)
        assert list(found) == [expected[adapter][index] for adapter, index in cases]
        assert running.settled()["requests"]["moved"] == 0


def change(running: Cluster, action: str, **fields: object) -> tuple[int, str]:
    """Load or unload an adapter. Return the status and the text of the answer."""
    url = f"{running.url}/v1/{action}_lora_adapter"
    request = urllib.request.Request(url, json.dumps(fields).encode(), running.headers)
    try:
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("prefill", thinned([1, 0], 2), ids=["disaggregated", "co-located"])
def test_adapters_are_loaded_and_unloaded_while_the_cluster_serves(prefill: int, tmp_path: Path) -> None:
    """A request in progress survives the unloading of its adapter, and a node that joins later gets the adapter."""
    modules, expected = made("llama", tmp_path)
    paths = dict(module.split("=") for module in modules)
    settings = {"model": tmp_path, "runner": "torch", "allow_runtime_lora_updating": True, "log_level": "info"}
    with cluster(prefill, 1, **settings) as running, ThreadPoolExecutor(9) as pool:
        with pytest.raises(urllib.error.HTTPError, match="404"):
            running.complete(PROMPTS[0], 1, model="sql")
        assert change(running, "load", lora_name="sql", lora_path=paths["sql"]) == (
            200,
            "Success: LoRA adapter 'sql' added successfully.",
        )
        assert change(running, "load", lora_name="sql", lora_path=paths["sql"])[0] == 400
        assert change(running, "load", lora_name="poems", lora_path=str(tmp_path / "none"))[0] == 400
        assert change(running, "load", lora_name="poems", lora_path=paths["poems"])[0] == 200
        assert {card["id"] for card in running.get("/v1/models")["data"]} == expected.keys()
        cases = [(adapter, index) for index in range(len(PROMPTS)) for adapter in expected]
        found = pool.map(lambda case: running.complete(PROMPTS[case[1]], COUNT, model=case[0]), cases)
        assert list(found) == [expected[adapter][index] for adapter, index in cases]
        wait_for(lambda: running.status()["totals"]["running"] == 0, "the nodes report the end of these requests")

        long = pool.submit(running.complete, PROMPTS[0], 90, model="sql")
        wait_for(lambda: running.status()["totals"]["running"] > 0, "the request runs")
        assert change(running, "unload", lora_name="sql") == (200, "Success: LoRA adapter 'sql' removed successfully.")
        assert change(running, "unload", lora_name="sql")[0] == 404
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            running.complete(PROMPTS[0], 1, model="sql")
        assert "model_not_found" in refused.value.read().decode()
        assert long.result()[:COUNT] == expected["sql"][0]
        wait_for(lambda: "was unloaded" in running.log("decode-0"), "the node unloads it")

        running.start("decode-1")
        running.ready()
        running.processes["decode-0"].kill()
        assert running.complete(PROMPTS[0], COUNT, model="poems") == expected["poems"][0]
        assert change(running, "load", lora_name="sql", lora_path=paths["sql"])[0] == 200
        assert running.complete(PROMPTS[0], COUNT, model="sql") == expected["sql"][0]


def test_without_the_flag_adapters_cannot_change() -> None:
    with cluster(0, 1) as running:
        status, text = change(running, "load", lora_name="sql", lora_path="/none")
        assert (status, "--allow-runtime-lora-updating" in text) == (404, True)
