"""Run unmodified clients and load tools against a cluster, and print a row for each: `make clients ARGS="--only llm"`.

Each client has a separate environment in .clients, with the version that was newest at its first run. Packages of
NVIDIA are never installed, and torch is the wheel for the CPU. This is not part of `make test`.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.cluster.harness import DEMO, cluster
from tests.cluster.pooling_models import write_modules

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".clients"
CONSTRAINTS = "torch==2.13.0\n"
RUN_S, INSTALL_S = 420, 1800
STORY = "Once upon a time there was a little fox who lived in the woods with her mother."
VLLM = """vllm torch==2.13.0 transformers tokenizers huggingface_hub safetensors numpy requests certifi tqdm blake3 py-cpuinfo
psutil regex cachetools sentencepiece protobuf fastapi starlette uvicorn uvloop python-multipart aiohttp multidict openai pydantic
orjson prometheus_client pillow prometheus-fastapi-instrumentator tiktoken lark typing_extensions filelock partial-json-parser
jsonschema pyzmq msgspec pyyaml einops cloudpickle watchfiles python-json-logger pybase64 cbor2 ijson setproctitle oss-harmony
anthropic opentelemetry-sdk opentelemetry-api opencv-python-headless mistral_common depyf xgrammar apache-tvm-ffi llguidance
outlines_core lm-format-enforcer compressed-tensors"""


class InstallError(Exception):
    """The client cannot be installed; the message is the reason."""


@dataclass(frozen=True)
class Client:
    """A client: the packages to install, and either the program that uses it or its command line."""

    name: str
    packages: tuple[str, ...]
    program: str = ""
    command: str = ""  # {url}, {model}, {tokenizer} and {directory} are filled in
    says: str = ""  # a pattern that the output of the command must match
    result: str = "ok"  # the result if the command succeeds; the matches of `says` follow it
    left_out: tuple[str, ...] = ()  # optional dependencies that are not installed
    without_dependencies: tuple[str, ...] = ()  # packages whose dependencies are not installed

    @property
    def is_node(self) -> bool:
        return self.program.endswith(".mjs")

    @property
    def environment(self) -> Path:
        return ENVIRONMENTS / ("node" if self.is_node else self.name)


def lm_eval(model: str, path: str, task: str, more: str = "") -> str:
    arguments = f"model={{model}},base_url={{url}}{path},tokenizer={{tokenizer}},tokenizer_backend=huggingface"
    return f"lm_eval run --model {model} --model_args {arguments} --include_path {{directory}} --tasks {task} {more}"


BENCH = "vllm bench serve --base-url {url} --model {model} --tokenizer {tokenizer} --num-prompts 20 --ready-check-timeout-sec 0 "
BENCH += "--dataset-name random --random-input-len 30 --random-output-len 8 "
LLM_SCHEMA = (
    '{{"type": "object", "properties": {{"a": {{"enum": ["b"]}}}}, "required": ["a"], "additionalProperties": false}}'
)
EVALSCOPE = (
    "evalscope perf --api openai --model {model} --tokenizer-path {tokenizer} --dataset random -n 20 --parallel 4 "
)
EVALSCOPE += "--min-prompt-length 20 --max-prompt-length 40 --prefix-length 0 --max-tokens 8 --outputs-dir {directory} "
CLIENTS = [
    Client("openai", ("openai",), "openai_program.py"),
    Client("openai (node)", ("openai",), "openai_program.mjs"),
    Client("ai", ("ai", "@ai-sdk/openai-compatible"), "ai_sdk_program.mjs"),
    Client("anthropic", ("anthropic",), "anthropic_program.py"),
    Client("litellm", ("litellm",), "litellm_program.py"),
    Client("langchain-openai", ("langchain-openai",), "langchain_program.py"),
    Client("llama-index-llms-openai-like", ("llama-index-llms-openai-like",), "llama_index_program.py"),
    Client("pydantic-ai-slim", ("pydantic-ai-slim[openai,anthropic]",), "pydantic_ai_program.py"),
    Client("instructor", ("instructor",), "instructor_program.py"),
    Client("llm", ("llm",), command="llm -m baton -o max_tokens 8 Hello && llm -m baton --no-stream -o max_tokens 8 -s x Hello "
           "&& llm -m baton-text -o max_tokens 8 Once && llm -m baton --schema '" + LLM_SCHEMA + "' -o max_tokens 200 x "
           "| python3 -m json.tool && llm -m baton-tools --functions 'def multiply(a: int, b: int) -> int: return a * b' "
           "'What is 3 * 3?' | grep 'answer is 9'", result="ok: chat, no-stream, completion, system, schema, functions"),
    Client("guidellm", ("guidellm",), command="guidellm run --backend kind=openai_http,target={url} --disable-progress "
           "--profile kind=throughput,max_concurrency=4 --constraint kind=max_requests,count=12 "
           "--tokenizer kind=hf_auto,model={tokenizer} --data kind=synthetic_text,prompt_tokens=30,output_tokens=8 "
           "--output kind=json,path={directory}/guidellm.json; "
           "grep -ohE '.(successful|errored).: *[0-9]+' {directory}/guidellm.json | head -2",
           says=r'.successful.: *12'),
    Client("aiperf", ("aiperf",), command="aiperf profile -m {model} --url {url} --endpoint-type chat --streaming "
           "--tokenizer {tokenizer} --request-count 12 --concurrency 3 --synthetic-input-tokens-mean 30 "
           "--output-tokens-mean 8 --ui simple --artifact-dir {directory}/aiperf",
           says=r"Request Count \(requests\) *│ *12", left_out=("nvidia-ml-py",)),
    Client("evalscope", ("evalscope[perf]",), command=EVALSCOPE + "--url {url}/v1/completions && " + EVALSCOPE
           + "--url {url}/v1/chat/completions", says=r"20 / 20 / 0"),
    Client("genai-bench", ("genai-bench",), command="genai-bench benchmark --api-backend openai --api-base {url} "
           "--api-key none --api-model-name {model} --model-tokenizer {tokenizer} --task text-to-text "
           "--max-time-per-run 1 --max-requests-per-run 10 --num-concurrency 2 --traffic-scenario D(30,8) "
           "--experiment-base-dir {directory}/genai; "
           "grep -rhoE 'num_(completed|error)_requests.: *[0-9]+' {directory}/genai",
           says=r"num_completed_requests.: *[1-9]\d*"),
    Client("vllm", tuple(VLLM.split()), command=BENCH + "--backend openai && " + BENCH + "--backend openai-chat "
           "--endpoint /v1/chat/completions", says=r"Successful requests: +20", without_dependencies=("vllm", "xgrammar",
           "compressed-tensors", "lm-format-enforcer", "depyf")),
    Client("lm-eval", ("lm-eval[api]", "transformers"),
           command=lm_eval("local-completions", "/v1/completions", "rolling") + " && "
           + lm_eval("local-chat-completions", "/v1/chat/completions", "generate", "--apply_chat_template"),
           says=r"\|(?:bits_per_byte|exact_match) *\|[^\n]*"),
    Client("locust", ("locust",), command="locust -f " + str(HERE / "locustfile.py")
           + " --headless -u 4 -r 4 -t 10s --stop-timeout 10 -H {url}", says=r"Aggregated +[1-9]\d* +0\(0.00%\)"),
]  # fmt: skip
LLM_MODELS = """- {{model_id: baton, model_name: "{model}", api_base: "{url}/v1", supports_schema: true}}
- {{model_id: baton-tools, model_name: tools, api_base: "{tools_url}/v1", supports_tools: true}}
- {{model_id: baton-text, model_name: "{model}", api_base: "{url}/v1", completion: true}}
"""
TOOLS_TEMPLATE = '{% if tools %}{{ tools | tojson }} <tool_call>{"name": {% endif %}'
LM_TASKS = {
    "rolling": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"},
    "generate": {"output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "x"},
}
LM_METRICS = {"rolling": [{"metric": "bits_per_byte"}], "generate": [{"metric": "exact_match"}]}


def run(command: list[str], timeout_s: float, **options: object) -> subprocess.CompletedProcess[str]:
    settings = {"capture_output": True, "text": True, "timeout": timeout_s} | options
    return subprocess.run(["nice", "-n", "15", *command], check=False, **settings)


def install(client: Client) -> None:
    """Install the client's packages. Raises InstallError if the installation fails or would include CUDA."""
    folder = client.environment
    if (folder / "installed").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if client.is_node:
        packages = sorted({name for each in CLIENTS if each.is_node for name in each.packages})
        _check(run(["npm", "install", "--no-audit", "--no-fund", *packages], INSTALL_S, cwd=folder))
    else:
        _check(run([sys.executable, "-m", "venv", str(folder)], INSTALL_S))
        (folder / "constraints.txt").write_text(CONSTRAINTS)
        pip = [str(folder / "bin/pip"), "install", "--quiet", "--constraint", str(folder / "constraints.txt")]
        wanted = [each for each in client.packages if each not in client.without_dependencies]
        plan = folder / "plan.json"
        _check(run([*pip, "--dry-run", "--report", str(plan), *wanted], INSTALL_S))
        found = [entry["metadata"] for entry in json.loads(plan.read_text())["install"]]
        kept = {each["name"].lower(): each["version"] for each in found if each["name"].lower() not in client.left_out}
        if cuda := [name for name in kept if name.startswith(("nvidia-", "cuda-"))]:
            raise InstallError(f"would install {', '.join(cuda)}")
        pins = [f"{name}=={version}" for name, version in kept.items()]
        _check(run([*pip, "--no-deps", *pins, *client.without_dependencies], INSTALL_S))
    (folder / "installed").touch()


