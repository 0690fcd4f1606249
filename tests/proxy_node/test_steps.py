"""Test the plugin that reports the steps of a vLLM server, with stand-ins for vLLM's classes. Also test how a proxy
node uses the reports."""

import json
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.plan import LocalSettings
from node.engine_steps import EngineStep, StepSocket, StepTracker, work_of
from node.recorder import StepRecorder
from scheduler.cost import StepWork, pairs_of
from scheduler.request import Request, Slice
from shared.lifecycle import wait_until
from shared.rpc.messages import unpack_ids
from tests.cluster.harness import wait_for
from tests.proxy_node.clusters import serving
from tests.proxy_node.vllm_stand_in import CONFIG, SchedulerStats, stats, step_logger
from tests.proxy_node.vllm_stub import answer

STEP = EngineStep(
    number=7, end_ns=10**18, elapsed_us=2000, prefill_tokens=0, num_decodes=1, decode_tokens=1, running=1,
    waiting=0, cached_tokens=0, max_num_seqs=32, max_step_tokens=4096,
)  # fmt: skip


def logger_of(**options: int) -> Any:
    logger = step_logger()(vllm_config=CONFIG, **options)
    weakref.finalize(logger, logger.socket.close)
    return logger


def step(**changes: int) -> EngineStep:
    return EngineStep(**(STEP.model_dump() | changes))


@pytest.fixture
def listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    path = str(tmp_path / "steps")
    monkeypatch.setenv("BATON_STEPS", path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(path)
        found.setblocking(False)
        yield found


def test_the_plugin_reports_each_step(listener: socket.socket) -> None:
    logger = logger_of(engine_index=0)
    logger.log_engine_initialized()
    logger.record(None, None, mm_cache_stats=None, engine_idx=0)
    logger.record(SchedulerStats(), None)
    dummy = stats(1, (0, 0), 0, 1.0)
    assert dummy.iteration_details is not None
    dummy.iteration_details.is_dummy = True
    logger.record(dummy, None)
    logger.record(scheduler_stats=stats(2, (3, 500), 4, 12.5, cached=96), iteration_stats=None, mm_cache_stats=None)
    data = listener.recv(4096)
    assert json.loads(data)["num_prefills"] == 3, "older proxies need it"
    found = EngineStep.model_validate_json(data)
    expected = {"number": 2, "elapsed_us": 12_500, "prefill_tokens": 500, "cached_tokens": 96}
    expected |= {"num_decodes": 4, "decode_tokens": 4, "running": 4, "max_num_seqs": 32, "max_step_tokens": 4096}
    assert found.model_dump() == found.model_dump() | expected
    with pytest.raises(BlockingIOError):
        listener.recv(4096)


def test_the_plugin_does_not_wait_for_a_reader(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logger_of()
    for number in range(5000):  # more than the socket holds
        logger.record(stats(number, (0, 0), 1, 1.0), None)
    assert EngineStep.model_validate_json(listener.recv(4096)).number == 0
    listener.close()
    logger.record(stats(1, (0, 0), 1, 1.0), None)
    for path in ("", "/nowhere/steps"):
        monkeypatch.setenv("BATON_STEPS", path)
        logger_of().record(stats(1, (0, 0), 1, 1.0), None)


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[]", b"{}", b"[" * 4000, {"number": -1}, {"end_ns": 2**63}, {"running": "1"}]
)
def test_malformed_datagrams_are_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="EngineStep"):
        EngineStep.model_validate_json(
            data if isinstance(data, bytes) else json.dumps(STEP.model_dump() | data).encode()
        )


def parts_of(slices: list[Slice]) -> list[tuple[int, int, int]]:
    return [(each.request.arrival, each.start, each.count) for each in slices]


def test_prompt_chunks_are_assigned_in_order_of_arrival() -> None:
    first, second = (Request("", [0] * size, size, 0, arrival=serial) for serial, size in ((1, 100), (2, 60)))
    decoding = Request("", [0] * 31, 20, 0, arrival=3)
    requests = [decoding, first, second]
    work, slices = work_of(step(prefill_tokens=80, cached_tokens=32, num_decodes=1), requests)
    assert parts_of(slices) == [(1, 32, 68), (2, 0, 12), (3, 30, 1)]
    assert work == StepWork(2, 80, pairs_of(32, 68) + pairs_of(0, 12), 1, 31)
    work, slices = work_of(step(prefill_tokens=48, num_decodes=2), requests)
    assert parts_of(slices) == [(2, 12, 48), (3, 30, 1)]
    assert (work.num_decodes, work.decode_context) == (2, 62)
    work, slices = work_of(step(prefill_tokens=9, num_decodes=1, decode_tokens=4), [])
    assert (parts_of(slices), work.draft_tokens, work.prefill_tokens) == ([(2**31 - 1, 0, 9)], 3, 9)


def test_the_durations_of_steps_are_learnt() -> None:
    recorder = StepRecorder()
    tracker, tokens = StepTracker(recorder), [7] * 500
    tracker.begin("a", tokens)
    tokens.append(7)
    for number in range(40):
        tokens.append(7)
        tracker.add(step(number=number, end_ns=10**18 + number * 5_000_000), 90, 10)
    steps, _ = recorder.take()
    assert [each.host_us for each in steps] == [0] + [3000] * 39, "the rest of the time between two steps"
    assert tracker.cost is not None
    assert tracker.cost.seconds(StepWork(num_decodes=1, decode_context=540)) == pytest.approx(0.005, rel=0.2)
    assert steps[-1].predicted_us == pytest.approx(5000, rel=0.2)
    assert (steps[-1].blocks_free, steps[-1].blocks_owned, steps[-1].budget) == (90, 10, 4096)
    assert unpack_ids(steps[-1].members) == [0, 540, 1]
    tracker.add(step(number=40, end_ns=2 * 10**18, running=0), 90, 10)
    tracker.add(step(number=41, end_ns=3 * 10**18), 90, 10)
    assert [each.host_us for each in recorder.take()[0]][1] == 0, "the engine was idle"


async def test_a_socket_is_replaced_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as killed:
        killed.bind(str(path))
    receiver, found = StepSocket(), list[int]()
    receiver.on_step = lambda each: found.append(each.number)
    with receiver.opened(path), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"{}", str(path))
        sender.sendto(json.dumps(STEP.model_dump()).encode(), str(path))
        assert await wait_until(lambda: found == [7], 60.0)
    assert not path.exists()
    path.write_text("a file")
    with pytest.raises(OSError, match="in use"), receiver.opened(path):
        pass


