"""Routers and nodes exit with one line and status 2 if a model directory is broken, truncated or hostile.

The tests of single tensors and of the keys of config.json are in tests/engine/test_weights.py.
"""

import gc
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from decode_node.__main__ import main as run_decode_node
from engine.weights import INDEX, check_finite
from router.__main__ import main as router_main
from router.text.chat_template import RENDER_S, ChatTemplate
from router.text.regex_safety import may_backtrack_exponentially
from shared.config.settings import NodeSettings, RouterSettings
from shared.errors import RequestError
from tests.cluster.harness import DEMO

WEIGHTS = "model.safetensors"
Breaking = Callable[[Path], object]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the demo model. Each case damages its own copy."""
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS):
        shutil.copyfile(DEMO / name, tmp_path / name)
    return tmp_path


def written(name: str, content: str | bytes) -> Breaking:
    data = content.encode() if isinstance(content, str) else content
    return lambda directory: (directory / name).write_bytes(data)


def changed(name: str, **changes: Any) -> Breaking:
    def change(directory: Path) -> None:
        file = directory / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def of_size(name: str, size: int) -> Breaking:
    return lambda directory: os.truncate((directory / name), size)


def without(name: str) -> Breaking:
    return lambda directory: (directory / name).unlink()


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Breaking:
    def breaking(directory: Path) -> None:
        file = directory / "tokenizer.json"
        value = json.loads(file.read_text())
        change(value)
        file.write_text(json.dumps(value))

    return breaking


def regex(pattern: str) -> Breaking:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return tokenizer(lambda value: value.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [split]}))


DEEP = "[" * 100_000
DIGITS = '{"vocab_size": ' + "9" * 5000 + "}"

FOR_ROUTERS: dict[str, tuple[Breaking, str]] = {
    "no config": (without("config.json"), "config.json: No such file"),
    "config not JSON": (written("config.json", "{"), "config.json is not JSON"),
    "config not UTF-8": (written("config.json", b"\xff\xfe{}"), "config.json is not JSON"),
    "config a list": (written("config.json", "[1]"), "config.json is not a JSON object"),
    "config too deep": (written("config.json", DEEP), "config.json is not JSON"),
    "config of long numbers": (written("config.json", DIGITS), "config.json is not JSON"),
    "config of 10 MiB": (of_size("config.json", 10 << 20), "config.json is over 1048576 bytes"),
    "no vocabulary": (changed("config.json", vocab_size=0), "config.json: vocab_size is 0: it must be from 1"),
    "vocabulary true": (changed("config.json", vocab_size=True), "config.json: vocab_size is True"),
    "positions text": (changed("config.json", max_position_embeddings="8"), "max_position_embeddings is '8'"),
    "end token negative": (changed("generation_config.json", eos_token_id=-1), "eos_token_id must be a token id"),
    "end token beyond": (changed("generation_config.json", eos_token_id=[1, 9999]), "eos_token_id must be a token id"),
    "end token too deep": (written("generation_config.json", DEEP), "generation_config.json is not JSON"),
    "no tokenizer": (without("tokenizer.json"), "tokenizer.json does not exist"),
    "tokenizer not UTF-8": (written("tokenizer.json", b'{"version": "\xff"}'), "tokenizer.json: "),
    "tokenizer empty": (written("tokenizer.json", "{}"), "tokenizer.json: "),
    "tokenizer too deep": (written("tokenizer.json", DEEP), "tokenizer.json: "),
    "tokenizer of 1 GiB": (of_size("tokenizer.json", 1 << 30), "tokenizer.json is over 134217728 bytes"),
    "merge of the unknown": (
        tokenizer(lambda value: value["model"]["merges"].append(["\u2603", "\u2603"])), "tokenizer.json: "
    ),
    "ids beyond the vocabulary": (
        tokenizer(lambda value: value["model"]["vocab"].update({"\u2603": 5000})), "token id 5000 is beyond the vocab_size 2048"
    ),
    "a pattern that never ends": (regex("(a+)+$"), "'(a+)+$' repeats a group"),
    "a decoder unknown": (tokenizer(lambda value: value.update(decoder={"type": "WordPiece", "prefix": "#", "cleanup": True})), "WordPiece"),
    "tokenizer config a list": (written("tokenizer_config.json", "[1]"), "tokenizer_config.json is not a JSON object"),
    "tokenizer config too deep": (written("tokenizer_config.json", DEEP), "tokenizer_config.json is not JSON"),
    "template not UTF-8": (written("chat_template.jinja", b"\xff"), "chat_template.jinja is not UTF-8 text"),
    "template of 2 MiB": (written("chat_template.jinja", " " * (2 << 20)), "chat_template.jinja is over 1048576 bytes"),
    "template not Jinja": (written("chat_template.jinja", "{% if %}"), "chat template does not compile: Expected an expr"),
    "template of blocks in blocks": (
        written("chat_template.jinja", "{% if a %}" * 200 + "{% endif %}" * 200), "does not compile: "
    ),
}  # fmt: skip


@pytest.mark.timeout(300)  # a router that starts by mistake would serve until this timeout
@pytest.mark.parametrize(("breaking", "complaint"), FOR_ROUTERS.values(), ids=FOR_ROUTERS)
def test_a_router_exits_with_one_line(
    breaking: Breaking, complaint: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    breaking(directory)
    assert router_main(RouterSettings(model=str(directory), port=0, registry_port=0)) == 2
    one_line(capsys, complaint)


def one_line(capsys: pytest.CaptureFixture[str], complaint: str) -> None:
    err = capsys.readouterr().err
    assert complaint in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert len(err) < 600


def with_tensor(change: Callable[[dict[str, torch.Tensor]], object]) -> Breaking:
    def breaking(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        change(tensors)
        save_file(tensors, directory / WEIGHTS)

    return breaking


def cut(directory: Path) -> None:
    os.truncate(directory / WEIGHTS, (directory / WEIGHTS).stat().st_size - 1)


def linked_out(directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    (directory / WEIGHTS).symlink_to(DEMO / WEIGHTS)


def pickled(directory: Path) -> None:
    (directory / WEIGHTS).rename(directory / "pytorch_model.bin")


def crowded(directory: Path) -> None:
    """Write a file with 200,000 empty tensors."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{number}": entry for number in range(200_000)}).encode()
    (directory / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)


