import contextlib
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.dispatch.requests import ModelCard
from router.http.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse_body, parse_json
from router.http.parsing import COMPLETION_TOKENS, build_requests
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from router.text.tool_syntax import find_syntax
from shared.errors import RequestError
from shared.rpc.messages import ThinkingBudget, pack_ids, unpack_ids
from tests.router.conftest import CHATML, byte_level_tokenizer

MODEL = ModelCard("m", max_model_len=100, vocab_size=330, eos_ids=frozenset({2}))


def body_of(kind: type, **fields: object) -> bytes:
    required = {"prompt": "x"} if kind is CompletionBody else {"messages": [{"role": "user", "content": "x"}]}
    return json.dumps(required | fields).encode()


NOT_JSON = [
    *(b"", b'{"a":1} x', b'\xef\xbb\xbf{"a":1}', b'{"a":NaN}', b'{"a":-Infinity}', b'{"a":1e999}', b"{'a':1}"),
    *(b'{"a":"\x00"}', b'{"a":1,}', b'{"a":' + b"9" * 5000 + b"}", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    *(b"[]", b'"x"', b"null", b"[" * 100_000, b'{"a":1,"a":2}', b'{"a":{"b":1,"b":1}}'),
    *(b'{"a":"\xff"}', b'{"a":"\\ud800"}', b'{"\\uDC00":1}', b'{"a":"\xed\xa0\x80"}'),
]


@pytest.mark.parametrize("raw", NOT_JSON, ids=range(len(NOT_JSON)))
def test_only_one_json_object_is_accepted(raw):
    with pytest.raises(RequestError) as raised:
        parse_json(raw)
    assert (raised.value.status, raised.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("raw", [b'{"a":1,"model":1,"model":2}', b'{"a":{"model":1,"b":1,"model":1}}'])
def test_a_field_that_occurs_twice_is_named(raw):
    with pytest.raises(RequestError, match="the field `model` twice"):
        parse_json(raw)
    with pytest.raises(RequestError, match="the field `\\?` twice"):
        parse_json(b'{"\\ud800":1,"\\ud800":2}')


def test_pairs_of_surrogates_and_nul_are_text():
    assert parse_json(b'{"a":"\\ud83d\\ude00\\u0000"}') == {"a": "😀\0"}


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes_are_parsed_or_rejected(raw):
    with contextlib.suppress(RequestError):
        assert isinstance(parse_json(raw), dict)


USER = {"role": "user", "content": "x"}
TEXT_PART = {"type": "text", "text": "x"}
# Invalid values of parameters that completions and chat completions share. The error names the parameter.
BAD_VALUES = {
    "max_tokens": (0, -1, 2**31, 2**63, 1.5, "16", True),
    "n": (0, -1, 129, 10**9, "2", True),
    "temperature": (-0.1, 2.1, "1", True),
    "top_p": (0, 1.1, -1),
    "top_k": (-2, 2**40, 1.5),
    "min_p": (2, -0.1),
    "presence_penalty": (2.1, -2.1, 1e308),
    "frequency_penalty": (2.1, -2.1, 1e308),
    "repetition_penalty": (0, -1, 1e308),
    "seed": (-(2**63) - 1, 2**64, 1.5, "1"),
    "stream": ("yes", 1),
    "stop": (["a"] * 33, "", "x" * 257, ["x" * 1000], [1], 5, {}),
    "stop_token_ids": ([True], "1", [1] * 129, [1.0]),
    "logit_bias": (
        *({str(i): 1 for i in range(301)}, {"a": 1}, {"-1": 1}, {"1": 101}, {"1": -101}, {"1": "1"}, {"1": True}),
        *({"²": 1}, [1], {"1": None}, {"1" * 11: 1}),
    ),
    "min_tokens": (-1, 1.0, 2**31),
    "cache_salt": ("", "x" * 257, 1),
    "priority": (2**31, 0.5),
    "prompt_logprobs": (21, -1),
    "functions": ([{"name": "f"}],),
    "function_call": ("auto",),
    "response_format": ("json_object", []),
    "structured_outputs": ("x", []),
    **dict.fromkeys(("chat_template", "guided_regex", "remote_host", "temprature"), ("(a+)+b",)),
    **dict.fromkeys(("guided_json", "kv_transfer_params"), ({"remote_host": "10.0.0.1"},)),
    "reasoning_effort": ("huge", 1),
    "bad_words": ("x", [""], [1], ["x"] * 129, ["x" * 257]),
    "allowed_token_ids": ([], [-1], ["1"], 5),
    "truncate_prompt_tokens": (0, -2, 2**31, "1", 1.5),
    "stream_interval": (0, 1025, "1", 1.5),
    "thinking_token_budget": (-2, 2**31, "1", 1.5, True),
    "logits_processors": (["x"],),
    "length_penalty": (0.5,),
    "moderation": ({"model": "x"},),
    **dict.fromkeys(("bootstrap_room", "block_ids", "do_remote_decode", "remote_engine_id", "trust_remote_code"), (1,)),
}
BAD = [({name: value}, name) for name, values in BAD_VALUES.items() for value in values] + [
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"lark": "x"}}, "structured_outputs.lark"),
]
BAD_PROMPTS = [
    *("", [], [[]], [""], ["a", ""], ["a", [1], []], [1, "a"], ["a", 1], [1, [2]], [[[1]]], [1.0], [True], [-1]),
    *([[1], [False]], {"a": 1}, 5, ["a"] * 513, ["a"] * 10_000),
]
BAD_OF_COMPLETIONS = [({"prompt": prompt}, "prompt") for prompt in BAD_PROMPTS] + [
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"n": 2, "best_of": 1}, "best_of"),
    *[({"logprobs": value}, "logprobs") for value in (21, -1, True, 1.0)],
    ({"messages": []}, "messages"),
    ({"prompt": ["a"] * 65, "n": 8}, "n"),
    ({"echo": "yes"}, "echo"),
]
IMAGES = ["http://169.254.169.254/", "file:///etc/passwd", "data:text/html;base64," + "A" * 9999]
BAD_CONTENTS = [None, 5, [{"type": "thinking"}], [TEXT_PART] * 10_000, [TEXT_PART | {"text": 1}]]
BAD_CONTENTS += [[{"type": "image_url", "image_url": {"url": url}}] for url in IMAGES]
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
RESULT = {"role": "tool", "content": "x", "tool_call_id": "c1"}
DEEP: dict = {"a": 1}
for _ in range(32):
    DEEP = {"a": DEEP}  # has 33 levels in the end


