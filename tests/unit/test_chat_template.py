"""Chat templates: renderings of the known styles, shapes of messages, refusals, and bounds on hostile ones."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

import pytest

from millstream.errors import InvalidRequestError, ModelError
from millstream.tokenizer import bounded
from millstream.tokenizer.chat_template import ChatTemplate

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

# Templates in the styles of well-known models.
CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
LLAMA3 = """\
{% set loop_messages = messages %}
{% for message in loop_messages %}
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' %}
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}
{{- content -}}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""  # noqa: E501
MISTRAL = """\
{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}
"""
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function.name + ':' }}{{ call.function.arguments | tojson }}{{ '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
PARTS = """\
{%- for message in messages %}[{{ message.role }}]
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}<{{ part.type }}>{{ part.text }}{% endfor %}{% endif %}
{%- endfor %}
"""
ONLY_PARTS = "{% for m in messages %}{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }};{% endfor %}{% endfor %}"  # noqa: E501


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate(source, special_tokens=TOKENS).render(messages, **options)


@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        (
            CHATML,
            [user("Hi"), assistant("Yo"), user("Bye")],
            "<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo"
            "<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            CHATML,
            [{"role": "system", "content": "S"}, user("Hi")],
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            LLAMA3,
            [user("  Hi\n"), assistant("Yo")],
            "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
            "Yo<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (MISTRAL, [user("Hi"), assistant("Yo"), user("Bye")], "<s>[INST] Hi [/INST]Yo</s>[INST] Bye [/INST]"),
        (QWEN, [user("Hi")], "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_known_styles(source: str, messages: list[dict[str, Any]], expected: str) -> None:
    assert render(source, messages) == expected


def test_without_generation_prompt() -> None:
    assert render(QWEN, [user("Hi")], add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


# -- content ----------------------------------------------------------------------------------------------------


def text_parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_parts_are_joined_for_templates_that_want_text() -> None:
    assert render(MISTRAL, [user(text_parts("a", "b"))]) == "<s>[INST] a\nb [/INST]"


def test_parts_are_passed_to_templates_that_walk_them() -> None:
    assert render(PARTS, [user(text_parts("a", "b"))]) == "[user]<text>a<text>b"
    assert render(PARTS, [user("a")]) == "[user]a"


def test_text_becomes_a_part_where_the_template_knows_only_parts() -> None:
    assert render(ONLY_PARTS, [user("ab"), user(text_parts("c", "d"))]) == "ab;c;d;"


def test_parts_in_a_macro_or_a_variable_are_seen() -> None:
    macro = "{% macro show(content) %}{% for p in content %}({{ p.text }}){% endfor %}{% endmacro %}"
    assert render(macro + "{{ show(messages[0].content) }}", [user("ab")]) == "(ab)"
    variable = "{% set c = messages[0]['content'] %}{% for p in c %}({{ p.text }}){% endfor %}"
    assert render(variable, [user("ab")]) == "(ab)"


def test_null_is_as_absent_and_null_content_is_empty() -> None:
    source = "{% for m in messages %}{{ m.role }}:{{ m.content }}:{{ 'name' in m }};{% endfor %}"
    assert render(source, [assistant(None, name=None), {"role": "user"}]) == "assistant::False;user::False;"


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([], "messages", "messages is empty"),
        (["hi"], "messages[0]", "no object"),
        ([{"content": "x"}], "messages[0].role", "role is None: it must be text"),
        ([user("a"), user(5)], "messages[1].content", "must be text or a list of text parts, not int"),
        ([user([{"type": "image_url", "image_url": {}}])], "messages[0].content[0]", "'image_url'.*only.*'text'"),
        ([user([{"type": "text"}])], "messages[0].content[0]", "only parts of the type 'text' with a text"),
        ([user(["a"])], "messages[0].content[0]", "only parts"),
        ([assistant("", tool_calls="x")], "messages[0].tool_calls", "list of objects"),
        (
            [assistant("", tool_calls=[{"function": {"name": "f", "arguments": "{"}}])],
            "messages[0].tool_calls[0].function.arguments",
            "not JSON",
        ),
    ],
)
def test_bad_messages_are_named(messages: list[Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as error:
        render(CHATML, messages)
    assert error.value.param == param


def test_tools_and_tool_calls() -> None:
    tool = {"type": "function", "function": {"name": "größe", "description": "<b> & 'x'"}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "ü"]}'}}
    text = render(QWEN, [user("Hi"), assistant(None, tool_calls=[call])], tools=[tool], add_generation_prompt=False)
    assert text == (
        "<|im_start|>system\n# Tools\n"
        '{"type": "function", "function": {"name": "größe", "description": "<b> & \'x\'"}}\n<|im_end|>\n'
        "<|im_start|>user\nHi<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>f:{"a": [1, "ü"]}</tool_call><|im_end|>\n'
    )
    with pytest.raises(InvalidRequestError, match="no place for tools") as error:
        render(CHATML, [user("Hi")], tools=[tool])
    assert error.value.param == "tools"


def test_template_variables() -> None:
    text = render(QWEN, [user("Hi")], template_kwargs={"enable_thinking": False})
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    for name, words in (("messages", "can't be set"), ("bos_token", "can't be set"), ("thinking", "does not read")):
        with pytest.raises(InvalidRequestError, match=words) as error:
            render(QWEN, [user("Hi")], template_kwargs={name: 1})
        assert error.value.param == "chat_template_kwargs"


def test_functions_and_tags_that_templates_use() -> None:
    assert render("{{ strftime_now('%Y') }}", [user("")]) in {str(datetime.now().year + i) for i in (0, -1)}
    assert render("{% generation %}a{{ eos_token }}{% endgeneration %}b", [user("")]) == "a</s>b"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", [user("")]) == "01"
    value = {"b": "<é>", "a": 1}
    for options in ("", "indent=2", "sort_keys=true", "ensure_ascii=true", "separators=(',', ':')"):
        text = render("{{ messages[0].x | tojson(" + options + ") }}", [user("") | {"x": value}])
        python = eval(f"dict({options})", {"true": True})
        assert text == json.dumps(value, **({"ensure_ascii": False} | python))
    assert render("{{ undefined_name }}{{ documents is none }}", [user("")]) == "True"
    assert render("{{ 'a%02d' % 7 }} {{ '{}-{}'.format(1, 2) }} {{ '%s' | format('x') }}", [user("")]) == "a07 1-2 x"
    assert render(
        "{{ [1, 2] | join(', ') }} {{ 'abab' | replace('a', 'xy') }} {{ 'a'.join(['b', 'c']) }}", [user("")]
    ) == ("1, 2 xybxyb bac")


def test_the_templates_own_refusal_is_passed_on() -> None:
    with pytest.raises(InvalidRequestError) as error:
        render(MISTRAL, [user("a"), user("b")])
    assert error.value.message == "Conversation roles must alternate user/assistant/user/assistant/..."
    assert error.value.param == "messages"


# -- continuing a message ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [CHATML, LLAMA3, MISTRAL, QWEN, PARTS, ONLY_PARTS])
@pytest.mark.parametrize("content", ["Yo", "Hi", "ends in space ", text_parts("one", "two")])
def test_continuation_ends_with_the_message(source: str, content: Any) -> None:
    messages = [user("Hi"), assistant(content)]
    whole = render(source, messages, add_generation_prompt=False)
    text = render(source, messages, add_generation_prompt=False, continue_final_message=True)
    last = content if isinstance(content, str) else "two"
    assert text.endswith(last)
    assert whole.startswith(text.rstrip())
    assert messages[1]["content"] == content


def test_continuation_is_refused_where_it_makes_no_sense() -> None:
    options = {"continue_final_message": True, "add_generation_prompt": False}
    for messages, source, more, words in (
        ([assistant("a")], CHATML, {"add_generation_prompt": True}, "can't both be true"),
        ([user("a")], CHATML, {}, "final message of the assistant, not of 'user'"),
        ([assistant("a")], "nothing", {}, "does not write out the final message"),
    ):
        with pytest.raises(InvalidRequestError, match=words) as error:
            render(source, messages, **(options | more))
        assert error.value.param == "continue_final_message"


# -- templates that are wrong or hostile ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", r"not valid Jinja: .*\(line 1\)"),
        ("a\nb\n{{ x | nofilter }}", r"No filter named 'nofilter'.*\(line 3\)"),
        ("{{ " + "(" * 600 + "1" + ")" * 600 + " }}", "can't be compiled"),
        ("x" * (2**20 + 1), "1048577 letters: at most 1048576"),
    ],
)
def test_bad_source(source: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        ChatTemplate(source)


NAMESPACE = "{% set ns = namespace(s='x' * 9999, l=[1, 2, 3]) %}{% for i in range(60) %}"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for a in range(999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "loops more than"),
        ("{% for a in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}", "loops more than|recursion"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
            "loops more than",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% block a %}{{ self.a() }}{% endblock %}", "recursion"),
        ("{{ range(1000000) }}", "Range too big"),
        (NAMESPACE + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "text or list of more than"),
        (NAMESPACE + "{% set ns.s = ns.s + ns.s %}{% endfor %}", "text or list of more than"),
        (NAMESPACE + "{% set ns.l = ns.l + ns.l %}{% endfor %}", "text or list of more than"),
        (NAMESPACE + "{% set ns.s = ns.s | replace('x', 'xxxxxx') %}{% endfor %}", "text or list of more than"),
        (NAMESPACE + "{% set ns.s = ns.s.replace('x', 'xxxxxx') %}{% endfor %}", "text or list of more than"),
        (NAMESPACE + "{% set ns.s = [ns.s, ns.s] | join(ns.s) %}{% endfor %}", "text or list of more than"),
        (NAMESPACE + "{% set ns.s = ns.s.join([ns.s, ns.s, ns.s]) %}{% endfor %}", "text or list of more than"),
        ("{{ 'x' * 100000000 }}", "text or list of more than"),
        ("{{ 100000000 * [0] }}", "text or list of more than"),
        ("{{ 9 ** (9 ** 9) }}", "more than 4096 bits"),
        (NAMESPACE + "{% set ns.n = (ns.n or 3) * (ns.n or 3) %}{% endfor %}", "more than 4096 bits"),
        ("{{ '%99999999d' % 1 }}", "formats with a width"),
        ("{{ '%*d' % (99999999, 1) }}", "formats with a width"),
        ("{{ '%99999999d' | format(1) }}", "formats with a width"),
        ("{{ '{:99999999}'.format(1) }}", "formats with a width"),
        ("{{ '{:{}}'.format(1, 99999999) }}", "formats with a width"),
        ("{{ 'x'.ljust(99999999) }}", "pads or indents by 99999999"),
        ("{{ 'x' | indent(99999999) }}", "pads or indents by 99999999"),
        ("{{ [1] | tojson(indent=99999999) }}", "pads or indents by 99999999"),
        ("{% for i in range(99) %}{{ 'x' * 1000000 }}{% endfor %}", "output has more than"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update(role='x') }}", "unsafe"),
        ("{% include 'other' %}", "loader"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content.nothing.at.all }}", "UndefinedError"),
    ],
)
def test_hostile_template_ends_as_a_refusal(source: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.compile(words, re.IGNORECASE)) as error:
        render(source, [user("Hi")])
    assert error.value.param == "messages"


def test_counting_can_not_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "MAX_TURNS", 100)
    template = ChatTemplate(
        "{% set take_turn = 1 %}{% set budget = 1 %}{% set environment = 1 %}{% set context = 1 %}"
        "{% for m in messages %}{{ m.content }}{% else %}none{% endfor %}"
    )
    assert template.render([user("a")] * 100) == "a" * 100  # each rendering has the whole number
    assert template.render([user("a")] * 100) == "a" * 100
    with pytest.raises(InvalidRequestError, match="loops more than 100 times"):
        template.render([user("a")] * 101)
