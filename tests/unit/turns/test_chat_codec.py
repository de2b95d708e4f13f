"""The piece between two turns is the slice of a whole render, and templates that have none are refused."""

import json
from typing import Any

import pytest
from chat_templates import CHARS, TEMPLATES, TOOLS, codec_of, ids_of, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppo.errors import InputError
from gruppo.turns.chat import MARK, ChatCodec

CODECS: dict[str, tuple[ChatCodec, Any]] = {}
TAKE_USERS = [name for name in TEMPLATES if name not in ("endless", "omits", "parts")]
TAKE_TOOLS = ["block", "forgets", "returns", "named", "nine", "single", "text_arguments", "opens", "late", "moves"]


def codec(name: str) -> tuple[ChatCodec, Any]:
    if name not in CODECS:
        CODECS[name] = codec_of(name), tokenizer_of(name)
    return CODECS[name]


def whole(tokenizer: Any, messages: list[Any], goes_on: bool = True) -> tuple[int, ...]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=goes_on)
    return ids_of(tokenizer, text)


def called(arguments: Any = None, num: int = 1, ids: str = "call{:05}") -> list[dict[str, Any]]:
    function = {"name": "add", "arguments": arguments or {"x": "1"}}
    return [{"type": "function", "id": ids.format(i), "function": function} for i in range(num)]


def answer(content: str, index: int = 0) -> dict[str, Any]:
    return {"role": "tool", "name": "add", "tool_call_id": f"call{index:05}", "content": content}


# A template may trim what is said: texts begin and end with a letter.
TEXTS = st.text(alphabet=CHARS, max_size=12).map("a{}z".format)
HOSTILE = st.one_of(
    TEXTS, st.sampled_from(["<|im_end|>", f"a {MARK} b", "<|end|>\n", "</s>[INST]", "<|user|>", "<end_of_turn>"])
)


@pytest.mark.parametrize("name", TAKE_USERS)
@settings(max_examples=25, deadline=None)
@given(said=TEXTS, answered=HOSTILE)
def test_the_piece_before_a_users_answer_is_the_slice_of_a_whole_render(name: str, said: str, answered: str) -> None:
    codec_, tokenizer = codec(name)
    asked, own = {"role": "user", "content": "why?"}, {"role": "assistant", "content": said}
    answers = [{"role": "user", "content": answered}]
    rendered = whole(tokenizer, [asked, own, *answers])
    turn = ids_of(tokenizer, said)
    piece = codec_.between(None, answers)
    assert rendered[-len(turn + piece) :] == turn + piece


@pytest.mark.parametrize("name", TAKE_TOOLS)
@settings(max_examples=25, deadline=None)
@given(argument=TEXTS, answered=HOSTILE)
def test_the_piece_before_a_tools_answer_is_the_slice_of_a_whole_render(
    name: str, argument: str, answered: str
) -> None:
    codec_, tokenizer = codec(name)
    asked: dict[str, Any] = {"role": "user", "content": "why?"}
    arguments: Any = {"x": argument}
    own = {"role": "assistant", "content": ""}
    own |= {"tool_calls": called(json.dumps(arguments) if name == "text_arguments" else arguments)}
    rendered = whole(tokenizer, [asked, own, answer(answered)])
    alone = whole(tokenizer, [asked, own], goes_on=False)
    piece = codec_.between(None, [answer(answered)])
    assert rendered[-len(piece) :] == piece
    turn = rendered[: -len(piece)]
    assert turn == alone[: len(turn)]
    assert len(alone) - len(turn) <= 2  # its end token, and a separator
    ends = tokenizer.convert_tokens_to_ids(list(TEMPLATES[name][1]))
    assert not set(ends) & set(turn[len(whole(tokenizer, [asked])) :])