def calling(**fields: object) -> dict:
    return {"role": "assistant", "content": None, "tool_calls": [CALL | fields]}


def with_arguments(text: object) -> dict:
    return calling(function={"name": "f", "arguments": text})


BAD_MESSAGES = [
    ([RESULT], "messages[1].tool_call_id"),
    ([calling(), RESULT | {"tool_call_id": "c2"}], "messages[2].tool_call_id"),
    ([RESULT | {"tool_call_id": None}], "messages[1]"),
    ([RESULT | {"role": "user"}], "messages[1]"),
    ([calling() | {"role": "user"}], "messages[1]"),
    ([{"role": "function", "name": "f", "content": "x"}], "messages[1]"),
    ([{"role": "assistant", "content": "x", "function_call": {"name": "f"}}], "messages[1]"),
    ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[1].tool_calls"),
    ([{"role": "assistant", "content": "x", "tool_calls": [CALL] * 257}], "messages[1].tool_calls"),
    ([calling(id="")], "messages[1].tool_calls"),
    ([calling(type="custom")], "messages[1].tool_calls"),
    ([with_arguments({})], "messages[1].tool_calls"),
    ([with_arguments(json.dumps(DEEP))], "messages[1]"),
]
BAD_TOOLS = [
    ([TOOL, TOOL], "tools[1].function.name"),
    ([TOOL] * 257, "tools"),
    ({}, "tools"),
    ([{"type": "web_search"}], "tools[0].type"),
    ([{"type": "function"}], "tools[0].function"),
    ([TOOL, TOOL | {"strict": True}], "tools[1].strict"),
    *[
        ([{"type": "function", "function": FUNCTION | {"name": name}}], "tools[0].function.name")
        for name in ("", "a b", "a:b", "é", "x" * 129, 5)
    ],
    ([{"type": "function", "function": {"parameters": {}}}], "tools[0].function.name"),
    *[
        ([{"type": "function", "function": FUNCTION | {"parameters": schema}}], "tools[0].function.parameters")
        for schema in ([], "x", {"type": "string"}, {"properties": []}, {"properties": {"a": 1}}, DEEP)
    ],
    ([{"type": "function", "function": FUNCTION | {"strict": "yes"}}], "tools[0].function.strict"),
    ([{"type": "function", "function": FUNCTION | {"extra": 1}}], "tools[0].function.extra"),
]
BAD_OF_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [USER] * 2049}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [USER, USER | {"role": "wizard"}]}, "messages[1].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    *[({"messages": [USER | {"content": content}]}, "messages[0].content") for content in BAD_CONTENTS],
    ({"messages": [USER | {"name": "x" * 10_240}]}, "messages[0].name"),
    ({"messages": [USER | {"weight": 1}]}, "messages[0]"),
    *[({"messages": [USER, *messages]}, param) for messages, param in BAD_MESSAGES],
    *[({"tools": tools}, param) for tools, param in BAD_TOOLS],
    *[
        ({"tool_choice": choice}, "tool_choice")
        for choice in ("any", 1, {"type": "function"}, "required", {"type": "function", "function": {"name": "f"}})
    ],
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"include_reasoning": "no"}, "include_reasoning"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"continue_final_message": True}, "continue_final_message"),
    *[
        ({"chat_template_kwargs": value}, "chat_template_kwargs")
        for value in (
            {"tools": 1},
            {"a": []},
            {"a": {}},
            {"a b": 1},
            {"x" * 65: 1},
            {f"a{i}": 1 for i in range(33)},
            [],
            "a",
        )
    ],
    ({"prompt": "x"}, "prompt"),
    ({"best_of": 1}, "best_of"),
]
ROWS = [(kind, *row) for kind in (CompletionBody, ChatBody) for row in BAD]
ROWS += [(CompletionBody, *row) for row in BAD_OF_COMPLETIONS] + [(ChatBody, *row) for row in BAD_OF_CHAT]


