"""Test that hostile chat templates and tokenizer patterns are rejected, within bounded time and memory."""

import gc
import signal
import time

import psutil
import pytest

from router.text.chat_template import ChatTemplate
from router.text.regex_safety import may_backtrack_exponentially
from shared.errors import RequestError

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
    "a replacement that multiplies the text": (
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
    "endless recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "cannot render"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "complaint"), WILD.values(), ids=WILD)
def test_a_hostile_template_is_rejected(source: str, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        rendered(ChatTemplate(source, {}, []))


def test_the_template_works_after_a_timeout() -> None:
    source = "{% if messages[0].content == 'loop' %}{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(source + "{% endif %}<{{ messages[0].content }}>", {}, [])
    with pytest.raises(RequestError, match="too long"):
        template.render([{"role": "user", "content": "loop"}], add_generation_prompt=True, continue_final_message=False)
    assert rendered(template) == "<hello>"


def test_the_child_process_ends_with_its_template() -> None:
    before = set(psutil.Process().children())
    template = ChatTemplate("x", {}, [])
    (process,) = set(psutil.Process().children()) - before
    process.send_signal(signal.SIGINT)  # Ctrl-C in a terminal also sends this to the child
    assert rendered(template) == "x"
    assert process.is_running()
    del template
    gc.collect()
    assert not process.is_running()
