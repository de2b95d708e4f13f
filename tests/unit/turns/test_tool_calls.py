"""Tool calls are read from what was sampled, and one that cannot be read stays in its place with the reason."""

from typing import Any

import pytest
from chat_templates import TOOLS, codec_of, ids_of, tokenizer_of

from gruppo.errors import InputError
from gruppo.turns.calls import hermes, llama, mistral, tagged
from gruppo.turns.chat import ChatCodec

ADD = {"name": "add", "arguments": {"x": "1"}}


def functions(calls: Any) -> list[Any]:
    return [call.get("error") or call["function"] for call in calls]


def hermes_call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


# Text of a turn, what is left of it, and each call: its function, or the begin of its error.
HERMES: dict[str, tuple[str, str, list[Any]]] = {
    "one": (hermes_call('{"name": "add", "arguments": {"x": "1"}}'), "", [ADD]),
    "none": (" 4 ", " 4 ", []),
    "text before": ('I add.\n<tool_call>{"name": "add", "arguments": {"x": "1"}}</tool_call>', "I add.", [ADD]),
    "two": (
        '<tool_call>{"name": "add", "arguments": {"x": "1"}}</tool_call>\n'
        '<tool_call>{"name": "sub", "arguments": {}}</tool_call>',
        "",
        [ADD, {"name": "sub", "arguments": {}}],
    ),
    "a string with the closing tag": (
        hermes_call('{"name": "add", "arguments": {"x": "</tool_call> {\\"<tool_call>"}}'),
        "",
        [{"name": "add", "arguments": {"x": '</tool_call> {"<tool_call>'}}],
    ),
    "nested braces": (
        hermes_call('{"name": "add", "arguments": {"x": {"y": [{"z": "}"}]}}}'),
        "",
        [{"name": "add", "arguments": {"x": {"y": [{"z": "}"}]}}}],
    ),
    "arguments as text": (hermes_call('{"name": "add", "arguments": "{\\"x\\": \\"1\\"}"}'), "", [ADD]),
    "no arguments": (hermes_call('{"name": "now"}'), "", [{"name": "now", "arguments": {}}]),
    "an unknown name": (hermes_call('{"name": "rm -rf", "arguments": {}}'), "", [{"name": "rm -rf", "arguments": {}}]),
    "not closed": ('<tool_call>{"name": "add", "arguments": {"x": "1"}}', "", [ADD]),
    "not closed, and another": (
        2 * '<tool_call>{"name": "add", "arguments": {"x": "1"}}',
        "",
        [ADD, ADD],
    ),
    "cut": ('<tool_call>{"name": "add", "argum', "", ["the call is not valid JSON: Unterminated string"]),
    "a brace too many": (
        hermes_call('{"name": "add", "arguments": {}}}'),
        "",
        ["the call is not valid JSON: text follows its closing brace"],
    ),
    "broken, then a good one": (
        '<tool_call>{"name": "add", x}</tool_call><tool_call>{"name": "add", "arguments": {"x": "1"}}</tool_call>',
        "",
        ["the call is not valid JSON: Expecting property name enclosed in double quotes at character 16", ADD],
    ),
    "a list": (hermes_call("[1, 2]"), "", ["the call has no name"]),
    "a number for a name": (hermes_call('{"name": 3, "arguments": {}}'), "", ["the call has no name"]),
    "a list of arguments": (hermes_call('{"name": "add", "arguments": [1]}'), "", ["the arguments are not an object"]),
    "empty": (hermes_call(""), "", ["the call is not valid JSON"]),
    "nested without end": ("<tool_call>" + "[" * 100_000, "", ["the call is not valid JSON: it is nested too deeply"]),
}
LLAMA: dict[str, tuple[str, str, list[Any]]] = {
    "bare": ('{"name": "add", "parameters": {"x": "1"}}', "", [ADD]),
    "after its marker": ('<|python_tag|>{"name": "add", "parameters": {"x": "1"}}', "", [ADD]),
    "text before": ('I add. <|python_tag|>{"name": "add", "parameters": {"x": "1"}}', "I add.", [ADD]),
    "two": (
        '{"name": "add", "parameters": {"x": "1"}}; {"name": "add", "parameters": {"x": "1"}}',
        "",
        [ADD, ADD],
    ),
    "two with markers": (
        2 * '<|python_tag|>{"name": "add", "parameters": {"x": "1"}}',
        "",
        [ADD, ADD],
    ),
    "nested braces": (
        '{"name": "add", "parameters": {"x": {"y": "}{"}}}',
        "",
        [{"name": "add", "arguments": {"x": {"y": "}{"}}}],
    ),
    "an answer that is JSON": ('{"total": 4}', '{"total": 4}', []),
    "an answer": ("4", "4", []),
    "broken": ('{"name": "add", "parameters": {"x": ', "", ["the call is not valid JSON: Expecting value"]),
    "code": ("<|python_tag|>print(4)", "", ["the call is not valid JSON"]),
    "text after": ('{"name": "add", "parameters": {"x": "1"}} is it', "", [ADD, "the call is not valid JSON"]),
}
MISTRAL: dict[str, tuple[str, str, list[Any]]] = {
    "a list": ('[TOOL_CALLS] [{"name": "add", "arguments": {"x": "1"}, "id": "abcdefghi"}]', "", [ADD]),
    "a list of two": (
        'I add.[TOOL_CALLS][{"name": "add", "arguments": {"x": "1"}}, {"name": "sub", "arguments": {}}]',
        "I add.",
        [ADD, {"name": "sub", "arguments": {}}],
    ),
    "by name": ('[TOOL_CALLS]add[ARGS]{"x": "1"}[TOOL_CALLS]add{"x": "1"}', "", [ADD, ADD]),
    "by name with an id": ('[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"x": "1"}', "", [ADD]),
    "a bracket in a string": (
        '[TOOL_CALLS][{"name": "add", "arguments": {"x": "]}"}}]',
        "",
        [{"name": "add", "arguments": {"x": "]}"}}],
    ),
    "one of a list has no name": (
        '[TOOL_CALLS][{"arguments": {}}, {"name": "add", "arguments": {"x": "1"}}]',
        "",
        ["the call has no name", ADD],
    ),
    "broken": ('[TOOL_CALLS][{"name": "add", "arguments": {', "", ["the call is not valid JSON"]),
    "text after": ('[TOOL_CALLS][{"name": "add"}] so', "", ["the call is not valid JSON: text follows its end"]),
    "broken by name": ("[TOOL_CALLS]add[ARGS]{x}", "", ["the call is not valid JSON: Expecting property name"]),
    "none": ("4", "4", []),
}
TAGGED: dict[str, tuple[str, str, list[Any]]] = {
    "function": (
        "I add.\n<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
        "I add.",
        [ADD],
    ),
    "two, of several lines": (
        "<tool_call><function=add><parameter=x>\n1\n2\n</parameter><parameter=y>{}</parameter></function></tool_call>"
        "<tool_call><function=now></function></tool_call>",
        "",
        [{"name": "add", "arguments": {"x": "1\n2", "y": "{}"}}, {"name": "now", "arguments": {}}],
    ),
    "keys and values": (
        "<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "",
        [ADD],
    ),
    "broken": ("<tool_call><function=add><parameter=x>1</function></tool_call>", "", ["the arguments cannot be read"]),
    "no name": ("<tool_call>{}</tool_call>", "", ["the call has no name"]),
}
FORMS = {"hermes": (hermes, HERMES), "llama": (llama, LLAMA), "mistral": (mistral, MISTRAL), "tagged": (tagged, TAGGED)}