@pytest.mark.parametrize(
    ("kind", "fields", "param"), ROWS, ids=[f"{row[0].__name__} {str(row[1])[:40]}" for row in ROWS]
)
def test_a_bad_parameter_is_rejected_by_name(kind, fields, param):
    with pytest.raises(RequestError) as raised:
        parse_body(kind, body_of(kind, **fields), ["m"])
    assert (raised.value.status, raised.value.param) == (400, param)
    assert len(raised.value.message) < 300


def test_text_parts_are_joined_and_nulls_are_not_given():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts, "name": None, "refusal": None}]
    body = parse_body(ChatBody, body_of(ChatBody, messages=messages, max_tokens=None), ["m"])
    assert [message.plain() for message in body.messages] == [{"role": "user", "content": "a\nb"}]
    assert body.max_tokens is None


def test_messages_of_tools_reach_the_template():
    messages = [
        {"role": "user", "content": "x"},
        calling(index=0) | {"reasoning": "hm"},
        RESULT,
        {"role": "assistant", "content": "y", "tool_calls": []},
        {"role": "assistant", "content": None, "reasoning": "hm"},  # vLLM's answer that ended in the reasoning
    ]
    body = parse_body(ChatBody, body_of(ChatBody, messages=messages, tools=[TOOL], tool_choice="none"), ["m"])
    plain = [message.plain() for message in body.messages]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
    thought = {"reasoning_content": "hm", "thinking": "hm"}
    assert plain[1] == {"role": "assistant", "content": "", "tool_calls": [call], **thought}
    assert plain[2] == RESULT
    assert plain[3] == {"role": "assistant", "content": "y"}
    assert plain[4] == {"role": "assistant", "content": "", **thought}
    assert [tool.plain() for tool in body.tools] == [TOOL]