def test_the_router_predicts_and_shows_the_steps_of_engines(tmp_path: Path) -> None:
    names, settings = ("prefill-0", "decode-0"), {"disaggregate": "auto", "ttft_slo_ms": 60_000}
    with serving(tmp_path, names, settings=settings, connector="nixl", reports_steps=True) as (cluster, _):
        numbers = iter(range(1 << 20))

        def is_learnt() -> bool:
            prompt = [next(numbers), *range(500)]
            assert cluster.complete(prompt, 12) == answer(prompt, 12)
            return prompt[0] >= 11 and all(cluster.nodes()[name]["cost"] for name in names)

        wait_for(is_learnt, "the durations are learnt")
        facts = cluster.nodes()["prefill-0"]["facts"]
        assert (facts["max_step_tokens"], facts["max_num_seqs"]) == ("4096", "32")
        before = cluster.status()["placements"]
        cluster.complete([99, *range(500)], 12)
        after = cluster.status()["placements"]
        assert after.get("no_prediction") == before.get("no_prediction"), after
        for name in names:
            shown = cluster.get(f"/v1/steps?node={name}")
            rows = [dict(zip(shown["fields"], row, strict=True)) for row in shown["steps"]]
            assert len(rows) > 8
            assert all(row["prefill_tokens"] in {0, 501} and row["num_decodes"] <= 1 for row in rows)
        assert cluster.get(f"/v1/steps/{name}/{int(rows[-1]['number'])}")["members"][0]["kind"] == "decode"


def test_a_prediction_needs_the_steps_of_all_engines() -> None:
    given: dict[str, Any] = {"engines": "http://a:1,http://b:1", "model": "m"}
    with pytest.raises(ValueError, match="needs --steps-sockets"):
        LocalSettings(**given, ttft_slo_ms=500)
    with pytest.raises(ValueError, match="one socket for each"):
        LocalSettings(**given, steps_sockets="/a")
    assert LocalSettings(**given, ttft_slo_ms=500, steps_sockets="/a,/b").steps_sockets == ("/a", "/b")