NORM = "model.norm.weight"
FOR_NODES: dict[str, tuple[Breaking, str]] = {
    "config too deep": (written("config.json", DEEP), "config.json: not valid JSON"),
    "config of long numbers": (written("config.json", DIGITS), "config.json: not valid JSON"),
    "code with the model": (changed("config.json", auto_map={"AutoModel": "x.Y"}), "auto_map"),
    "sizes beyond memory": (changed("config.json", hidden_size=2**31 - 2, head_dim=128), "the config needs"),
    "vocabulary unlike the embedding": (changed("config.json", vocab_size=2047), "'model.embed_tokens.weight' is [2048, "),
    "a tensor missing": (with_tensor(lambda tensors: tensors.pop(NORM)), f"tensor '{NORM}' is missing"),
    "a tensor too many": (with_tensor(lambda tensors: tensors.update(more=torch.ones(1))), "not part of the model that config.json describes, such as 'more'"),
    "a tensor of another shape": (with_tensor(lambda tensors: tensors.update({NORM: torch.ones(1)})), f"'{NORM}' is [1]"),
    "weights cut": (cut, "not fully covered; download the model again"),
    "200,000 tensors": (crowded, "'model.embed_tokens.weight' is missing"),
    "weights linked out": (linked_out, "is not a safetensors file in this directory"),
    "pickled weights": (pickled, "only pickled weights (.bin, .pt)"),
    "a shard above": (written(INDEX, '{"weight_map": {"a": "../x.safetensors"}}'), "'../x.safetensors' is not a safetensors"),
    "an index too deep": (written(INDEX, DEEP), f"{INDEX}: not valid JSON"),
}  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("breaking", "complaint"), FOR_NODES.values(), ids=FOR_NODES)
def test_a_node_exits_with_one_line(
    breaking: Breaking, complaint: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    breaking(directory)
    settings = NodeSettings(
        model=str(directory), kv_directory=str(directory / "kv"), num_blocks=64, threads=1, port=0, device="cpu"
    )
    assert run_decode_node(settings) == 2
    one_line(capsys, complaint)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_nan_and_infinity_in_weights_are_reported_by_tensor(number: float, directory: Path) -> None:
    check_finite(directory)
    with_tensor(lambda tensors: tensors[NORM].__setitem__(3, number))(directory)
    with pytest.raises(ValueError, match=f"tensor '{NORM}' holds NaN or infinity"):
        check_finite(directory)


# ---- patterns ----------------------------------------------------------------------------------------------------------

GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KIMI = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}&&[^\p{Han}]]*[\p{Ll}&&[^\p{Han}]]+(?i:'s|'t)?|\p{N}{1,3}|\s+"
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"


