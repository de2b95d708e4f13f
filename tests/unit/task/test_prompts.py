"""Rows become prompts: ids by hand, nothing cut, nothing doubled."""

from typing import Any

import pytest
from tokenizers import processors

from gruppo.errors import InputError
from gruppo.task.builtin import builtin_tokenizer
from gruppo.task.dataset import DroppedRow
from gruppo.task.prompts import PromptSet, load_prompts
from gruppo.types import Prompt

# Ids: <pad> 0, <bos> 1, <eos> 2, <unk> 3, then "0".."9" 4-13, "+" 14, "=" 15. A system turn is written in "==", a
# user's turn after "+", the assistant's after "=".
TEMPLATE = """{{ bos_token }}{% for m in messages -%}
{% if m.role == 'system' %}={{ m.content }}={% elif m.role == 'user' %}+{{ m.content }}
{%- elif m.role == 'assistant' %}={{ m.content }}{% else %}{{ raise_exception('no tools here') }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}={% endif %}"""


@pytest.fixture
def tokenizer() -> Any:
    return builtin_tokenizer()


@pytest.fixture
def chat_tokenizer() -> Any:
    tokenizer = builtin_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_string_is_encoded_with_one_start_token(tokenizer: Any) -> None:
    rows = [{"prompt": "47+85=", "answer": "132", "level": 2}]
    assert load_prompts(rows, tokenizer).prompts == (
        Prompt(
            token_ids=(1, 8, 11, 14, 12, 9, 15),
            text="47+85=",
            source="47+85=",
            columns={"answer": "132", "level": 2},
            index=0,
        ),
    )


@pytest.mark.row("R-35", "a prompt with its start token")
def test_a_string_that_brings_its_start_token_gets_no_second(tokenizer: Any) -> None:
    assert load_prompts([{"prompt": "<bos>4+4="}], tokenizer)[0].token_ids == (1, 8, 14, 8, 15)


def test_a_conversation_takes_its_ids_from_the_template(chat_tokenizer: Any) -> None:
    [prompt] = load_prompts([{"prompt": [user("47")]}], chat_tokenizer)
    assert prompt.token_ids == (1, 14, 8, 11, 15)
    assert prompt.text == "<bos>+47="
    assert prompt.source == [user("47")]
    # The trap: encoding the rendered text once more adds a second start token.
    assert chat_tokenizer(prompt.text)["input_ids"] == [1, 1, 14, 8, 11, 15]