def _check(ended: subprocess.CompletedProcess[str]) -> None:
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if "WARNING" not in line and line.strip()]
        raise InstallError(" ".join(lines[-3:])[:300])


def version_of(client: Client) -> str:
    if client.is_node:
        package = client.environment / "node_modules" / client.packages[0] / "package.json"
        return str(json.loads(package.read_text())["version"])
    code = f"from importlib.metadata import version; print(version({client.name!r}))"
    return run([str(client.environment / "bin/python"), "-c", code], 60).stdout.strip()


def use(client: Client, url: str, tools_url: str, model: str, directory: Path) -> tuple[bool, str]:
    """Run the client. Return whether all checks passed, and the result as text."""
    folder = client.environment
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    environment = os.environ | {"BATON_CLIENTS_URL": url, "BATON_CLIENTS_MODEL": model, "PATH": path}
    environment["BATON_CLIENTS_TOOLS_URL"] = tools_url
    environment |= {"OPENAI_API_KEY": "none", "LLM_USER_PATH": str(directory), "NO_COLOR": "1"}
    environment |= {"COLUMNS": "200", "VLLM_NO_USAGE_STATS": "1"}
    if client.is_node:
        shutil.copy(HERE / client.program, folder)
        command = ["node", str(folder / client.program)]
    elif client.program:
        command = [str(folder / "bin/python"), str(HERE / client.program)]
    else:
        names = {"url": url, "model": model, "tokenizer": DEMO, "directory": directory}
        command = ["bash", "-c", client.command.format(**names).replace("D(30,8)", "'D(30,8)'")]
    try:
        ended = run(command, RUN_S, env=environment, cwd=directory)
    except subprocess.TimeoutExpired:
        return False, f"FAILED: no end after {RUN_S} s"
    output = ended.stdout + ended.stderr
    if not client.program:
        found = [match[0] for match in re.finditer(client.says, output)] if client.says else []
        parts = client.command.count(" && ") + 1
        if ended.returncode or (client.says and len(found) < parts):
            return False, f"FAILED with status {ended.returncode}: {' '.join(output.split())[-300:]}"
        shown = [" ".join(re.sub("[│|]", " ", text).split()) for text in found[-parts:]]
        return True, "; ".join([client.result, *shown])
    lines = ended.stdout.splitlines()
    kinds = [(kind, [line[len(kind) + 1 :] for line in lines if line.startswith(kind + " ")]) for kind in KINDS]
    is_ok = ended.returncode == 0 and any(names for _, names in kinds)
    text = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds if names)
    return is_ok, text if text and is_ok else f"FAILED with status {ended.returncode}: {text} {ended.stderr[-300:]}"


