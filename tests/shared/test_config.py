"""Test settings: where a value comes from, errors for invalid values, and the forms of sizes and CPU lists."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.plan import DoctorSettings, LocalSettings, RaySettings
from shared.config.command_line import settings_from_command_line
from shared.config.settings import (
    NodeSettings,
    PickerSettings,
    ProxySettings,
    RouterSettings,
    Settings,
    flag_of,
    format_value,
    parse_cpus,
    parse_size,
    private_directory,
    resolve,
    variable_of,
)
from shared.errors import ConfigError
from tests.command_line import refusal

BOTH = pytest.mark.parametrize("kind", [RouterSettings, NodeSettings])


@pytest.fixture(autouse=True)
def _clear_settings_of_the_developer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(name)


def test_a_flag_overrides_the_environment_which_overrides_the_default() -> None:
    environment = {"BATON_PORT": "7000", "BATON_HOST": "::1", "BATON_MODE": ""}  # an empty variable counts as unset
    settings, sources = resolve(RouterSettings, {"port": "9000", "host": None}, environment)
    assert (settings.port, settings.host, settings.registry_port) == (9000, "::1", 8001)
    assert sources["port"] == "flag --port"
    assert sources["host"] == "environment BATON_HOST"
    assert sources["registry_port"] == sources["mode"] == "default"
    assert list(sources) == list(RouterSettings.model_fields)


def test_a_setting_of_another_command_is_not_misspelt() -> None:
    kinds = (LocalSettings, RaySettings, DoctorSettings, RouterSettings, NodeSettings, ProxySettings, PickerSettings)
    names = {name for kind in kinds for name in kind.model_fields}
    for kind in kinds:
        others = {variable_of(name): "of another command" for name in names - set(kind.model_fields)}
        resolve(kind, {}, others)


def test_a_misspelt_variable_is_refused_and_an_unrelated_one_is_ignored() -> None:
    with pytest.raises(ConfigError, match="BATON_MAX_NUM_SEQ is not a setting; did you mean BATON_MAX_NUM_SEQS"):
        resolve(RouterSettings, {}, {"BATON_MAX_NUM_SEQ": "4"})
    resolve(RouterSettings, {}, {"BATON_SERVICE_HOST": "x", "BATON_PORT_8000_TCP_ADDR": "x", "BATON_URL": "x"})
    resolve(RouterSettings, {}, {"BATON_MAX_NUM_SEQS": "nodes only", "PORT": "x"})


@BOTH
def test_another_process_reads_the_same_settings_from_the_environment(kind: type[Settings]) -> None:
    odd = {
        "port": 1,
        "model": "m",
        "drain_timeout_s": 0.1,
        "mode": "colocated",
        "enable_prefix_caching": False,
        "kv_cache_memory": "3MiB",
        "cpus": (min(os.sched_getaffinity(0)),),
        "served_model_name": "a b",
    }
    settings = kind(**{name: value for name, value in odd.items() if name in kind.model_fields})
    assert resolve(kind, {}, settings.environment())[0] == settings
    assert kind().environment() == {}


@BOTH
def test_settings_are_frozen_and_reject_unknown_keys(kind: type[Settings]) -> None:
    with pytest.raises(ValidationError):
        kind().port = 5
    with pytest.raises(ValidationError):
        kind(prot=5)
    with pytest.raises(ConfigError, match="prot is not a setting"):
        resolve(kind, {"prot": "5"}, {})


HOST, LABEL, SIZE = "a host name or address, without a port", "letters, digits", "512MiB"
BAD_FOR_ROUTER = [
    ("port", "99999", "must be less than or equal to 65535"),
    ("port", "${PORT}", "must be a valid integer"),
    *[("host", value, HOST) for value in ("http://x", "[::1]:80", "a b")],
    ("mode", "both", "must be 'disaggregated' or 'colocated'"),
    *[("registry", value, "redis://") for value in ("127.0.0.1:8001", "http://h:1", "redis://h:99999")],
    ("node_timeout_s", "0", "must be greater than 0"),
    ("node_timeout_s", "nan", "must be a finite number"),
    *[("cluster", value, LABEL) for value in ("a/b", "x" * 65, "\u00e4")],
    ("log_level", "loud", "must be 'debug', 'info', 'warning' or 'error'"),
]
BAD_FOR_NODES = [
    *[("block_size", value, "must be at least 1; for the default, leave it out") for value in ("-1", "0")],
    *[(name, "0", "must be at least 1") for name in ("max_model_len", "num_blocks", "max_num_seqs", "kv_cache_memory")],
    *[("kv_cache_memory", value, SIZE) for value in ("lots", "2G", "-1GiB", "9" * 40)],
    ("kv_cache_memory", "0.0001kB", "whole bytes"),
    ("device", "gpu", "auto, cpu, cuda or cuda:N"),
    ("cpus", "x", "as in 0,2-3"),
    ("cpus", "4095", "this process may use"),
    *[
        ("registry", value, "host:port")
        for value in ("localhost", "localhost:0", "redis://", "a:1,", "a:1;b:2", "file:x")
    ],
    ("id", "a b", LABEL),
    ("speculative_config", "medusa", "method: Input should be 'ngram', 'draft_model', 'mtp' or 'eagle3'"),
    ("speculative_config", '{"method": "ngram",}', "must be JSON such as"),
    ("speculative_config", '{"num_speculative_tokens": 4}', "method: Field required"),
    (
        "speculative_config",
        '{"method": "ngram", "num_speculative_tokens": 99}',
        "num_speculative_tokens: Input should be",
    ),
    ("speculative_config", '{"method": "ngram", "lookup": 2}', "lookup: Extra inputs"),
    ("speculative_config", '{"method": "ngram", "model": "m"}', "model: required with the method draft_model"),
    ("speculative_config", "draft_model", "model: required with the method draft_model"),
    (
        "speculative_config",
        '{"method": "deepseek_mtp", "model": "m"}',
        "draft_model or eagle3, refused with other methods",
    ),
    ("speculative_config", '{"method": "ngram", "prompt_lookup_min": 5}', "prompt_lookup_min must be at most"),
]
BAD = [(RouterSettings, *row) for row in BAD_FOR_ROUTER] + [(NodeSettings, *row) for row in BAD_FOR_NODES]


@pytest.mark.parametrize(("kind", "name", "value", "words"), BAD)
def test_a_bad_flag_prints_one_line_with_the_allowed_values_and_exits_with_2(
    kind: type[Settings], name: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model", "m", flag_of(name), value]
    line = refusal(capsys, lambda: settings_from_command_line(kind, argv, "prog"))
    assert line.startswith(f"prog: {flag_of(name)} '")
    assert words in line


def test_an_error_names_the_bad_variable(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_PORT", "tcp://10.0.0.1:80")  # Kubernetes sets this for a service named "baton"
    line = refusal(capsys, lambda: settings_from_command_line(RouterSettings, ["--model", "m"], "prog"))
    assert line.startswith("prog: BATON_PORT 'tcp://10.0.0.1:80': must be a valid integer, unable to parse")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--prot", "1"], "--port"),
        (["--port"], "--port"),
        (["surplus"], "surplus"),
        (["--enable-prefix-caching=maybe"], "--enable-prefix-caching"),
        ([], "--model (or BATON_MODEL) is required"),
        (["--model", "m", "--kv-directory", ""], "--kv-directory ''"),
    ],
)
def test_wrong_usage_exits_with_2_and_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refusal(capsys, lambda: settings_from_command_line(NodeSettings, argv, "prog"))


def test_a_low_limit_of_open_files_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (20, 64))
    line = refusal(capsys, lambda: settings_from_command_line(RouterSettings, ["--model", "m"], "prog"))
    assert line == "prog: at most 64 open files are allowed: allow 512 or more (ulimit -n)\n"


def test_the_command_line_gives_typed_settings() -> None:
    argv = ["--model", "m", "--no-enable-prefix-caching", "--kv-cache-memory", "2GB", "--log-level", "INFO"]
    settings = settings_from_command_line(NodeSettings, argv, "prog")
    assert settings == NodeSettings(model="m", enable_prefix_caching=False, kv_cache_memory=2 * 10**9)


def test_print_config_shows_the_source_of_each_value(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_REGISTRY", "redis://user:secret@h:6379/0")
    with pytest.raises(SystemExit) as ended:
        settings_from_command_line(NodeSettings, ["--port", "9000", "--print-config"], "prog")
    assert ended.value.code == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "port = 9000  # flag --port" in lines
    assert "registry = redis://user:***@h:6379/0  # environment BATON_REGISTRY" in lines
    assert "kv_cache_memory =   # default: 512MiB on the CPU, the free memory on a GPU" in lines
    assert len(lines) == len(NodeSettings.model_fields)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:secret@h:99999",
        "redis://user:sec/secret@h:1",
        "redis://:secret@[::1",
        "redis://u:secret@[not an address]:1",
        "http://u:p@secret@h",
        "http://h:1?db=1&password=secret&protocol=3",
    ],
)
def test_errors_do_not_contain_passwords(url: str) -> None:
    with pytest.raises(ConfigError, match="must be a URL such as redis://") as refused:
        resolve(NodeSettings, {"registry": url}, {})
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("option", ["socket_timeout=abc", "sockettimeout=1", "protocol=7"])
def test_options_in_the_url_of_redis_are_checked(option: str) -> None:
    with pytest.raises(ConfigError, match="has an option after the '\\?' that the Redis client refuses") as refused:
        resolve(RouterSettings, {"registry": f"redis://u:secret@h:1/0?{option}"}, {})
    assert option.partition("=")[0] in str(refused.value)
    assert "secret" not in str(refused.value)
    url = "redis://u:secret@h:1/0?socket_timeout=2.5&protocol=3"
    assert resolve(RouterSettings, {"registry": url}, {})[0].registry == url


@pytest.mark.parametrize("url", ["http://s3cr3t@gpu:8000", "http://s3cr3t@gpu,http://gpu:8001/v1"])
def test_errors_do_not_contain_tokens(url: str) -> None:
    with pytest.raises(ConfigError, match="must be the URL of a vLLM server") as raised:
        resolve(LocalSettings, {"engines": url, "model": "/model"}, {})
    assert "s3cr3t" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("registry", "redis://[" + 9000 * "9" + "]"), ("registry", "h:" + 9000 * "9"), ("port", 9000 * "9")],
)
def test_an_error_does_not_repeat_a_long_value(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(NodeSettings, {name: value}, {})
    assert len(str(refused.value)) < 300


FOR_TESTS = {"failpoint", "allow_failpoints", "runner"}


@BOTH
def test_help_names_every_setting_with_its_default(
    kind: type[Settings], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as ended:
        settings_from_command_line(kind, ["--help"], "prog")
    assert ended.value.code == 0
    words = " ".join(capsys.readouterr().out.split())
    for name, field in kind.model_fields.items():
        if name in FOR_TESTS:
            assert flag_of(name) not in words
            continue
        assert f" {flag_of(name)} " in words
        assert field.description
        assert field.description in words
        assert f"[env var: BATON_{name.upper()}]" in words
    assert "[default: default]" in words
    assert "[default: the limit of the model]" in words


def test_keys_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings_from_command_line(RouterSettings, ["--api-keys", "acme:0123", "--print-config"], "prog")
    assert "api_keys = ***  # flag --api-keys" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "count"), [("16k", 16_000), ("16K", 16_384), ("1.5k", 1500), ("2m", 2 * 10**6), ("1M", 2**20), ("7", 7)]
)
def test_counts_have_the_suffixes_of_vllm(text: str, count: int) -> None:
    assert resolve(NodeSettings, {"max_model_len": text}, {})[0].max_model_len == count


@pytest.mark.parametrize("text", ["16kk", "0.0001k", "k", "-1k", "1e3k", "16 k"])
def test_an_invalid_count_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--max-model-len"):
        resolve(NodeSettings, {"max_model_len": text}, {})


@pytest.mark.parametrize(
    ("text", "count"),
    [("4", 4), ("image=4", 4), ('{"image": 4}', 4), ('{"image": {"count": 2, "width": 9}, "video": 0}', 2), ("video=0", 16)],
)  # fmt: skip
def test_the_limit_of_images_has_the_forms_of_vllm(text: str, count: int) -> None:
    settings = resolve(RouterSettings, {"limit_mm_per_prompt": text}, {})[0]
    assert settings.limit_mm_per_prompt == count
    assert resolve(RouterSettings, {}, settings.environment())[0] == settings


@pytest.mark.parametrize(
    "text", ["-1", "999", "image", "image=x", "video=1", '{"image": "4"}', '{"image"', "{}}", '{"x": 0}']
)
def test_an_invalid_limit_of_images_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--limit-mm-per-prompt"):
        resolve(RouterSettings, {"limit_mm_per_prompt": text}, {})


def test_adapters_may_be_updated_with_the_variable_of_vllm() -> None:
    settings, sources = resolve(RouterSettings, {}, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"})
    assert settings.allow_runtime_lora_updating
    assert sources["allow_runtime_lora_updating"] == "environment VLLM_ALLOW_RUNTIME_LORA_UPDATING"


SIZES = {"1": 1, "512MiB": 512 << 20, "512 mib": 512 << 20, "2GB": 2 * 10**9, "1.5GiB": 3 << 29, "0.5kB": 500, "7B": 7}


@pytest.mark.parametrize(("text", "size"), [*SIZES.items(), (12, 12)])
def test_sizes(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "MiB", "-1", "1e9", "2G", "1Mi", "1 M iB", "0.1", "1.5", "1.5B", "1PiB", "9" * 40, "\u0661", "1000000TB"],
)
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("", ()), (" ", ()), ("0", (0,)), ("3,1", (1, 3)), ("0-3", (0, 1, 2, 3)), ("0-1, 1,7-8", (0, 1, 7, 8))],
)
def test_cpu_lists(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "0-9999", "99999", "1,,2", "0-999999999999", "\u0661"])
def test_an_invalid_cpu_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="as in 0,2-3"):
        parse_cpus(text)


@given(st.lists(st.integers(0, 4095), max_size=20))
def test_a_cpu_list_is_printed_as_it_is_read(cpus: list[int]) -> None:
    assert parse_cpus(format_value(parse_cpus(cpus))) == tuple(sorted(set(cpus)))


def test_sockets_are_in_a_directory_that_no_other_user_can_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert private_directory() == f"{tmp_path}/baton"
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"{tmp_path}/gone")
    assert private_directory().endswith(f"/baton-{os.getuid()}")
