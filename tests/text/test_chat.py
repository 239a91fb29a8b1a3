from __future__ import annotations

import copy
from datetime import datetime
from functools import cache
from typing import Any

import pytest
from helpers.tokenizers_by_hand import Source, byte_level, smollm2_path
from transformers import PreTrainedTokenizerFast

from octavo.errors import RequestError
from octavo.text.chat import render_chat
from octavo.text.recipe import TokenizerRecipe
from octavo.text.template import compile_template
from octavo.text.tokenizer import Tokenizer, load_tokenizer

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

CHATML = """\
{% for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

QWEN3_STYLE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.last_query_index = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {%- if tool_call.arguments is string %}
                {{- tool_call.arguments }}
            {%- else %}
                {{- tool_call.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA3_STYLE = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- (message.tool_calls[0].function | tojson(indent=4)) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL_STYLE = """\
{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'system' %}
{{ raise_exception('Only user and assistant roles are supported!') }}
{% elif (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
    {% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% else %}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{% endif %}
{% endfor %}
"""

PARTS = """\
{% for message in messages %}<{{ message.role }}>
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}[{{ part.type }}:{{ part.text }}]{% endfor %}{% endif %}{% endfor %}
"""

RAG = (
    "{% for d in documents %}{{ d.title }}: {{ d['text'] }}\n{% endfor %}"
    "{{ messages[-1].content }}{{ documents is none }}"
)

TEMPLATES = {
    "chatml": CHATML,
    "qwen3": QWEN3_STYLE,
    "llama3": LLAMA3_STYLE,
    "mistral": MISTRAL_STYLE,
    "parts": PARTS,
}

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says <what> it's like & where; für Köln",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "  Be brief. "}
TOOL_TALK = [
    user("Weather in Köln?"),
    assistant(None, tool_calls=[CALL]),
    {"role": "tool", "content": "12° <rain>"},
]


def tokenizer_with(*, default: str | None = None, **templates: str) -> Tokenizer:
    if default is not None:
        templates["default"] = default
    return Tokenizer(
        TokenizerRecipe(byte_level({}), "the model", special_tokens=SPECIALS, chat_templates=templates)
    )


@cache
def in_transformers() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level({}), **SPECIALS)


def both(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """Our rendering, after checking that it is Transformers'."""
    options.setdefault("add_generation_prompt", True)
    expected = in_transformers().apply_chat_template(
        copy.deepcopy(messages), chat_template=template, tokenize=False, **options
    )
    ours = render_chat(tokenizer_with(default=template), messages, **options)
    assert ours == expected
    return ours


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize(
    "messages",
    [
        [user("Say hi")],
        [user(" <b>\"hi\"</b> & 'you' {{ 1 + 1 }}\n"), assistant("Grüß dich \n"), user("日本語?")],
        [user("")],
    ],
    ids=["one", "three", "empty"],
)
def test_rendered_as_transformers_renders_it(
    name: str, messages: list[dict[str, Any]], generation_prompt: bool
) -> None:
    both(TEMPLATES[name], messages, add_generation_prompt=generation_prompt)


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3", "parts"])
def test_a_system_message_as_transformers_renders_it(name: str) -> None:
    assert "Be brief." in both(TEMPLATES[name], [SYSTEM, user("Hi")])


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_tool_calls_as_transformers_renders_them(name: str) -> None:
    assert "Köln" in both(TEMPLATES[name], TOOL_TALK)


def test_tools_are_written_as_plain_json() -> None:
    text = both(QWEN3_STYLE, [SYSTEM, user("Hi")], tools=[WEATHER])
    assert '"description": "Says <what> it\'s like & where; für Köln"' in text


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ({"enable_thinking": True}, "<|im_start|>assistant\n"),
        ({}, "<|im_start|>assistant\n"),
    ],
)
def test_thinking_can_be_turned_off(options: dict[str, Any], end: str) -> None:
    # vllm#19839
    text = both(QWEN3_STYLE, [user("Say hi")], **options)
    assert text == "<|im_start|>user\nSay hi<|im_end|>\n" + end


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_goes_by_several_names(field: str) -> None:
    messages = [user("2+2?"), assistant("4", **{field: "easy"})]
    assert "<think>\neasy\n</think>\n\n4" in both(QWEN3_STYLE, messages)
    assert both("{{ messages[1].thinking }} {{ messages[1].content }}", messages) == "easy 4"