@pytest.mark.parametrize("pattern", [GPT4, KIMI, BLOOM, r"\(+a|b\)*", "(ab)+", "[(a+)]+", "(a+){1,3}", "(a|b)?"])
def test_patterns_of_known_models_are_accepted(pattern: str) -> None:
    assert not may_backtrack_exponentially(pattern)


@pytest.mark.parametrize(
    "pattern", ["(a+)+", "(a*)*b", "(?:a|a)+", "((a+))+$", "(a{2,})*", r"(\p{L}+ ?)*", "(x(y+)z){3,}"]
)
def test_patterns_that_may_backtrack_exponentially_are_refused(pattern: str) -> None:
    assert may_backtrack_exponentially(pattern)


@pytest.mark.parametrize("number", ["9" * 60_000, "9," * 30_000, "{9" * 30_000])
def test_checking_a_pattern_takes_linear_time(number: str) -> None:
    began_s = time.thread_time()
    assert not may_backtrack_exponentially("a{" + number)
    assert time.thread_time() - began_s < 2  # a check that backtracks over the digits takes ten seconds


# ---- templates ---------------------------------------------------------------------------------------------------------

SAY = [{"role": "user", "content": "hello"}]


def rendered(template: ChatTemplate) -> str:
    return template.render(SAY, add_generation_prompt=True, continue_final_message=False)[0]


WILD = {
    "code": ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "cannot render"),
    "code by a cycler": ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "cannot render"),
    "a file": ("{% include '/etc/passwd' %}", "cannot render"),
    "10 GB when it is compiled": ("{{ 'x' * 10**10 }}", "memory"),
    "10 GB at once": ("{% set n = messages | length %}{{ 'x' * (10**10 * n) }}", "memory"),
    "doubling": (
        "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "memory"
    ),
    "a replacement of each by all": (
        "{% set x = messages[0].content * 100000 %}{{ x | replace('l', x) | length }}", "memory"
    ),
    "a width": ("{{ messages[0].content | center(10**10) }}", "memory"),
    "a list of lists": (
        "{% set ns = namespace(x=[0]) %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}", "memory"
    ),
    "too long": ("{% for i in range(99999) %}{{ 'xxxxxxxxxx' * 1000 }}{% endfor %}", "too long"),
    "its own error": ("{{ raise_exception('alternate roles, please') }}", "alternate roles"),
    "an attribute of nothing": ("{{ messages[0].content.nothing.at_all }}", "cannot render"),
    "a long range": ("{{ range(10**9) | list }}", "cannot render"),
    "a macro for ever": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "cannot render"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "complaint"), WILD.values(), ids=WILD)
def test_a_hostile_template_is_rejected(source: str, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        rendered(ChatTemplate(source, {}, []))


def test_the_template_works_after_a_timeout() -> None:
    source = "{% if messages[0].content == 'loop' %}{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(source + "{% endif %}<{{ messages[0].content }}>", {}, [])
    began = time.monotonic()
    with pytest.raises(RequestError, match="too long"):
        template.render([{"role": "user", "content": "loop"}], add_generation_prompt=True, continue_final_message=False)
    assert time.monotonic() - began < RENDER_S + 20, "on a busy machine"
    assert rendered(template) == "<hello>"


def test_the_child_process_ends_with_its_template() -> None:
    before = set(psutil.Process().children())
    template = ChatTemplate("x", {}, [])
    (process,) = set(psutil.Process().children()) - before
    process.send_signal(signal.SIGINT)  # Ctrl-C in a terminal also reaches the child, but it is meant for the router
    assert rendered(template) == "x"
    assert process.is_running()
    del template
    gc.collect()
    assert not process.is_running()