def test_pieces_have_these_ids() -> None:
    _, tokenizer = codec("block")
    ids = tokenizer.convert_tokens_to_ids
    end, start, newline = ids(["<|im_end|>", "<|im_start|>", "\n"])
    user, assistant = (ids(list(role)) for role in ("user", "assistant"))
    begins, ends = ids(["<tool_response>", "</tool_response>"])
    expected = [newline, start, *user]
    for content in ("42", "7"):
        expected += [newline, begins, newline, *ids(list(content)), newline, ends]
    expected += [end, newline, start, *assistant, newline]
    answers = [answer("42"), answer("7", 1)]
    assert codec("block")[0].between(end, answers) == tuple(expected)
    assert codec("block")[0].between(None, answers) == (end, *expected)


def test_the_piece_of_a_template_with_ids_of_calls_has_these_ids() -> None:
    codec_, tokenizer = codec("nine")
    [end] = tokenizer.convert_tokens_to_ids(["</s>"])
    expected = ["[TOOL_RESULTS]", *'{"content": "42", "call_id": "call00000"}', "[/TOOL_RESULTS]"]
    assert codec_.between(end, [answer("42")]) == tuple(tokenizer.convert_tokens_to_ids(expected))
    nameless: Any = {"role": "tool", "content": "42"}
    assert codec_.between(end, [nameless]) == tuple(tokenizer.convert_tokens_to_ids(expected))


def test_the_end_that_was_sampled_is_kept_where_histories_have_another() -> None:
    codec_, tokenizer = codec("returns")
    ids = tokenizer.convert_tokens_to_ids
    returned, called_, end = ids(["<|return|>", "<|call|>", "<|end|>"])
    expected = ids(["<|start|>", *"user", "<|message|>", *"ok", "<|end|>", "<|start|>", *"assistant"])
    tail: Any = [{"role": "user", "content": "ok"}]
    assert codec_.between(returned, tail) == tuple(expected)
    assert codec_.between(None, tail) == (end, *expected)
    expected = ids(
        ["<|start|>", *"functions.add to=assistant", "<|message|>", "4", "<|end|>", "<|start|>", *"assistant"]
    )
    assert codec_.between(called_, [answer("4")]) == tuple(expected)


def test_an_end_token_that_begins_the_next_message_is_not_written_twice() -> None:
    codec_, tokenizer = codec("opens")
    user, seen, end = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>", "<|endoftext|>"])
    [newline, ok] = tokenizer.convert_tokens_to_ids(["\n", "y"])
    [assistant] = tokenizer.convert_tokens_to_ids(["<|assistant|>"])
    tail: Any = [{"role": "user", "content": "y"}]
    assert codec_.between(user, tail) == (newline, ok, assistant, newline)
    assert codec_.between(None, tail) == (user, newline, ok, assistant, newline)
    assert codec_.between(end, tail) == (user, newline, ok, assistant, newline)
    assert codec_.between(seen, [answer("y")]) == (newline, ok, assistant, newline)


def test_a_space_that_the_end_token_swallows_is_not_in_the_piece() -> None:
    codec_, tokenizer = codec("system_first")
    ids = tokenizer.convert_tokens_to_ids
    tail: Any = [{"role": "user", "content": "ok"}]
    expected = ids(["<|user|>", "\n", "o", "k", "<|end|>", "<|assistant|>", "\n"])
    assert codec_.between(ids("<|end|>"), tail) == tuple(expected)


def test_a_template_of_single_calls_goes_on_after_two() -> None:
    codec_, tokenizer = codec("single")
    piece = tokenizer.decode(codec_.between(None, [answer("1"), answer("2", 1)]))
    said = "<|start_header_id|>ipython<|end_header_id|>\n\n{}<|eot_id|>"
    assert piece == "<|eot_id|>" + said.format(1) + said.format(2) + (
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_what_is_ours_does_not_reach_the_template() -> None:
    tokenizer = tokenizer_of("block")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.keys() | list | join(',') }};{% for c in m.tool_calls or [] %}"
        "{{ c.keys() | list | join(',') }};{% endfor %}{% endfor %}"
    )
    codec_ = ChatCodec(tokenizer, [1])
    broken = called()[0] | {"error": "no JSON"}
    messages: list[Any] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [broken]},
        answer("no") | {"is_error": True},
    ]
    assert codec_.first(messages)[1] == (
        "role,content;role,content,tool_calls;type,id,function;role,name,tool_call_id,content;"
    )