def test_template_variables() -> None:
    assert "Today Date: 1 May 2030" in both(LLAMA3_STYLE, [user("Hi")], date_string="1 May 2030")
    year = str(datetime.now().year)
    assert both("{{ strftime_now('%Y') }}{{ messages[0].content }}", [user("!")]) == year + "!"
    assert (
        both("{{ bos_token }}{{ pad_token }}{{ sep_token }}{{ messages|length }}", [user("!")]) == "<s><pad>1"
    )
    assert both("{{ eos_token }}{{ messages|length }}", [user("!")], eos_token="<e>") == "<e>1"
    assert both("{{ dict(a=1, b=messages|length) | tojson }}", [user("!")]) == '{"a": 1, "b": 1}'
    assert (
        both("{% set n = namespace(self=messages|length) %}{% set n.b = 2 %}{{ n.self + n.b }}", [user("!")])
        == "3"
    )


def test_documents() -> None:
    documents = [{"title": "A", "text": "x"}, {"title": "B", "text": "y"}]
    assert both(RAG, [user("?")], documents=documents) == "A: x\nB: y\n?False"


@pytest.mark.parametrize(
    ("value", "call", "expected"),
    [
        ({"b": "ü<", "a": [1.5, None, True]}, "tojson", '{"b": "ü<", "a": [1.5, null, true]}'),
        ({"b": 1, "a": 2}, "tojson(sort_keys=true)", '{"a": 2, "b": 1}'),
        (["ü"], "tojson(ensure_ascii=true)", '["\\u00fc"]'),
        ([1, 2], "tojson(indent=2)", "[\n  1,\n  2\n]"),
        ([1, 2], "tojson(separators=(',', ':'))", "[1,2]"),
    ],
)
def test_tojson(value: Any, call: str, expected: str) -> None:
    assert both("{{ value | " + call + " }}{{ messages[0].content }}", [user("")], value=value) == expected


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3", "parts"])
@pytest.mark.parametrize("text", ["The answer is", "The answer is ", " \n"])
def test_the_last_message_can_be_continued(name: str, text: str) -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    ours = both(TEMPLATES[name], [user("Q"), assistant(text)], **options)
    assert ours.endswith(text.rstrip() if name == "llama3" else text)


def test_parts_that_the_template_reads_itself() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert both(PARTS, [user(parts)]) == "<user>[text:one][text:two]"
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert both(PARTS, [assistant(parts)], **options) == "<assistant>[text:one][text:two"


def test_parts_are_joined_where_it_does_not() -> None:
    # Qwen3's template takes content that is no string for an empty one.
    parts = [{"type": "text", "text": "one"}, {"text": "two"}]
    tokenizer = tokenizer_with(default=QWEN3_STYLE)
    assert render_chat(tokenizer, [user(parts)], add_generation_prompt=False) == (
        "<|im_start|>user\none\ntwo<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}", True),
        (
            "{% for m in messages %}{% set c = m.content %}{% for p in c %}{{ p }}{% endfor %}{% endfor %}",
            True,
        ),
        ("{% for m in messages %}{% for t in m.tool_calls %}{{ t }}{% endfor %}{% endfor %}", False),
    ],
)
def test_whether_a_template_reads_parts(source: str, expected: bool) -> None:
    assert compile_template(source).reads_parts is expected