def begun(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def test_a_turn_that_the_assistant_has_begun_goes_on_after_its_text(chat_tokenizer: Any) -> None:
    found = load_prompts(
        [{"prompt": [user("47"), begun("13")]}, {"prompt": [user("1"), begun("2"), user("3")]}], chat_tokenizer
    )
    # +47=13 and +1=2+3= by hand; whatever the model writes comes after the 13.
    assert [p.token_ids for p in found] == [(1, 14, 8, 11, 15, 5, 7), (1, 14, 5, 15, 6, 14, 7, 15)]
    assert found[0].text == "<bos>+47=13"
    assert found[0].source == [user("47"), begun("13")]
    assert found.reading == ("1 of 2 prompts end in the assistant's turn, which a completion continues",)


def test_a_begun_turn_goes_with_a_system_message(chat_tokenizer: Any) -> None:
    [prompt] = load_prompts([{"prompt": [user("4"), begun("1")]}], chat_tokenizer, system="9")
    assert prompt.text == "<bos>=9=+4=1"


@pytest.mark.parametrize(
    ("template", "start", "text"),
    [
        # puts an empty thought before the last turn of the assistant, as Qwen3's does
        ("{% for m in messages %}{% if m.role == 'assistant' %}A<think></think>{% else %}U{% endif %}{{ m.content }}E"
         "{% endfor %}{% if add_generation_prompt %}A{% endif %}", "<think>\n", "U4EA<think>\n"),
        # strips what is in a turn, as Llama's does
        ("{% for m in messages %}{{ m.role[0] }}{{ m.content.strip() }}E{% endfor %}"
         "{% if add_generation_prompt %}a{% endif %}", "so\n", "u4Easo\n"),
        # begins the turn by a thought itself, as DeepSeek-R1's does
        ("{% for m in messages %}U{{ m.content }}{% endfor %}{% if add_generation_prompt %}A<think>\n{% endif %}",
         "<think>\n", "U4A<think>\n"),
        ("{% for m in messages %}U{{ m.content }}{% endfor %}{% if add_generation_prompt %}A<think>\n{% endif %}",
         "<think>\nWell", "U4A<think>\nWell"),
    ],
)  # fmt: skip
def test_what_a_template_does_with_whole_turns_does_not_touch_a_begun_one(
    chat_tokenizer: Any, template: str, start: str, text: str
) -> None:
    chat_tokenizer.chat_template = template
    assert load_prompts([{"prompt": [user("4"), begun(start)]}], chat_tokenizer)[0].text == text


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([begun("1")], "the prompt is a turn of the assistant alone; put the user's before it"),
        ([user("1"), begun(" \n")], "prompt is empty: its last message has no content"),
        ([user("1"), begun("1", tool_calls=[])], "the last message is the assistant's and has 'tool_calls'; only its"),
        ([user("1"), begun("1", name=None), {"role": "tool", "content": "1"}], "no tools here"),
    ],
)
def test_a_begun_turn_that_cannot_go_on_is_refused(chat_tokenizer: Any, prompt: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_prompts([{"prompt": prompt}], chat_tokenizer)


def test_a_conversation_of_several_turns_ends_at_the_assistants_turn(chat_tokenizer: Any) -> None:
    turns = [user("1"), {"role": "assistant", "content": "2"}, user("3")]
    assert load_prompts([{"prompt": turns}], chat_tokenizer)[0].text == "<bos>+1=2+3="


def test_system_opens_conversations_that_have_no_system_message(chat_tokenizer: Any) -> None:
    own = [{"role": "system", "content": "8"}, user("2")]
    prompts = load_prompts([{"prompt": [user("1")]}, {"prompt": own}], chat_tokenizer, system="9")
    assert [prompt.text for prompt in prompts] == ["<bos>=9=+1=", "<bos>=8=+2="]


def test_keys_that_arrow_filled_with_none_do_not_reach_the_template(chat_tokenizer: Any) -> None:
    chat_tokenizer.chat_template = "{% for m in messages %}{{ m | length }}{% endfor %}"
    [prompt] = load_prompts([{"prompt": [{**user("1"), "name": None}]}], chat_tokenizer)
    assert prompt.text == "2"


@pytest.mark.parametrize(
    "rows, options, message",
    [
        ([{"prompt": [user("1")]}], {}, "has no chat template; use the tokenizer of an instruction-tuned model"),
        ([{"prompt": "1"}], {"system": "9"}, "a system message needs conversations, and these prompts are text"),
        ([{"prompt": "1"}], {"system": "9"}, "set chat=true to make each the turn of a user"),
        (
            [{"prompt": "1"}],
            {"chat": True},
            "has no chat template; .* or give the prompts as strings without chat=true",
        ),
        ([{"prompt": "1"}], {"limit": 0}, "limit must be at least 1, got 0"),
        ([{"prompt": "1"}], {"max_prompt_tokens": 0}, "max_prompt_tokens must be at least 1"),
        ([{"prompt": "1", "step": 3}], {}, "under the name 'step'; rename the column: column_map={'step': 'row_step'}"),
        ([{"prompt": "123"}], {"max_prompt_tokens": 3}, r"no usable prompt; rows\[0\]: prompt has 4 tokens, limit 3"),
    ],
)
def test_what_cannot_be_rendered_is_refused(
    tokenizer: Any, rows: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load_prompts(rows, tokenizer, **options)


def test_a_conversation_that_the_template_refuses_is_a_bad_row(chat_tokenizer: Any) -> None:
    rows = [{"prompt": [user("1")]}, {"prompt": [user("1"), {"role": "tool", "content": "2"}]}]
    with pytest.raises(InputError, match=r"^rows\[1\]: the chat template refuses the conversation: no tools here; fix"):
        load_prompts(rows, chat_tokenizer)
    prompts = load_prompts(rows, chat_tokenizer, on_bad_row="drop")
    assert len(prompts) == 1
    assert prompts.dropped == (("rows[1]", "the chat template refuses the conversation: no tools here"),)


@pytest.mark.row("R-25", "prompts beyond the limit")
def test_long_prompts_are_dropped_and_listed_and_never_cut(tokenizer: Any) -> None:
    rows = [{"prompt": "1+1="}, {"prompt": "111+111="}, {"prompt": "22+2="}]
    prompts = load_prompts(rows, tokenizer, max_prompt_tokens=6)
    assert [(prompt.index, prompt.text) for prompt in prompts] == [(0, "1+1="), (2, "22+2=")]
    assert prompts.dropped == (("rows[1]", "prompt has 9 tokens, limit 6"),)


def test_limit_counts_usable_prompts(tokenizer: Any) -> None:
    rows = [{"prompt": "111"}, {"prompt": "1"}, {"prompt": "2"}, {"prompt": "3"}]
    prompts = load_prompts(rows, tokenizer, max_prompt_tokens=2, limit=2)
    assert [prompt.text for prompt in prompts] == ["1", "2"]


def test_a_column_that_a_row_lacks_is_none(tokenizer: Any) -> None:
    prompts = load_prompts([{"prompt": "1", "answer": "2"}, {"prompt": "3"}], tokenizer)
    assert [prompt.columns for prompt in prompts] == [{"answer": "2"}, {"answer": None}]


def test_a_tokenizer_that_ends_every_prompt_is_refused(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    with pytest.raises(InputError, match="load it with add_eos_token=False"):
        load_prompts([{"prompt": "1"}], tokenizer)


def make_set(count: int) -> PromptSet:
    return PromptSet(prompts=tuple(Prompt(token_ids=(1, index), index=index) for index in range(count)))


def test_holdout_parts_the_set_and_keeps_the_order() -> None:
    train, held_out = make_set(20).split_holdout(5, seed=3)
    parts = [[prompt.index for prompt in part] for part in (train, held_out)]
    assert [len(part) for part in parts] == [15, 5]
    assert sorted(parts[0] + parts[1]) == list(range(20))
    assert all(part == sorted(part) for part in parts)


def test_holdout_is_a_function_of_the_seed() -> None:
    chosen = [{p.index for p in make_set(100).split_holdout(10, seed=seed)[1]} for seed in (1, 1, 2)]
    assert chosen[0] == chosen[1] != chosen[2]


def test_a_prompt_that_is_held_out_is_not_trained_on_under_another_row() -> None:
    twins = PromptSet(prompts=tuple(Prompt(token_ids=(1, index // 2), index=index) for index in range(10)))
    train, held_out = twins.split_holdout(1, seed=0)
    [chosen] = held_out
    twin = chosen.index ^ 1
    assert {p.index for p in train} == set(range(10)) - {chosen.index, twin}
    assert train.dropped == (DroppedRow(f"row {twin}", "the same prompt is held out"),)


@pytest.mark.parametrize("n", [-1, 20, 21])
def test_a_holdout_that_leaves_nothing_is_refused(n: int) -> None:
    with pytest.raises(InputError, match=f"cannot hold out {n} of 20 prompts"):
        make_set(20).split_holdout(n, seed=0)


def test_variables_of_the_template_reach_it(tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}00{% endif %}"
    rows = [{"prompt": [user("47")]}]
    assert load_prompts(rows, tokenizer)[0].token_ids == (1, 14, 8, 11, 15)
    [prompt] = load_prompts(rows, tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert (prompt.token_ids, prompt.text) == ((1, 14, 8, 11, 15, 4, 4), "<bos>+47=00")
    assert load_prompts(rows, tokenizer, chat_template_kwargs={"enable_thinking": True})[0].text == "<bos>+47="


@pytest.mark.parametrize("kwargs", [{"tokenize": False}, {"add_generation_prompt": False}])
def test_variables_that_are_not_the_templates_are_refused(chat_tokenizer: Any, kwargs: dict[str, Any]) -> None:
    (name,) = kwargs
    with pytest.raises(InputError, match=f"chat_template_kwargs has '{name}', which is not the template's to decide"):
        load_prompts([{"prompt": [user("1")]}], chat_tokenizer, chat_template_kwargs=kwargs)


def test_variables_of_a_template_need_conversations(tokenizer: Any) -> None:
    with pytest.raises(InputError, match="chat_template_kwargs needs conversations, and these prompts are text"):
        load_prompts([{"prompt": "1+1="}], tokenizer, chat_template_kwargs={"enable_thinking": False})


def test_chat_makes_each_text_the_turn_of_a_user(chat_tokenizer: Any) -> None:
    [prompt] = load_prompts([{"prompt": "47", "answer": "8"}], chat_tokenizer, chat=True)
    # <bos> + 4 7 =, as the same prompt in messages; rewards still receive the text of the data set.
    assert (prompt.token_ids, prompt.text, prompt.source) == ((1, 14, 8, 11, 15), "<bos>+47=", "47")
    [messages] = load_prompts([{"prompt": [user("47")], "answer": "8"}], chat_tokenizer, chat=True)
    assert (messages.token_ids, messages.source) == ((1, 14, 8, 11, 15), [user("47")])


def test_chat_takes_a_system_message_and_variables_of_the_template(tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}00{% endif %}"
    options: dict[str, Any] = {"chat": True, "system": "9", "chat_template_kwargs": {"enable_thinking": False}}
    [prompt] = load_prompts([{"prompt": "47"}], tokenizer, **options)
    assert (prompt.token_ids, prompt.text) == ((1, 15, 13, 15, 14, 8, 11, 15, 4, 4), "<bos>=9=+47=00")


def test_chat_counts_the_tokens_of_the_template(chat_tokenizer: Any) -> None:
    rows = [{"prompt": "4"}, {"prompt": "47"}]
    prompts = load_prompts(rows, chat_tokenizer, chat=True, max_prompt_tokens=4)
    assert [prompt.text for prompt in prompts] == ["<bos>+4="]
    assert prompts.dropped == (("rows[1]", "prompt has 5 tokens, limit 4"),)


def test_what_was_made_of_the_rows_is_said(tokenizer: Any, chat_tokenizer: Any) -> None:
    rows = [{"question": "1+1=", "solution": "2"}]
    columns = ("question is read as prompt", "solution is read as answer")
    raw = "text prompts go in as they are; chat=true (--chat) puts them through the model's chat template"
    through = "text prompts go through the chat template"
    assert load_prompts(rows, tokenizer).reading == columns
    assert load_prompts(rows, chat_tokenizer).reading == (*columns, raw)
    assert load_prompts(rows, chat_tokenizer, chat=True).reading == (*columns, through)
    assert load_prompts([{"prompt": [user("1")]}], chat_tokenizer, chat=True).reading == ()


def test_both_parts_of_a_split_keep_how_they_were_read(chat_tokenizer: Any) -> None:
    prompts = load_prompts([{"prompt": str(i)} for i in range(5)], chat_tokenizer, chat=True)
    parts = prompts.split_holdout(2, seed=0)
    assert [part.reading for part in parts] == [("text prompts go through the chat template",)] * 2


TOOL = {"type": "function", "function": {"name": "48", "parameters": {}}}


def test_each_row_is_rendered_with_its_own_tools(chat_tokenizer: Any) -> None:
    chat_tokenizer.chat_template = "{% for t in tools or [] %}={{ t.function.name }}={% endfor %}" + TEMPLATE
    rows = [{"prompt": [user(str(i))], "kind": kind} for i, kind in enumerate(["none", "one", "one", "none", None])]
    prompts = load_prompts(rows, chat_tokenizer, tools_of=lambda columns: [TOOL] if columns["kind"] == "one" else ())
    plain = load_prompts(rows, chat_tokenizer)
    tool = (15, 8, 12, 15)
    assert [prompt.token_ids for prompt in prompts] == [
        (tool if i in (1, 2) else ()) + prompt.token_ids for i, prompt in enumerate(plain)
    ]


def test_tools_of_text_prompts_need_chat(chat_tokenizer: Any) -> None:
    with pytest.raises(InputError, match=r"tools need conversations.*set chat=true \(--chat\)"):
        load_prompts([{"prompt": "47"}], chat_tokenizer, tools_of=lambda columns: [TOOL])
    [prompt] = load_prompts([{"prompt": "47"}], chat_tokenizer, chat=True, tools_of=lambda columns: [TOOL])
    assert prompt.token_ids == (1, 14, 8, 11, 15)
    assert load_prompts([{"prompt": "47"}], chat_tokenizer, tools_of=lambda columns: ())[0].token_ids == (1, 8, 11)


def test_tools_are_not_given_twice(chat_tokenizer: Any) -> None:
    with pytest.raises(InputError, match="chat_template_kwargs has 'tools'"):
        load_prompts(
            [{"prompt": [user("47")]}],
            chat_tokenizer,
            chat_template_kwargs={"tools": [TOOL]},
            tools_of=lambda columns: [TOOL],
        )