def test_arguments_may_have_32_levels():
    parse_body(ChatBody, body_of(ChatBody, messages=[USER, with_arguments(json.dumps(DEEP["a"]))]), ["m"])


@pytest.mark.parametrize("text", ["", "[]", "x", '{"a": 1', "{" * 100_000, "[" * 100_000])
def test_malformed_arguments_of_an_earlier_call_are_empty(text):
    body = parse_body(ChatBody, body_of(ChatBody, messages=[USER, with_arguments(text)]), ["m"])
    assert body.messages[1].plain()["tool_calls"][0]["function"]["arguments"] == {}


def test_fields_and_parts_without_a_meaning_of_their_own_are_accepted():
    cached = {"cache_control": {"type": "ephemeral"}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    thought, refusal = {"type": "thinking", "thinking": "hm", "closed": True}, {"type": "refusal", "refusal": "no"}
    messages = [
        cached | {"role": "user", "content": [TEXT_PART | cached, image | cached]},
        {"role": "assistant", "content": [thought, refusal]},
        {"role": "user", "content": []},
    ]
    name = "x" * 128
    tools = [cached | {"function": {"name": name}}]
    body = parse_body(ChatBody, body_of(ChatBody, messages=messages, tools=tools, model=""), ["m"])
    contents = [[TEXT_PART, {"type": "image"}], "hm\nno", ""]
    assert [message.plain() for message in body.messages] == [
        {"role": message["role"], "content": content} for message, content in zip(messages, contents, strict=True)
    ]
    assert [tool.plain() for tool in body.tools] == [{"type": "function", "function": {"name": name}}]
    assert body.model is None


def test_openais_harmless_fields_are_ignored():
    fields = {"user": "u" * 100_000, "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "tools": []}
    fields |= {"verbosity": "low", "prompt_cache_key": "k", "safety_identifier": "s", "parallel_tool_calls": False}
    fields |= {"modalities": ["text"], "prediction": {"type": "content", "content": "x"}, "tool_choice": "auto"}
    fields |= {"prompt_cache_options": {"mode": "implicit"}, "stream": True}
    fields |= {"stream_options": {"include_usage": True, "include_obfuscation": False}, "top_logprobs": 0}
    parse_body(ChatBody, body_of(ChatBody, **fields, response_format={"type": "text"}), ["m"])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": [{"role": "assistant", "content": None}]}, "must not be null, except with `tool_calls`"),
        ({"messages": [RESULT]}, "is not the id of a call in an earlier message of the assistant"),
        ({"tools": [TOOL, TOOL]}, "is the name of an earlier tool: `f`"),
        ({"tool_choice": "any"}, 'must be "none", "auto", "required" or an object'),
        ({"guided_regex": "a"}, "`guided_regex` is not supported; use `structured_outputs.regex`."),
        ({"chat_template_kwargs": {"messages": "x"}}, "cannot set `messages`"),
    ],
)
def test_an_error_says_what_is_accepted(fields, says):
    with pytest.raises(RequestError) as raised:
        parse_body(ChatBody, body_of(ChatBody, **fields), ["m"])
    assert says in raised.value.message


