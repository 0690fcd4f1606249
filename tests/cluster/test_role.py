"""Test role changes in a serving cluster: no request fails, and each node does the work of its new role."""

import json
import urllib.error
import urllib.request

import pytest

from cluster.cli import main
from tests.cluster.harness import Cluster, cluster, expected, prompt_of, wait_for


def change_role(url: str, node: str, role: str) -> int:
    return main(["role", node, role, "--url", url])


def roles(running: Cluster) -> dict[str, str]:
    return {name: node["role"] for name, node in running.nodes().items() if node["state"] == "ready"}


def refusal(running: Cluster, node: str, body: bytes) -> tuple[int, str]:
    request = urllib.request.Request(f"{running.url}/v1/nodes/{node}/role", body, {"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    with caught.value as answer:
        return answer.code, json.load(answer)["error"]["message"]


def test_role_changes_under_load_fail_no_request_and_take_effect(capsys: pytest.CaptureFixture[str]) -> None:
    with cluster(prefill=2, decode=2, drain_timeout_s=0.05, disaggregate="always") as running:
        prompts = [prompt_of(index, 150 + index) for index in range(8)]
        with running.streaming(prompts, 2000):
            assert change_role(running.url, "decode-1", "prefill") == 0
            assert change_role(running.url, "prefill-1", "decode") == 0
        assert capsys.readouterr().out.splitlines() == [
            "decode-1 is a prefill node now",
            "prefill-1 is a decode node now",
        ]
        assert running.status()["requests"]["failed"] == 0
        requests = running.status()["requests"]
        # A request whose client reads too slowly leaves its node before the drain ends, and counts only as paused.
        assert requests["moved"] + requests["paused"] > 0, "no stream left its node at the end of the drain"
        wait_for(lambda: roles(running) == {
            "prefill-0": "prefill", "prefill-1": "decode", "decode-0": "decode", "decode-1": "prefill"
        }, "the router knows the new roles")  # fmt: skip
        before = running.nodes()
        more = [prompt_of(100 + index, 120) for index in range(12)]
        with running.streaming(more, 60):
            pass
        running.settled()
        after = running.nodes()
        assert after["decode-1"]["handoffs"] > before["decode-1"]["handoffs"]
        assert after["prefill-1"]["generated_tokens"] > before["prefill-1"]["generated_tokens"] + 59
        running.idle()

        assert change_role(running.url, "decode-1", "decode") == 0
        assert change_role(running.url, "prefill-1", "prefill") == 0
        assert running.stream(prompts[0], 30) == expected(prompts[0], 30), "the roles are changed back"

        assert change_role(running.url, "decode-0", "prefill") == 0
        assert change_role(running.url, "decode-1", "prefill") == 0
        assert "no decode node is left: prefill nodes generate too" in capsys.readouterr().out
        assert running.stream(prompts[1], 30) == expected(prompts[1], 30)
        running.idle()


def test_an_invalid_change_of_a_role_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with cluster(prefill=0, decode=1, mode="colocated") as running:
        assert change_role(running.url, "decode-7", "prefill") == 1
        assert "no live node 'decode-7'; live nodes: decode-0" in capsys.readouterr().err
        assert refusal(running, "decode-0", b'{"role": "king"}')[0] == 400
        assert refusal(running, "decode-0", b"[")[0] == 400
        assert refusal(running, "decode-8", b'{"role": "decode"}')[0] == 404
        status, text = refusal(running, "decode-0", b'{"role": "prefill"}')
        assert (status, "this is the last one" in text) == (409, True)
        assert change_role(running.url, "decode-0", "decode") == 0, "the role is unchanged"
        assert running.complete([5, 6], 3) == expected([5, 6], 3)
    assert change_role(running.url, "decode-0", "decode") == 1
    assert "no router at" in capsys.readouterr().err