KINDS = ("ok", "refused", "FAILED")


def prepare(directory: Path, url: str, tools_url: str, model: str) -> None:
    """Write the files that configure llm and lm-eval."""
    (directory / "extra-openai-models.yaml").write_text(LLM_MODELS.format(url=url, tools_url=tools_url, model=model))
    data = directory / "stories.json"
    data.write_text(json.dumps({"text": STORY}) + "\n")
    for name, fields in LM_TASKS.items():
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        task |= {"test_split": "test", "metric_list": LM_METRICS[name], **fields}
        (directory / f"{name}.yaml").write_text(json.dumps(task))


def demo_of(directory: Path) -> Path:
    """Return a copy of the demo model that also supports embeddings. Its chat template supports tools in the syntax of
    Hermes."""
    model = directory / DEMO.name
    shutil.copytree(DEMO, model)
    file = model / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings["chat_template"] = TOOLS_TEMPLATE + settings["chat_template"]
    file.write_text(json.dumps(settings))
    write_modules(model, ("Pooling", {"pooling_mode": "lasttoken"}))
    return model


@contextmanager
def server(url: str, directory: Path) -> Iterator[str]:
    """Yield `url`, or the URL of a cluster that is started if `url` is empty."""
    if url:
        yield url
        return
    model = demo_of(directory)
    with cluster(prefill=1, decode=1, runner="torch", model=model, responses_store="memory") as running:
        yield running.url


@contextmanager
def tools_server() -> Iterator[str]:
    """Yield the URL of a router whose model calls tools."""
    command = [sys.executable, "-m", "tests.clients.tools_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate()


def main() -> int:
    """Print the table, and return 1 if a client failed or could not be installed."""
    options = argparse.ArgumentParser(description=str(__doc__).split("\n\n", maxsplit=1)[0])
    options.add_argument("--only", nargs="*", default=[], help="names of clients; default: all")
    options.add_argument("--url", default="", help="URL of a running cluster; default: start one")
    chosen = options.parse_args()
    clients = [client for client in CLIENTS if not chosen.only or client.name in chosen.only]
    failed = 0
    with tempfile.TemporaryDirectory() as name, server(chosen.url, Path(name)) as url, tools_server() as tools_url:
        directory = Path(name)
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        prepare(directory, url, tools_url, model)
        print("| client | version | result |\n|---|---|---|", flush=True)
        for client in clients:
            try:
                install(client)
                is_ok, result = use(client, url, tools_url, model, directory)
                version = version_of(client)
            except (InstallError, subprocess.TimeoutExpired) as error:
                is_ok, result, version = False, f"not installed: {error}", "-"
            failed += not is_ok
            print(f"| {client.name} | {version} | {result} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
