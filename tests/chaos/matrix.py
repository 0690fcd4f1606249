"""The rows of the fault matrix whose faults can be injected on one host, and how each fault is injected.

A failpoint `site:n` fires when the process reaches the site for the n-th time. With `@*`, the process
counts separately for each request: for example, a prompt of 6,000 tokens reaches `prefill.after_chunk` once per chunk.
"""

import signal
from typing import Final

from tests.chaos.drive import Link, Row, Signals
from tests.chaos.features import KIND as FEATURES
from tests.chaos.proxy import PARTITION, Harm

TERM, KILL, STOP, CONT = signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
P, D = "prefill-0", "decode-0"
REFUSED: Final = Harm(refuse=True)
ONE_WAY: Final = Harm(silent=frozenset({"up"}))
NO_ANSWER: Final = Harm(silent=frozenset({"down"}))
SMALL_POOL: Final = {"num_blocks": 450}  # these blocks hold 7,200 tokens: one long prompt and little else
BEGIN_S = 2.0  # time between the start of the load and the first scripted fault


def _kills(*sites: str) -> list[str]:
    return [f"{site}=kill" for site in sites]


def _link(kind: str, harm: Harm, for_s: float, name: str = D) -> list[Link]:
    return [Link(name, kind, BEGIN_S, harm, for_s)]


def _signalled(names: tuple[str, ...], every_s: float, *signals: tuple[float, int]) -> list[Signals]:
    return [Signals(name, BEGIN_S + every_s * number, signals) for number, name in enumerate(names)]


def _frozen(name: str, for_s: float) -> list[Signals]:
    return [Signals(name, BEGIN_S, ((0.0, STOP),)), Signals(name, BEGIN_S + for_s, ((0.0, CONT),))]