def test_smollm2_from_its_file() -> None:
    tokenizer = load_tokenizer(Source("gguf", smollm2_path()))
    assert render_chat(tokenizer, [user("Hi")]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render_chat(tokenizer, [SYSTEM, user("Hi")], add_generation_prompt=False) == (
        "<|im_start|>system\n  Be brief. <|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


def test_named_templates() -> None:
    tokenizer = tokenizer_with(default="plain", tool_use="with {{ tools[0].function.name }}")
    assert render_chat(tokenizer, [user("Hi")]) == "plain"
    assert render_chat(tokenizer, [user("Hi")], tools=[WEATHER]) == "with weather"
    assert render_chat(tokenizer, [user("Hi")], chat_template="tool_use", tools=[WEATHER]) == "with weather"
    assert render_chat(tokenizer, [user("Hi")], chat_template="own {{ messages[0].content }}") == "own Hi"


def test_the_callers_messages_are_left_alone() -> None:
    messages = [user([{"text": "a"}]), assistant(None, tool_calls=[CALL]), assistant("b", reasoning="c")]
    before = copy.deepcopy(messages)
    options = {"add_generation_prompt": False, "continue_final_message": True, "tools": [WEATHER]}
    render_chat(tokenizer_with(default=QWEN3_STYLE), messages, **options)
    assert messages == before


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: the list is empty"),  # vllm#7283
        ("Hi", "messages: expected a list of dicts, got str"),
        ({"role": "user"}, "messages: expected a list of dicts, got dict"),
        (None, "messages: expected a list of dicts, got NoneType"),
        ([user("a"), "b"], r"messages\[1\]: expected a dict with role and content, got str"),
        ([{"content": "a"}], r"messages\[0\].role: expected a string such as 'user', got None"),
        ([{"role": 1, "content": "a"}], r"messages\[0\].role: expected a string such as 'user', got 1"),
        ([{"role": "user"}], r"messages\[0\].content: expected a string or a list of text parts, got None"),
        ([assistant(None)], r"messages\[0\].content: .*only an assistant message with tool_calls"),
        ([user(5)], r"messages\[0\].content: expected a string or a list of text parts, got int"),
        ([user(["a"])], r"messages\[0\].content\[0\]: expected {'type': 'text', 'text': ...}, got str"),
        (
            [user([{"type": "image"}])],
            r"messages\[0\].content\[0\].type: only 'text' parts are supported, got 'image'",
        ),
        ([user([{"type": "text"}])], r"messages\[0\].content\[0\].text: expected a string, got NoneType"),
        (
            [user("a") | {"when": datetime(2030, 1, 1)}],
            r"messages\[0\].when: expected JSON data .*, got datetime",
        ),
    ],
)
def test_bad_messages_are_named(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render_chat(tokenizer_with(default=CHATML), messages)


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (CHATML, {"tools": [WEATHER]}, "tools: this model's chat template does not read it"),
        (CHATML, {"documents": [{}]}, "documents: this model's chat template does not read it"),
        (
            QWEN3_STYLE,
            {"enable_thinkin": False},
            r"enable_thinkin: .* \(did you mean 'enable_thinking'\?\); it reads",
        ),
        (QWEN3_STYLE, {"tools": "weather"}, "tools: expected a list of dicts, got str"),
        (
            QWEN3_STYLE,
            {"tools": [len]},
            r"tools\[0\]: expected a dict \(a JSON schema\), got builtin_function",
        ),
        (QWEN3_STYLE, {"continue_final_message": True}, "continue_final_message: cannot be combined with"),
        (
            "fixed",
            {"continue_final_message": True, "add_generation_prompt": False},
            "drops or rewrites the final",
        ),
        (
            "{{ messages[0].content | upper }}",
            {"continue_final_message": True, "add_generation_prompt": False},
            "drops or rewrites the final",
        ),
        ("{% for %}", {}, "chat_template: not a valid Jinja template"),
        ("{{ messages[5].content.x }}", {}, "messages: the chat template refused them: .*has no element 5"),
        (
            "{{ messages[0].content + 1 }}",
            {},
            r"the chat template failed on them \(TypeError: can only concatenate",
        ),
        ("{{ messages.append(1) }}", {}, "the chat template refused them: .*unsafe"),
        ("{{ ''.__class__.__mro__ }}", {}, "the chat template refused them: .*unsafe"),
        ("{{ dict.mro() }}", {}, "the chat template refused them: .*has no attribute 'mro'"),
        (
            "{% set ns = namespace(_a=1) %}",
            {},
            "the chat template refused them: a namespace cannot hold '_a'",
        ),
        ("{% set ns = namespace() %}{% set ns._a = 1 %}", {}, "a namespace cannot hold '_a'"),
    ],
)
def test_bad_options_and_templates_are_named(template: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render_chat(tokenizer_with(default=template), [user("Hi")], **options)


def test_an_empty_list_of_tools_is_no_tools() -> None:
    assert render_chat(tokenizer_with(default="{{ messages|length }}"), [user("Hi")], tools=[]) == "1"


def test_a_refusal_carries_the_templates_own_words() -> None:
    tokenizer = tokenizer_with(default=MISTRAL_STYLE)
    with pytest.raises(RequestError, match="refused them: Only user and assistant roles are supported!"):
        render_chat(tokenizer, [SYSTEM, user("Hi")])
    with pytest.raises(RequestError, match="refused them: Conversation roles must alternate"):
        render_chat(tokenizer, [user("Hi"), user("Hi")])


def test_no_template_and_no_default() -> None:
    with pytest.raises(
        RequestError, match=r"the model has no chat template.*pass chat_template=.*plain prompt"
    ):
        render_chat(tokenizer_with(), [user("Hi")])
    with pytest.raises(RequestError, match="several and no default; name one of rag, tool_use"):
        render_chat(tokenizer_with(tool_use="a", rag="b"), [user("Hi")])