def test_the_first_prompt_is_the_templates_own_with_its_tools() -> None:
    codec_ = codec_of("block", TOOLS)
    tokenizer = tokenizer_of("block")
    messages = [{"role": "user", "content": "1+1"}]
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert '"name": "add"' in text
    assert codec_.first(messages) == (ids_of(tokenizer, text), text)


@pytest.mark.parametrize("given_arguments", [{"x": "1"}, '{"x": "1"}'])
@pytest.mark.parametrize("name", ["block", "text_arguments", "single"])
def test_arguments_of_earlier_calls_are_printed_as_json_whatever_they_come_as(name: str, given_arguments: Any) -> None:
    own = {"role": "assistant", "content": "", "tool_calls": called(given_arguments)}
    _, text = codec(name)[0].first([{"role": "user", "content": "x"}, own, answer("1")])
    assert ': {"x": "1"}}' in text


def test_arguments_that_are_no_json_are_left_to_the_template() -> None:
    own = {"role": "assistant", "content": "", "tool_calls": called("{x")}
    _, text = codec("block")[0].first([{"role": "user", "content": "x"}, own, answer("no")])
    assert '"arguments": "{x"}' in text


@pytest.mark.parametrize("name", TAKE_USERS)
def test_these_templates_take_a_users_answer(name: str) -> None:
    codec(name)[0].check("user")


@pytest.mark.parametrize("name", TAKE_TOOLS)
def test_these_templates_take_a_tools_answer(name: str) -> None:
    codec(name)[0].check("tool")


REFUSED = [
    ("endless", "user", "ends the assistant's turn with none of the model's end tokens ('<|endoftext|>')"),
    ("omits", "user", "ends the assistant's turn with none of the model's end tokens ('<|endoftext|>')"),
    ("parts", "user", "drops what the assistant said"),
    ("alternates", "tool", "roles must alternate"),
    ("system_first", "tool", "leaves out messages of the role 'tool'"),
    ("changes", "tool", "writes a later message of the role 'tool' otherwise than the first"),
]


@pytest.mark.parametrize(("name", "role", "reason"), REFUSED)
def test_templates_that_cannot_be_bridged_are_refused(name: str, role: Any, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        codec(name)[0].check(role)
    assert reason in str(caught.value)
    assert "set tokenizer.chat_template to" in str(caught.value)


def test_text_that_its_tokenizer_encodes_to_other_tokens_is_refused() -> None:
    from tokenizers import normalizers

    tokenizer = tokenizer_of("block")
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("assistant", "assistantassistant")
    with pytest.raises(InputError, match="decodes and encodes to other tokens"):
        ChatCodec(tokenizer, tokenizer.convert_tokens_to_ids(["<|im_end|>"])).check("user")


def test_a_refusal_names_the_model_and_no_path() -> None:
    tokenizer = tokenizer_of("endless")
    tokenizer.name_or_path = "/home/someone/models/Small-1B"
    with pytest.raises(InputError, match=r"^the chat template of Small-1B ends"):
        ChatCodec(tokenizer, [1]).check("user")


KEEPS = {
    # name: (user, thoughts and user, tool, thoughts and tool)
    "block": (True, True, True, True),
    "forgets": (True, False, True, True),
    "returns": (True, True, True, False),
    "nine": (True, True, True, False),
    "moves": (False, False, True, True),
}


@pytest.mark.parametrize("name", KEEPS)
def test_a_whole_render_keeps_earlier_turns_of_these_templates(name: str) -> None:
    codec_, _ = codec(name)
    found = tuple(codec_.keeps(role, thinks) for role in ("user", "tool") for thinks in (False, True))
    assert found == KEEPS[name]