ROWS: Final[list[Row]] = [
    Row("none", "no fault"),
    # ---- crashes, phase by phase ----
    Row("queued", "prefill node killed when it accepts a request", {P: _kills("node.accepted:40")}),
    Row("chunk", "prefill node killed in the first chunk, a middle chunk and the last chunk",
        {P: _kills("prefill.after_chunk:1@*", "prefill.after_chunk:6@*", "prefill.after_chunk:11@*")}),
    Row("push", "prefill node killed before, between and after its pushes",
        {P: _kills("prefill.before_push:1@*", "prefill.before_push:2@*", "prefill.after_push:2@*")}),
    Row("commit", "prefill node killed before and after a commit",
        {P: _kills("prefill.before_commit:20", "prefill.after_commit:20")}),
    Row("reserved", "decode node killed at a reservation, at a commit and after the KV arrived",
        {D: _kills("decode.reserved:20", "decode.before_check:20", "decode.received:20")}),
    Row("token", "decode node killed at the first tokens of an answer, the 100th and the last",
        {D: _kills("decode.token:3@*", "decode.token:100@*", "decode.ended:20")}),
    Row("last decode", "the only decode node killed", {D: _kills("decode.token:100@*")}, decode=1),
    # ---- frozen, hung, broken ----
    Row("freeze 1 s", "prefill node frozen for 1 s in a push", {P: ["prefill.before_push:40=stop"]}),
    Row("freeze", "prefill node frozen for 12 s in a chunk, and again in a push",
        {P: ["prefill.after_chunk:100=stop,prefill.before_push:500=stop"]}, thaw_s=12.0),
    Row("decode freeze 1 s", "decode node frozen for 1 s at a token", {D: ["decode.token:500=stop"]}),
    Row("decode freeze", "decode node frozen for 10 s at a token", {D: ["decode.token:500=stop"]}, thaw_s=10.0),
    Row("all frozen prefill first", "both nodes frozen, the prefill node for 6 s and the decode node for 45 s",
        script=[*_frozen(D, 45.0), *_frozen(P, 6.0)], thaw_s=100.0, prefill=1, decode=1),
    Row("all frozen decode first", "both nodes frozen, the decode node for 6 s and the prefill node for 45 s",
        script=[*_frozen(P, 45.0), *_frozen(D, 6.0)], thaw_s=100.0, prefill=1, decode=1),
    Row("hang", "prefill node's step loop hangs", {P: ["engine.step:100=hang"]}),
    Row("decode hang", "decode node's step loop hangs", {D: ["engine.step:500=hang"]}),
    Row("engine", "exception on the prefill engine's thread", {P: ["engine.step:100=raise"]}),
    Row("decode engine", "exception on the decode engine's thread", {D: ["engine.step:500=raise"]}),
    # ---- shutdown ----
    Row("drain", "SIGTERM to every node, one after another",
        script=_signalled((P, D, "prefill-1", "decode-1"), 6, (0.0, TERM))),
    Row("drain cut short", "SIGTERM, then SIGKILL 50 ms later",
        script=_signalled((D, P), 8, (0.0, TERM), (0.05, KILL))),
    Row("second signal", "SIGTERM twice within 20 ms", script=_signalled((D, P), 8, (0.0, TERM), (0.02, TERM))),
    # ---- the KV link ----
    Row("kv refused", "KV connections refused for 4 s", script=_link("kv", REFUSED, 4), channel="tcp"),
    Row("kv silent", "KV link silent for 8 s, no reset", script=_link("kv", PARTITION, 8), channel="tcp"),
    Row("kv one way", "KV link: no data arrives for 8 s", script=_link("kv", ONE_WAY, 8), channel="tcp"),
    Row("kv no answer", "KV link: no answer for 8 s", script=_link("kv", NO_ANSWER, 8), channel="tcp"),
    Row("kv cut", "KV link reset after a number of bytes", script=_link("kv", Harm(cut_at=4000), 8), channel="tcp"),
    Row("kv flipped", "bits flipped on the KV link", script=_link("kv", Harm(corrupt=0.1), 8), channel="tcp"),
    Row("kv doubled", "data doubled on the KV link", script=_link("kv", Harm(double=0.1), 8), channel="tcp"),
    Row("kv slow", "KV link at 4 KiB/s", script=_link("kv", Harm(bytes_per_s=4096), 8), channel="tcp"),
    Row("late writer", "prefill node stalls for 12 s before a push", {P: ["prefill.before_push:60=sleep-12"]}),
    Row("long step", "a prefill step of 3 s", {P: ["engine.step:100=sleep-3"]}),
    # ---- no fault, small pools ----
    Row("small pools", "KV pools of 7,200 tokens", settings=SMALL_POOL),
    # ---- the RPC link ----
    Row("rpc refused", "RPC connections refused for 4 s", script=_link("rpc", REFUSED, 4)),
    Row("rpc silent", "RPC link silent for 6 s, no reset", script=_link("rpc", PARTITION, 6)),
    Row("rpc one way", "RPC link: no data arrives for 6 s", script=_link("rpc", ONE_WAY, 6)),
    Row("rpc no answer", "RPC link: no data returns for 6 s", script=_link("rpc", NO_ANSWER, 6)),
    Row("rpc cut", "RPC link reset after a number of bytes", script=_link("rpc", Harm(cut_at=9000), 6)),
    Row("rpc slow", "RPC link delayed by 20 ms per chunk", script=_link("rpc", Harm(delay_s=0.02), 6)),
    Row("prefill rpc silent", "prefill node's RPC link silent for 6 s", script=_link("rpc", PARTITION, 6, P)),
    # ---- harmful requests ----
    Row("same address", "decode node killed and restarted at its address", {D: _kills("decode.token:100@*")},
        script=_link("rpc", Harm(), 0)),
    Row("poison", "a long prompt kills each prefill node",
        {P: _kills("prefill.after_chunk:11@*"), "prefill-1": _kills("prefill.after_chunk:11@*")}, may_lose=8),
    Row("one request", "an exception in one request's part of a step", {D: ["engine.slice:500=raise"]}),
    # ---- a model with real arithmetic: drafts, grammars, images and adapters ----
    Row("features prefill", "prefill node of requests with grammars, images and adapters killed",
        {P: _kills("prefill.after_chunk:4@*", "prefill.before_push:2@*", "prefill.before_commit:20")}, kind=FEATURES),
    Row("features decode", "decode node of requests with drafts, grammars, images and adapters killed",
        {D: _kills("decode.received:20", "decode.token:20@*", "decode.ended:20")}, kind=FEATURES),
    Row("features co-located", "the same without prefill nodes; also killed in a chunk",
        {D: _kills("engine.slice:4@*", "decode.token:20@*", "decode.ended:20")}, prefill=0, kind=FEATURES),
    Row("features rpc", "the same requests; RPC link of a decode node reset, then silent for 6 s",
        script=[*_link("rpc", Harm(cut_at=9000), 6), Link(D, "rpc", 12.0, PARTITION, 6)], kind=FEATURES),
    # ---- the router ----
    Row("router", "router killed and restarted", script=[Signals("router", 4.0, ((0.0, KILL),))], may_lose=16),
]  # fmt: skip