@pytest.mark.parametrize(("form", "case"), [(form, case) for form, (_, cases) in FORMS.items() for case in cases])
def test_a_turn_holds_these_calls(form: str, case: str) -> None:
    read, cases = FORMS[form]
    text, left, expected = cases[case]
    content, calls = read(text, ())
    assert content == left
    assert len(calls) == len(expected)
    for found, wanted in zip(functions(calls), expected, strict=True):
        assert found == wanted if isinstance(wanted, dict) else found.startswith(wanted)
    assert all(call["type"] == "function" and call["function"]["arguments"] == {} for call in calls if "error" in call)


def test_a_call_that_cannot_be_read_keeps_its_name_where_it_has_one() -> None:
    assert hermes('<tool_call>{"name": "add", "arguments": {x}}</tool_call>')[1][0]["function"]["name"] == "add"
    assert llama('{"name": "add", "parameters": {x}}')[1][0]["function"]["name"] == "add"
    assert mistral("[TOOL_CALLS]add[ARGS]{x}")[1][0]["function"]["name"] == "add"
    assert tagged("<tool_call><function=add><parameter=x></tool_call>")[1][0]["function"]["name"] == "add"
    assert hermes("<tool_call>add(1)</tool_call>")[1][0]["function"]["name"] == ""


def test_calls_have_ids_of_nine_characters_or_their_own() -> None:
    assert [call["id"] for call in hermes(HERMES["two"][0])[1]] == ["call00000", "call00001"]
    assert mistral(MISTRAL["a list"][0])[1][0]["id"] == "abcdefghi"
    assert mistral(MISTRAL["by name with an id"][0])[1][0]["id"] == "abcdefghi"


