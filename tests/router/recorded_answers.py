"""Answers in the syntax of each family of models, and the parts of each answer."""

import json
from dataclasses import dataclass, field
from typing import Any

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "where": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        },
    },
    "ping": {"type": "object", "properties": {}},
}


@dataclass(frozen=True)
class Recorded:
    """An answer and its parts. `parser` and `reasoning` name its syntax. Each call in `calls` is (name, arguments)."""

    parser: str
    text: str
    content: str = ""
    thoughts: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    reasoning: str = "none"
    prompt_end: str = ""

    def __str__(self) -> str:
        return f"{self.parser} {self.text[:30]!r}"


PARIS = ("get_weather", {"city": "Paris", "days": 2})
ROME = ("get_weather", {"city": 'Rome "}</tool_call>', "tags": ["a{", "b]"]})
PING = ("ping", {})
ROME_JSON = json.dumps(ROME[1])
THOUGHT = "The user wants\n\nthe weather."
SAID = "Let me look\nthat up."

ANSWERS = [
    # Qwen 2.5 and 3, Hermes, Granite 4
    Recorded("hermes", 'x\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>', "x", calls=[PARIS]),
    Recorded(
        "hermes",
        f'<think>\n{THOUGHT}\n</think>\n\n{SAID}\n<tool_call>\n{{"name": "get_weather", "arguments": {ROME_JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
        SAID, THOUGHT, [ROME, PING], "qwen3",
    ),
    Recorded("hermes", f"{THOUGHT}\n</think>\n\n{SAID}", SAID, THOUGHT, reasoning="qwen3", prompt_end="<|im_start|>assistant\n<think>\n"),
    Recorded("hermes", f"{THOUGHT}\n</think>\n\n{SAID}", SAID, THOUGHT, reasoning="deepseek_r1", prompt_end="<｜Assistant｜>"),
    Recorded("hermes", f"<think>{THOUGHT}</think>{SAID}", SAID, THOUGHT, reasoning="deepseek_r1"),
    Recorded("hermes", SAID, SAID, reasoning="deepseek_r1", prompt_end="<think>\n\n</think>\n\n"),
    Recorded("hermes", f"{THOUGHT} <tool_call>", "", f"{THOUGHT} <tool_call>", reasoning="qwen3", prompt_end="<think>"),
    Recorded("hermes", "Use <think> and </think>.\n", "Use <think> and </think>.\n", reasoning="qwen3"),
    Recorded("hermes", '<tool_call>{"arguments": {"city": "Paris", "days": 2}, "name": "get_weather"}</tool_call>', calls=[PARIS]),
    Recorded("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 2}"}</tool_call>', calls=[PARIS]),
    Recorded("hermes", '<tool_call>{"name": "ping"}</tool_call><tool_call>{"name": "ping", "arguments": null}</tool_call>', calls=[PING, PING]),
    # If an answer has a syntax error, the wrong part counts as content.
    Recorded("hermes", "The <tool_call> tag, or <tool", "The <tool_call> tag, or <tool"),
    Recorded("hermes", '<tool_call>\n{"city": "Paris"}\n</tool_call>', '<tool_call>\n{"city": "Paris"}\n</tool_call>'),
    Recorded("hermes", ' <tool_call>{"name": "get_wea', ' <tool_call>{"name": "get_wea'),
    Recorded("hermes", '<tool_call>{"name": 5, "arguments": {}}', '<tool_call>{"name": 5, "arguments": {}}'),
    Recorded("hermes", "  a  ", "  a  "),
    Recorded("hermes", "", ""),
    # Llama 3.1 to 3.3
    Recorded("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}', calls=[PARIS]),
    Recorded("llama3_json", ' {"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}; {"name": "ping", "parameters": {}}', calls=[PARIS, PING]),
    Recorded("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}, {"name": "ping", "parameters": {}}', calls=[PARIS, PING]),
    Recorded("llama3_json", '[{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}},\n {"name": "ping", "parameters": {}}]', calls=[PARIS, PING]),
    Recorded("llama3_json", '[{"name": "Ann", "parameters": {}}]', '[{"name": "Ann", "parameters": {}}]'),
    Recorded("llama3_json", "[1, 2] is a list", "[1, 2] is a list"),
    Recorded("llama3_json", "[ ]", "[ ]"),
    Recorded("llama3_json", '<|python_tag|>{"type": "function", "name": "ping", "parameters": {}}', calls=[PING]),
    Recorded("llama3_json", '{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}'),
    Recorded("llama3_json", '{"answer": [1, 2]} is JSON', '{"answer": [1, 2]} is JSON'),
    Recorded("llama3_json", "A brace: {}", "A brace: {}"),
    # Mistral, before and after Small 3.2
    Recorded("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ROME_JSON}}}, {{"name": "ping", "arguments": {{}}}}]', calls=[ROME, PING]),
    Recorded("mistral_args", f"{SAID}[TOOL_CALLS]get_weather[ARGS]{ROME_JSON}[TOOL_CALLS]ping[CALL_ID]a1B2c3D4e[ARGS]{{}}", SAID, calls=[ROME, PING]),
    Recorded("mistral", f"[THINK]{THOUGHT}[/THINK]{SAID}[TOOL_CALLS]ping{{}}", SAID, THOUGHT, [PING], "mistral"),
    Recorded("mistral", '[TOOL_CALLS] [{"name": "get_w', '[TOOL_CALLS] [{"name": "get_w'),
    # DeepSeek V3 and R1
    Recorded(
        "deepseek_v3",
        f"{SAID}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{ROME_JSON}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        SAID, calls=[ROME, PING],
    ),
    Recorded(
        "deepseek_v31",
        f"{THOUGHT}</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ROME_JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "", THOUGHT, [ROME, PING], "deepseek_v3", "<｜Assistant｜><think>",
    ),
    # GLM 4.5 to 4.7
    Recorded(
        "glm45",
        f"<think>{THOUGHT}</think>\n{SAID}\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>ping\n</tool_call>",
        SAID, THOUGHT, [PARIS, PING], "glm45",
    ),
    Recorded("glm47", '<tool_call>get_weather<arg_key>metric</arg_key><arg_value>true</arg_value><arg_key>where</arg_key><arg_value>{"x": [1]}</arg_value></tool_call><tool_call>ping</tool_call>',
             calls=[("get_weather", {"metric": True, "where": {"x": [1]}}), PING]),
    # Qwen3-Coder, Qwen3.5
    Recorded(
        "qwen3_coder",
        f"{SAID}\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nPar\n is\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "<parameter=metric>\nTrue\n</parameter>\n<parameter=where>\nnull\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=ping>\n</function>\n</tool_call>",
        SAID, calls=[("get_weather", {"city": "Par\n is", "days": 2, "metric": True, "where": None}), PING],
    ),
    Recorded("qwen3_coder", "<function=get_weather>\n<parameter=city>\n5\n</parameter>\n<parameter=days>\nmany\n</parameter>\n</function>",
             calls=[("get_weather", {"city": "5", "days": "many"})]),
    Recorded("qwen3_coder", "<tool_call>\n<function=ping>\n<parameter=new>\n[1]\n</parameter>\n</function></tool_call> done", "done", calls=[("ping", {"new": [1]})]),
    Recorded("qwen3_coder", "<tool_call>\n<function=ping>\n<parameter=new>\nNaN\n</parameter>\n</function></tool_call>", calls=[("ping", {"new": "NaN"})]),
    Recorded("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=tags>\n['a\n', \"it's\"]\n</parameter>\n<parameter=where>\n{'x': True, 'y': null}\n</parameter>\n</function>\n</tool_call>",
             calls=[("get_weather", {"tags": ["a\n", "it's"], "where": {"x": True, "y": None}})]),
    Recorded("qwen3_coder", "<function=get_weather>\n<parameter=city>\n['a']\n</parameter>\n<parameter=tags>\n[open('a')]\n</parameter>\n</function>",
             calls=[("get_weather", {"city": "['a']", "tags": "[open('a')]"})]),
    Recorded("qwen3_coder", "see <function=\n and\n<tool_call> x", "see <function=\n and\n<tool_call> x"),
    # Seed-OSS
    Recorded(
        "seed_oss",
        f"<seed:think>{THOUGHT}</seed:think>{SAID}\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Par\nis</parameter>\n"
        "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=ping>\n</function>\n</seed:tool_call>",
        SAID, THOUGHT, [("get_weather", {"city": "Par\nis", "days": 2}), PING], "seed_oss",
    ),
    # MiniMax M2
    Recorded(
        "minimax_m2",
        f'{THOUGHT}\n</think>\n\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="ping">\n</invoke>\n</minimax:tool_call>',
        "", THOUGHT, [PARIS, PING], "minimax_m2", "]~b]ai\n<think>\n",
    ),
    # Kimi K2
    Recorded(
        "kimi_k2",
        f"{SAID}<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{ROME_JSON}<|tool_call_end|>"
        "<|tool_call_begin|>functions.ping:1 <|tool_call_argument_begin|> {}<|tool_call_end|><|tool_calls_section_end|>",
        SAID, calls=[ROME, PING],
    ),
    Recorded(
        "kimi_k2",
        f"<think>{THOUGHT}<|tool_calls_section_begin|><|tool_call_begin|>functions.ping:0<|tool_call_argument_begin|>{{}}<|tool_call_end|><|tool_calls_section_end|>",
        "", THOUGHT, [PING], "kimi_k2",
    ),
    # gpt-oss
    Recorded(
        "openai",
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{ROME_JSON}<|call|>",
        "", THOUGHT, [ROME], "openai_gptoss", "<|start|>assistant",
    ),
    Recorded(
        "openai",
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>commentary<|message|>{SAID}<|end|>"
        "<|start|>assistant to=functions.ping<|channel|>commentary json<|message|>{}<|call|>",
        SAID, THOUGHT, [PING], "openai_gptoss", "<|start|>assistant",
    ),
    Recorded("openai", ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris", "days": 2}', calls=[PARIS]),
    Recorded("openai", f"<|channel|>final<|message|>{SAID}", SAID, reasoning="openai_gptoss"),
    Recorded("openai", f"{SAID} without channels <|", f"{SAID} without channels <|", reasoning="openai_gptoss"),
    # Gemma 4 and FunctionGemma
    Recorded(
        "gemma4",
        f'<|channel>thought\n{THOUGHT}\n<channel|>{SAID}<|tool_call>call:get_weather{{city:<|"|>Ro"me}}:,<|"|>,days:2,tags:[<|"|>a<|"|>,<|"|>b<|"|>],'
        'where:{x:{y:null}}}<tool_call|><|tool_call>call:ping{}<tool_call|>',
        SAID, THOUGHT, [("get_weather", {"city": 'Ro"me}:,', "days": 2, "tags": ["a", "b"], "where": {"x": {"y": None}}}), PING], "gemma4",
    ),
    Recorded("functiongemma", "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:2}<end_function_call>", calls=[PARIS]),
    Recorded("functiongemma", "<start_function_call>call:get_weather{city:Paris,days:2}<end_function_call>", "<start_function_call>call:get_weather{city:Paris,days:2}<end_function_call>"),
    # Granite 3, Phi-4-mini
    Recorded("granite", f"Here is my thought process: {THOUGHT} Here is my response: {SAID} <|tool_call|>[{{\"name\": \"get_weather\", \"arguments\": {ROME_JSON}}}]", SAID, THOUGHT, [ROME], "granite"),
    Recorded("granite", '<|tool_call|>[{"name": "ping", "arguments": {}}, {"name": "ping", "arguments": {}}]', calls=[PING, PING]),
    Recorded("granite", '<tool_call>[{"name": "ping", "arguments": {}}]</tool_call>', calls=[PING]),
    Recorded("phi4_mini_json", 'functools[{"name": "ping", "arguments": {}}]', calls=[PING]),
    Recorded("phi4_mini_json", 'The module functools has [cache].', 'The module functools has [cache].'),
    # Cohere Command, Apertus, Nemotron, Jamba and Hunyuan
    Recorded(
        "cohere_command3",
        f'<|START_THINKING|>{THOUGHT}<|END_THINKING|><|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {ROME_JSON}}},\n'
        '    {"tool_call_id": "1", "tool_name": "ping", "parameters": {}}\n]<|END_ACTION|>',
        "", THOUGHT, [ROME, PING], "cohere_command3",
    ),
    Recorded("apertus", f'{SAID}<|tools_prefix|>[{{"get_weather": {ROME_JSON}}}, {{"ping": {{}}}}]<|tools_suffix|>', SAID, calls=[ROME, PING]),
    Recorded("apertus", "<|tools_prefix|>[{}]", "<|tools_prefix|>[{}]"),
    Recorded("nemotron_json", f'<TOOLCALL>[{{"name": "get_weather", "arguments": {ROME_JSON}}}, {{"name": "ping", "arguments": {{}}}}]</TOOLCALL>', calls=[ROME, PING]),
    Recorded("jamba", ' <tool_calls>[\n    {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}},\n    {"name": "ping", "arguments": {}}\n]</tool_calls>', calls=[PARIS, PING]),
    # Calls in Python syntax: Llama 3.2 and 4, OLMo 3, LFM2
    Recorded("pythonic", "[get_weather(city='Paris', days=2), ping()]", calls=[PARIS, PING]),
    Recorded("pythonic", """[get_weather(city="Rome \\"}</tool_call>", tags=['a{', "b]"])]""", calls=[ROME]),
    Recorded("pythonic", "[get_weather(city='Paris', days=2, metric=true, where={'x': null})]", calls=[("get_weather", PARIS[1] | {"metric": True, "where": {"x": None}})]),
    Recorded("pythonic", "[1] The paper (2017)", "[1] The paper (2017)"),
    Recorded("pythonic", "[get_weather(city=open('x'))]", "[get_weather(city=open('x'))]"),
    Recorded("pythonic", "[other(a=1)]", "[other(a=1)]"),
    Recorded("llama4_pythonic", "<|python_start|>[get_weather(city='Paris', days=2)]<|python_end|>", calls=[PARIS]),
    Recorded("lfm2", "<|tool_call_start|>[get_weather(city='Paris', days=2), ping()]<|tool_call_end|>" + SAID, SAID, calls=[PARIS, PING]),
    Recorded("lfm2", "<|tool_call_start|>[get_weather(city='''Par\nis''')]<|tool_call_end|>", calls=[("get_weather", {"city": "Par\nis"})]),
    Recorded("olmo3", "<function_calls>\nget_weather(city='Par\n\"is\\'\\\\n', tags=[\"\n)\n\"])\nping()\n</function_calls>", calls=[("get_weather", {"city": "Par\n\"is'\\n", "tags": ["\n)\n"]}), PING]),
    Recorded("olmo3", "<function_calls>\nget_weather(city='Paris', days=2)\nping()\n</function_calls>", calls=[PARIS, PING]),
]  # fmt: skip

# A parser, an answer that ends inside a call, and the arguments that the parser returns for this call.
CUT_OFF = [
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Pa', '{"city": "Pa'),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "a\\', '{"city": "a\\'),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nPa", '{"city": "Pa'),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<param", ""),
    ("glm45", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par</arg", '{"city": "Par</arg'),
    ("openai", '<|channel|>commentary to=functions.get_weather<|message|>{"city": "P', '{"city": "P'),
    ("mistral", '[TOOL_CALLS]get_weather{"city": "P', '{"city": "P'),
]