def test_the_effort_of_reasoning_sets_the_switches_of_chat_templates():
    off = parse_body(ChatBody, body_of(ChatBody, reasoning_effort="none", chat_template_kwargs={"a": 1.5}), ["m"])
    assert off.chat_template_kwargs == {
        "enable_thinking": False, "thinking": False, "reasoning_effort": "none", "a": 1.5
    }  # fmt: skip
    high = parse_body(ChatBody, body_of(ChatBody, reasoning_effort="high"), ["m"])
    assert high.chat_template_kwargs == {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
    assert parse_body(ChatBody, body_of(ChatBody), ["m"]).chat_template_kwargs == {}


@pytest.mark.parametrize("name", ["other", "../../etc", "x" * 10_240, 5, ["m"]])
def test_an_unknown_model_does_not_exist(name):
    with pytest.raises(RequestError) as raised:
        parse_body(CompletionBody, body_of(CompletionBody, model=name), ["m"])
    assert (raised.value.status, raised.value.code) == (404, "model_not_found")
    assert len(raised.value.message) < 120


def test_the_error_names_the_served_models_and_the_parameter_that_was_meant():
    for fields, text in (
        ({"model": "gpt-4"}, "The model `gpt-4` does not exist; served: `m`, `adapter`."),
        (
            {"stream": True, "stream_options": {"inclde_usage": True}},
            "Unknown parameter: `stream_options.inclde_usage`; did you mean `include_usage`?",
        ),
        ({"max_token": 4}, "Unknown parameter: `max_token`; did you mean `max_tokens`?"),
        ({"prompt": "x"}, "`prompt` is not supported; use `messages`."),
    ):
        with pytest.raises(RequestError) as raised:
            parse_body(ChatBody, json.dumps({"messages": [USER]} | fields).encode(), ["m", "adapter"])
        assert raised.value.message == text


def test_of_many_unknown_fields_the_first_is_named():
    raw = b"{" + b",".join(b'"k%d":1' % i for i in range(20_000)) + b"}"
    with pytest.raises(RequestError, match="Unknown parameter: `k0`"):
        parse_body(CompletionBody, raw, ["m"])


@pytest.mark.parametrize("fields", [{}, {"prompt": "x", "messages": [USER]}, {"prompt": 5}, {"messages": []}])
def test_tokenize_takes_a_text_or_a_conversation(fields):
    with pytest.raises(RequestError):
        parse_body(TokenizeBody, json.dumps(fields).encode(), ["m"])


@pytest.mark.parametrize("tokens", ["1", [1.0], [True], None, [[1]]])
def test_detokenize_takes_ids(tokens):
    with pytest.raises(RequestError) as raised:
        parse_body(DetokenizeBody, json.dumps({"tokens": tokens}).encode(), ["m"])
    assert raised.value.param == "tokens"


async def requests_of(tokenizer, kind=CompletionBody, **fields):
    return await build_requests(parse_body(kind, body_of(kind, **fields), ["m"]), MODEL, tokenizer, "id")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [330]}, "prompt"),
        ({"prompt": [[1], [2**63]]}, "prompt"),
        ({"stop_token_ids": [330]}, "stop_token_ids"),
        ({"logit_bias": {"330": 1}}, "logit_bias"),
        ({"allowed_token_ids": [5, 330]}, "allowed_token_ids"),
        ({"prompt": [1] * 101, "truncate_prompt_tokens": 100}, "prompt"),
        ({"prompt": [1] * 100}, "prompt"),
        ({"prompt": [1] * 5000}, "prompt"),
        ({"prompt": [1] * 60, "max_tokens": 101}, "max_tokens"),
        ({"prompt": [1] * 60, "min_tokens": 41}, "min_tokens"),
        ({"prompt": [1] * 60, "min_tokens": 41, "max_tokens": 100}, "min_tokens"),
        ({"ignore_eos": True, "max_tokens": 2**31 - 1}, "max_tokens"),
    ],
)
async def test_a_request_that_does_not_fit_the_model_is_rejected(byte_level, fields, param):
    with pytest.raises(RequestError) as raised:
        await requests_of(byte_level, **fields)
    assert (raised.value.status, raised.value.param) == (400, param)


IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


@pytest.mark.parametrize(("kind", "fields"), [
    (CompletionBody, {"prompt_logprobs": 0}),
    (CompletionBody, {"echo": True, "logprobs": 0}),
    (ChatBody, {"messages": [{"role": "user", "content": [IMAGE_PART]}]}),
])  # fmt: skip
async def test_more_than_eight_samples_are_refused_if_each_repeats_much_work(byte_level, kind, fields):
    with pytest.raises(RequestError, match="`n` can be at most 8 with images or logprobs of the prompt"):
        await requests_of(byte_level, kind, n=9, **fields)