def test_arguments_in_tags_have_the_types_that_the_tool_declares() -> None:
    types = {"n": "integer", "s": "string", "b": "boolean", "o": "object", "w": "integer"}
    declared = {"name": "add", "parameters": {"properties": {name: {"type": kind} for name, kind in types.items()}}}
    given = {"n": "7", "s": "7", "b": "True", "o": '{"a": [1]}', "w": "seven", "other": "7"}
    text = "".join(f"<parameter={name}>{value}</parameter>" for name, value in given.items())
    _, [call] = tagged(f"<tool_call><function=add>{text}</function></tool_call>", [{"function": declared}])
    assert call["function"]["arguments"] == {
        "n": 7, "s": "7", "b": True, "o": {"a": [1]}, "w": "seven", "other": "7"
    }  # fmt: skip


# Calls as they are sampled, with the end token.
SAMPLED = {
    "block": 'Well.<tool_call>{"name": "add", "arguments": {"x": "1"}}</tool_call><|im_end|>',
    "single": '{"name": "add", "parameters": {"x": "1"}}<|eot_id|>',
    "nine": '[TOOL_CALLS][{"name": "add", "arguments": {"x": "1"}, "id": "call00000"}]</s>',
}


@pytest.mark.parametrize("name", SAMPLED)
def test_calls_whose_markers_are_special_tokens_are_read_from_ids(name: str) -> None:
    codec = codec_of(name, TOOLS)
    message = codec.parse(ids_of(tokenizer_of(name), SAMPLED[name]))
    assert message == {
        "role": "assistant",
        "content": "Well." if name == "block" else "",
        "tool_calls": [{"id": "call00000", "type": "function", "function": ADD}],
    }


def test_the_form_of_a_template_that_writes_no_calls_is_that_of_its_vocabulary() -> None:
    codec = codec_of("system_first", TOOLS)  # it knows <tool_call>
    ids = ids_of(tokenizer_of("system_first"), SAMPLED["block"].replace("<|im_end|>", "<|end|>"))
    assert functions(codec.parse(ids)["tool_calls"]) == [ADD]  # type: ignore[typeddict-item]


def test_a_turn_without_tools_is_text_whatever_it_says() -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert codec_of("block").parse(ids_of(tokenizer_of("block"), text + "<|im_end|>")) == {
        "role": "assistant",
        "content": text,
    }