@pytest.mark.parametrize(("kind", "fields"), [
    (CompletionBody, {"prompt": "ab" * 10_000}),
    (ChatBody, {"messages": [{"role": "user", "content": "ab" * 5000}] * 2}),
])  # fmt: skip
async def test_a_prompt_that_is_far_too_long_is_refused_without_encoding_it(byte_level, kind, fields):
    with pytest.raises(RequestError, match=r"the prompt is too long: at least .* tokens > 99 maximum"):
        await requests_of(byte_level, kind, **fields)


async def test_an_answer_gets_the_rest_of_the_context_and_errors_state_both_numbers(byte_level):
    for limit in (40, 41, 100):
        assert (await requests_of(byte_level, prompt=[1] * 60, max_tokens=limit))[0].max_tokens == 40
    # Clients such as litellm recognize the error by the beginning of its text.
    for fields in ({"max_tokens": 101}, {"min_tokens": 41}):
        text = rf"This model's maximum context length is 100 .* 60 in the prompt and {max(fields.values())}"
        with pytest.raises(RequestError, match=text):
            await requests_of(byte_level, prompt=[1] * 60, **fields)
    with pytest.raises(RequestError, match="This model's maximum context length is 100 tokens"):
        await requests_of(byte_level, prompt=[1] * 100)
    assert (await requests_of(byte_level, prompt=[1] * 99))[0].max_tokens == 1


async def test_defaults_are_vllms(byte_level):
    completion = (await requests_of(byte_level))[0]
    assert (completion.max_tokens, completion.stop_tokens) == (COMPLETION_TOKENS, frozenset({2}))
    assert (completion.sampling.temperature, completion.sampling.top_k, completion.n) == (1.0, 0, 1)
    chat = (await requests_of(byte_level, ChatBody))[0]
    assert chat.max_tokens == 100 - len(chat.prompt)
    assert (await requests_of(byte_level, ChatBody, max_completion_tokens=7, max_tokens=9))[0].max_tokens == 7


@pytest.mark.parametrize("temperature", [0, -0.0, 1e-300, 1e-6])
async def test_the_smallest_temperatures_are_greedy(byte_level, temperature):
    assert (await requests_of(byte_level, temperature=temperature))[0].sampling.temperature == 0.0


async def test_parameters_reach_the_generation(byte_level):
    fields = {"n": 3, "seed": 2**64 - 1, "top_k": -1, "logit_bias": {"7": -100, "8": 2}, "ignore_eos": True}
    fields |= {"stop_token_ids": [9], "logprobs": 0, "echo": True, "priority": -3, "cache_salt": "🧂/../\0"}
    first, second = await requests_of(byte_level, prompt=["a", [5, 6]], **fields)
    assert (first.id, second.id, second.prompt, second.n) == ("id-0", "id-1", [5, 6], 3)
    assert first.sampling.logit_bias == {7: -100.0, 8: 2.0}
    assert (first.sampling.seed, first.sampling.top_k, first.sampling.logprobs) == (2**64 - 1, 0, 0)
    assert first.sampling.prompt_logprobs == 0
    assert (first.stop_tokens, first.priority, len(first.salt)) == (frozenset({9}), -3, 32)
    other = await requests_of(byte_level, cache_salt="b")
    assert first.salt == second.salt != other[0].salt
    assert (await requests_of(byte_level))[0].salt == b""


async def test_a_prompt_is_cut_to_its_last_tokens(byte_level):
    rows = list(range(90)), list(range(10, 140))
    first, second = await requests_of(byte_level, prompt=rows, truncate_prompt_tokens=5)
    assert (first.prompt, second.prompt) == ([85, 86, 87, 88, 89], [135, 136, 137, 138, 139])
    [fits] = await requests_of(byte_level, prompt=rows[1], truncate_prompt_tokens=-1, max_tokens=30)
    assert (fits.prompt, fits.max_tokens) == (rows[1][-70:], 30)
    long = "ab " * 500
    [text] = await requests_of(byte_level, prompt=long, truncate_prompt_tokens=9)
    assert text.prompt == byte_level.encode(long)[-9:]
    chat = (await requests_of(byte_level, ChatBody, truncate_prompt_tokens=4))[0]
    assert chat.prompt == (await requests_of(byte_level, ChatBody))[0].prompt[-4:]


async def test_bad_words_are_spelled_at_the_start_and_after_a_space(byte_level):
    sampling = (await requests_of(byte_level, bad_words=["ab", " b", "a b"], allowed_token_ids=[7, 3]))[0].sampling
    assert unpack_ids(sampling.allowed_tokens) == [7, 3]
    spelled = [byte_level.decode(unpack_ids(word), skip_special_tokens=False) for word in sampling.bad_words]
    assert [text.lstrip() for text in spelled] == sorted(
        (text.lstrip() for text in spelled), key=["ab", "b", "a b"].index
    )
    assert {"ab", "b", "a b"} <= set(spelled)
    assert all(unpack_ids(word) for word in sampling.bad_words)


async def test_without_a_seed_every_request_draws_its_own(byte_level):
    seeds = {(await requests_of(byte_level, seed=seed))[0].sampling.seed for seed in (None, None, -1, -1)}
    assert len(seeds) == 4
    assert [(await requests_of(byte_level, seed=seed))[0].sampling.seed for seed in (-2, 5)] == [2**64 - 2, 5]


def thinking_tokenizer(*markers: str, **parsers: str) -> Tokenizer:
    library = byte_level_tokenizer()
    library.add_tokens(list(markers))
    return Tokenizer(library, {}, ChatTemplate(CHATML, {}, []), find_syntax(None, **parsers))


async def thinking_requests(tokenizer, kind=CompletionBody, **fields):
    body = parse_body(kind, body_of(kind, **fields), ["m"])
    return await build_requests(body, replace(MODEL, vocab_size=340), tokenizer, "id")


@pytest.mark.parametrize(
    ("prompt", "begin"),
    [
        ("ab", -1),
        ("ab<think>", 3),
        ("<think>ab", 1),
        ("<think>a</think>b", -1),
        ("<think>a</think>b<think>c", 5),
        ("<think>\n\n</think>\n\n", None),  # the answer has no reasoning
    ],
)
async def test_a_budget_for_reasoning_counts_from_its_begin(prompt, begin):
    tokenizer = thinking_tokenizer("<think>", "</think>", reasoning_parser="qwen3")
    start, end = tokenizer.encode("<think></think>")
    first, second = await thinking_requests(tokenizer, prompt=["x", prompt], thinking_token_budget=9)
    assert first.sampling.thinking == ThinkingBudget(9, start, pack_ids([end]), -1)
    assert second.sampling.thinking == (None if begin is None else replace(first.sampling.thinking, begin=begin))


@pytest.mark.parametrize("budget", [-1, 0, 7, None])
@pytest.mark.parametrize(("parser", "ends"), [("deepseek_r1", 1), ("kimi_k2", 3)])
async def test_a_budget_for_reasoning_may_begin_with_the_answer(parser, ends, budget):
    markers = ["<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>"]
    tokenizer = thinking_tokenizer(*markers, reasoning_parser=parser, tool_parser="kimi_k2" if ends == 3 else "none")
    start, *others = [tokenizer.token_id(name) for name in markers]
    [request] = await thinking_requests(tokenizer, ChatBody, thinking_token_budget=budget)
    begin = len(request.prompt) if parser == "deepseek_r1" else -1
    expected = ThinkingBudget(budget or 0, start, pack_ids(others[:ends]), begin)
    assert request.sampling.thinking == (None if budget in {None, -1} else expected)


@pytest.mark.parametrize(
    ("markers", "parser"), [(["<think>"], "qwen3"), (["<think>", "</think>"], "none"), (["<|end|>"], "openai_gptoss")]
)
async def test_a_budget_for_reasoning_requires_markers_that_are_tokens(markers, parser):
    with pytest.raises(RequestError) as raised:
        await thinking_requests(thinking_tokenizer(*markers, reasoning_parser=parser), thinking_token_budget=5)
    assert (raised.value.param, raised.value.code) == ("thinking_token_budget", "unsupported_parameter")