def test_what_is_said_has_no_special_tokens() -> None:
    message = codec_of("block").parse(ids_of(tokenizer_of("block"), "four<|im_start|>teen<|im_end|>"))
    assert message["content"] == "fourteen"


def test_thoughts_are_apart_and_calls_in_them_are_none() -> None:
    tokenizer = tokenizer_of("forgets")
    codec = codec_of("forgets", TOOLS)
    call = '<tool_call>{"name": "add", "arguments": {"x": "1"}}</tool_call>'
    message = codec.parse(ids_of(tokenizer, f"<think>\n{call}?\n</think>\n\nYes.{call}<|im_end|>"))
    assert message.get("reasoning_content") == f"{call}?"
    assert message["content"] == "Yes."
    assert functions(message["tool_calls"]) == [ADD]  # type: ignore[typeddict-item]
    assert codec.parse(ids_of(tokenizer, "<think>\nhm")) == {
        "role": "assistant", "content": "", "reasoning_content": "hm"
    }  # fmt: skip


def test_a_thought_that_the_prompt_begins_ends_at_its_tag() -> None:
    tokenizer = tokenizer_of("forgets")
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    codec = ChatCodec(tokenizer, tokenizer.convert_tokens_to_ids(["<|im_end|>"]))
    assert codec.parse(ids_of(tokenizer, "hm</think>4<|im_end|>")) == {
        "role": "assistant", "content": "4", "reasoning_content": "hm"
    }  # fmt: skip
    assert codec.parse(ids_of(tokenizer, "hm"))["content"] == ""


def test_the_response_template_of_a_tokenizer_reads_its_turns() -> None:
    tokenizer = tokenizer_of("returns")
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|start|>assistant",
        "fields": {
            "content": {"open": "<|channel|>final<|message|>", "close": "<|return|>", "content": "text"},
            "tool_calls": {
                "open_pattern": r" to=functions\.(?P<name>\w+)<\|channel\|>commentary<\|message\|>",
                "close": "<|call|>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
        },
    }
    codec = ChatCodec(tokenizer, tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"]), TOOLS)
    codec.check("tool")
    called = " to=functions.add<|channel|>commentary<|message|>{}<|call|>"
    assert codec.parse(ids_of(tokenizer, called.format('{"x": "1"}'))) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00000", "type": "function", "function": ADD}],
    }
    assert codec.parse(ids_of(tokenizer, "<|channel|>final<|message|>four<|return|>"))["content"] == "four"
    [broken] = codec.parse(ids_of(tokenizer, called.format("{x}")))["tool_calls"]  # type: ignore[typeddict-item]
    assert broken["error"].startswith("the call cannot be read: json parser could not parse")


def test_a_broken_call_does_not_take_the_others_with_it() -> None:
    tokenizer = tokenizer_of("block")
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "content": {"close": "<|im_end|>", "content": "text"},
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    }
    codec = ChatCodec(tokenizer, tokenizer.convert_tokens_to_ids(["<|im_end|>"]), TOOLS)
    codec.check("tool")
    calls = codec.parse(ids_of(tokenizer, HERMES["broken, then a good one"][0] + "<|im_end|>"))["tool_calls"]  # type: ignore[typeddict-item]
    assert ["error" in call for call in calls] == [True, False]
    assert calls[1]["function"] == ADD
    tokenizer.response_template["fields"]["tool_calls"] |= {"open": "{", "close": "}"}
    [unread] = codec.parse(ids_of(tokenizer, "{ add }<|im_end|>"))["tool_calls"]  # type: ignore[typeddict-item]
    assert unread["error"].startswith("the call cannot be read")


def test_tools_of_a_model_that_calls_none_are_refused() -> None:
    with pytest.raises(InputError, match="nothing says how this model calls them; its chat template writes 'to=func"):
        codec_of("returns", TOOLS)
