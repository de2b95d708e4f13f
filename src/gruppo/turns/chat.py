"""ChatCodec: conversations as token ids: the first prompt, and the piece between two sampled turns.

What was sampled is never decoded and encoded again. The piece between two turns comes from a stand-in conversation:
what a chat template writes after the assistant's turn does not depend on what that turn said.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

from gruppo.errors import InputError
from gruppo.task.template import render, render_chat
from gruppo.turns.calls import Form, call_of, form_of, unreadable, with_ids
from gruppo.turns.environment import ToolSchema
from gruppo.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "zqMARKqz"
"""What the assistant says in a stand-in conversation."""
ANSWER = "3141592653"
"""What it is answered there: digits, which every vocabulary has."""

Role = Literal["tool", "user"]
"""Whose messages answer the assistant."""


@dataclass(frozen=True, slots=True)
class _End:
    """Token that a template ends the assistant's turn with."""

    text: str
    id: int
    is_of_turn: bool
    """False if it begins the next message, whichever turn that is."""


class ChatCodec:
    """Token ids of conversations, by the chat template of a tokenizer."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        stop_ids: Sequence[int],
        tools: Sequence[ToolSchema] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer: Any = tokenizer
        self._stop_ids = frozenset(stop_ids)
        added = self._tokenizer.added_tokens_decoder.items()
        self._special_ids = {*self._tokenizer.all_special_ids, *(token for token, each in added if each.special)}
        self._specials = re.compile("|".join(re.escape(self._decoded([token])) for token in self._special_ids))
        self._tools = tuple(tools)
        self._kwargs = dict(template_kwargs or {})
        self._ends: dict[Role, _End] = {}
        self._wants_text = self._prints_text_alone()
        self._asked = self._text_if_any([_asked()], goes_on=True)
        self._has_thoughts = any("</think>" in each for each in (tokenizer.get_vocab(), str(tokenizer.chat_template)))
        self._form = self._form_of_calls() if self._tools else None

    def first(self, messages: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, ...], str]:
        """Ids and text of a prompt, up to where the assistant's turn begins."""
        return render_chat(self._shown(messages), self._tokenizer, self._kwargs, self._tools)

    def between(self, last: int | None, tail: Sequence[Message]) -> tuple[int, ...]:
        """Ids after a sampled turn, up to where the next one begins.

        Args:
            last: the token that ended the turn; None if it was cut, and the piece begins with its end token.
            tail: all messages that answer the turn, in order.
        """
        role: Role = "tool" if any(message["role"] == "tool" for message in tail) else "user"
        if role not in self._ends:
            self._ends[role] = self._end_of_turn(role)
        end = self._ends[role]
        _, found, piece = self._after_turn([_asked()], tail).partition(end.text)
        if not found:
            raise self._unfit(f"does not end the assistant's turn with {end.text!r} before {len(tail)} messages")
        first, *ids = self._ids(end.text + piece)  # some end tokens swallow the space after them
        if first != end.id:
            raise self._unfit(f"does not encode its end token {end.text!r} as one token")
        is_ended = last == end.id or (last in self._stop_ids and end.is_of_turn)
        return tuple(ids) if is_ended else (end.id, *ids)

    def parse(self, ids: Sequence[int]) -> Message:
        """The message of a sampled turn. A call that cannot be read stays among its `tool_calls`, with an `error`."""
        is_ended = bool(ids) and ids[-1] in self._stop_ids
        unread = []
        if self._has_parser:
            try:
                return self._parsed(self._decoded(ids))
            except (ValueError, KeyError, TypeError, RecursionError) as error:  # arguments that are no JSON
                unread = unreadable(f"the call cannot be read: {(str(error).splitlines() or [''])[0]}")
        thought, text = self._thought(self._decoded(ids[:-1] if is_ended else ids))
        text, calls = self._form(text, self._tools) if self._form else (text, [])
        message: Message = {"role": "assistant", "content": self._specials.sub("", text)}
        if thought:
            message["reasoning_content"] = self._specials.sub("", thought)
        if calls := calls or unread:
            message["tool_calls"] = calls
        return message

    def keeps(self, role: Role, thinks: bool) -> bool:
        """True if the template writes earlier turns of a longer conversation as they were.

        Args:
            role: whose messages answer the assistant.
            thinks: the assistant's turns have thoughts, which many templates drop once others follow.
        """
        thought = "zqTHOUGHTqz"
        own: dict[str, Any] = {"role": "assistant", "content": "" if role == "tool" else MARK}
        if thinks:
            keyed = own | {"reasoning_content": thought, "thinking": thought}
            inline = own | {"content": f"<think>\n{thought}\n</think>\n\n{own['content']}"}
            own = keyed if thought in self._text_if_any([_asked(), keyed], goes_on=False) else inline
        tail = [self._answer(role)]
        said: list[Mapping[str, Any]] = [_asked()]
        texts: list[str] = []
        for turn in range(3):
            texts.append(self._text(said, goes_on=True))
            said += [own | ({"tool_calls": self._calls(tail, MARK)} if role == "tool" else {}), *tail]
            if thinks and texts[-1].count(thought) < turn:
                return False
        return all(after.startswith(before) for before, after in pairwise(texts))

    def check(self, role: Role) -> None:
        """Raise InputError if conversations in which messages of this role answer the assistant cannot be bridged."""
        tail = [self._answer(role)]
        ids = self.between(None, tail)
        text = self._decoded(ids)
        if ANSWER not in text:
            raise self._unfit(f"leaves out messages of the role {role!r}")
        if self._ids(text) != ids:
            raise self._unfit("writes text that its tokenizer decodes and encodes to other tokens")
        own = self._call_of("well") if role == "tool" else {"role": "assistant", "content": "well"}
        if self._after_turn([_asked(), own, *tail], tail) != self._after_turn([_asked()], tail):
            raise self._unfit(f"writes a later message of the role {role!r} otherwise than the first")
        given = self._some_arguments
        if role == "tool" and self._tools and (written := self._written_call(given, ANSWER)):
            calls = self.parse(self._ids(written)).get("tool_calls", ())
            if [call["function"] for call in calls] != [{"name": self._a_name, "arguments": given}]:
                raise self._unfit(
                    f"writes calls that cannot be read back: {written[:80]!r}", "set tokenizer.response_template"
                )

    # Templates.

    def _text(self, messages: Sequence[Mapping[str, Any]], *, goes_on: bool) -> str:
        shown = self._shown(messages)
        return render(shown, self._tokenizer, self._kwargs, self._tools, add_generation_prompt=goes_on)

    def _shown(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages as templates take them: without keys of our own, arguments as the template prints them."""
        shown = [{key: value for key, value in message.items() if key != "is_error"} for message in messages]
        for message in shown:
            if calls := message.get("tool_calls"):
                message["tool_calls"] = [self._shown_call(call) for call in calls]
        return shown

    def _shown_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        read = call_of(call)
        given = {key: value for key, value in call.items() if key != "error"}
        if "error" in read:  # left to the template
            return given
        function = read["function"]
        if self._wants_text:
            function = function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        return given | {"function": function}

    def _calls(self, tail: Sequence[Mapping[str, Any]], said: str) -> list[dict[str, Any]]:
        """Calls that a tail answers."""
        answers = [message for message in tail if message["role"] == "tool"]
        calls = [
            {"type": "function", "function": {"name": answer.get("name") or self._a_name, "arguments": {"x": said}}}
            | ({"id": answer["tool_call_id"]} if answer.get("tool_call_id") else {})
            for answer in answers
        ]
        return with_ids(calls)

    def _stand_in(self, history: Sequence[Mapping[str, Any]], tail: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        """A conversation with a turn that the tail answers, and the mark that ends what was said in it."""
        mark = MARK
        while mark in str(tail):
            mark += "z"
        calls = self._calls(tail, mark)
        ids = iter([call["id"] for call in calls])
        tail = [{"tool_call_id": next(ids)} | dict(each) if each["role"] == "tool" else each for each in tail]
        # Templates differ: some leave out what is said beside a call, some the call, some take one call in a turn.
        turns = [("", calls), (mark, calls[:1])] if calls else [(mark, [])]
        refusal, text = None, ""
        for content, called in turns:
            own = {"role": "assistant", "content": content} | ({"tool_calls": called} if called else {})
            try:
                text = self._text([*history, own, *tail], goes_on=True)
            except InputError as error:
                refusal = refusal or error
                continue
            if mark in text:
                break
        if refusal and not text:
            raise refusal
        return text, mark

    def _after_turn(self, history: Sequence[Mapping[str, Any]], tail: Sequence[Mapping[str, Any]]) -> str:
        """What the template writes after a turn that the tail answers, up to where the next one begins."""
        text, mark = self._stand_in(history, tail)
        _, found, after = text.rpartition(mark)
        if not found:
            raise self._unfit("drops what the assistant said")
        return after

    def _end_of_turn(self, role: Role) -> _End:
        """The end of the assistant's turn: the first end token after what it said."""
        tail = [self._answer(role)]
        try:
            self._stand_in([_asked()], tail)
        except InputError as error:
            raise self._unfit(f"does not take messages of the role {role!r} after the assistant's: {error}") from error
        before = self._after_turn([_asked()], tail).partition(ANSWER)[0]
        own = self._call_of(MARK) if role == "tool" else {"role": "assistant", "content": MARK}
        closed = self._text_if_any([_asked(), own], goes_on=False).rpartition(MARK)[2]
        found = self._first_of(before, self._stop_ids)
        closes = self._first_of(closed, self._stop_ids)
        if found:
            return _End(found[1], found[2], is_of_turn=closes is not None)
        if closes:  # a template may write another end where other turns follow, and then the beginning of the next
            same = closed[: closes[0]]
            other = self._first_of(before.removeprefix(same), self._special_ids) if before.startswith(same) else None
            begins = self._first_of(before[len(same + other[1]) :].lstrip(), self._special_ids) if other else None
            if other and begins and other[0] == begins[0] == 0:
                return _End(other[1], other[2], is_of_turn=True)
        ends = ", ".join(sorted(repr(self._decoded([token])) for token in self._stop_ids)) or "none"
        raise self._unfit(f"ends the assistant's turn with none of the model's end tokens ({ends})")

    def _first_of(self, text: str, ids: Any) -> tuple[int, str, int] | None:
        """The place, text and id of the token that comes first in a text."""
        texts = [(self._decoded([token]), token) for token in ids]
        return min(((text.find(each), each, token) for each, token in texts if each and each in text), default=None)

    def _prints_text_alone(self) -> bool:
        """True if the template prints the arguments of calls only where they are JSON text."""
        said = [_asked(), self._call_of(MARK), self._answer("tool")]
        for self._wants_text in (False, True):
            text = self._text_if_any(said, goes_on=True)
            if text and str({"x": MARK}) not in text:
                return self._wants_text
        return False

    def _answer(self, role: Role) -> Message:
        """A message that answers the assistant in a stand-in."""
        if role == "user":
            return {"role": role, "content": ANSWER}
        return {"role": role, "content": ANSWER, "name": self._a_name, "tool_call_id": "call00000"}

    def _call_of(self, said: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A turn with a call in a stand-in."""
        call = {"type": "function", "function": {"name": self._a_name, "arguments": arguments or {"x": said}}}
        return {"role": "assistant", "content": "", "tool_calls": with_ids([call])}

    def _written_call(self, arguments: Mapping[str, Any], mark: str) -> str:
        """The turn of a call, as the template writes it with its end token; empty if it writes none.

        Args:
            mark: stands in what it writes of the arguments.
        """
        text = self._text_if_any([_asked(), self._call_of(mark, arguments)], goes_on=False)
        begun = self._asked.rstrip()
        written = text[len(begun) :] if text.startswith(begun) else ""
        if mark not in written:
            return ""
        found = self._first_of(written, self._stop_ids)
        return written[: found[0] + len(found[1])] if found else written

    def _form_of_calls(self) -> Form | None:
        written = self._written_call({"x": MARK}, MARK)
        found = self._first_of(written, self._stop_ids)
        written = (written[: found[0]] if found else written).strip()
        try:
            return form_of(self._tokenizer, self._tools, written, self._a_name, {"x": MARK})
        except InputError:
            if self._has_parser:
                return None
            raise

    def _text_if_any(self, messages: Sequence[Mapping[str, Any]], *, goes_on: bool) -> str:
        """The text of a conversation; empty if the template refuses it."""
        try:
            return self._text(messages, goes_on=goes_on)
        except InputError:
            return ""

    @property
    def _a_name(self) -> str:
        """The name of a tool, for stand-ins."""
        return str(self._tools[0]["function"]["name"]) if self._tools else "tool"

    @property
    def _some_arguments(self) -> dict[str, Any]:
        """Arguments of the first tool: a vocabulary may be made for its own calls."""
        taken = self._tools[0]["function"].get("parameters", {}).get("properties", {}) if self._tools else {}
        kinds = {name: each.get("type") for name, each in taken.items() if isinstance(each, Mapping)}
        return {name: int(ANSWER) if kind == "integer" else ANSWER for name, kind in kinds.items()} or {"x": ANSWER}

    @property
    def _has_parser(self) -> bool:
        return bool(getattr(self._tokenizer, "response_template", None))

    # Turns.

    def _parsed(self, text: str) -> Message:
        """A turn read by the tokenizer's own response template."""
        found = self._tokenizer.parse_response(text, prefix=self._asked, tools=list(self._tools) or None)
        message: Message = {"role": "assistant", "content": str(found.get("content") or "")}
        if thought := found.get("reasoning_content") or found.get("thinking"):
            message["reasoning_content"] = str(thought)
        if calls := found.get("tool_calls"):
            message["tool_calls"] = with_ids([call_of(call) for call in calls])
        return message

    def _thought(self, text: str) -> tuple[str, str]:
        """The thought that a turn begins with, and what is said after it."""
        if not self._has_thoughts:
            return "", text
        begins, ends = "<think>", "</think>"
        thought, closed, said = text.partition(ends)
        if closed:
            return thought.strip().removeprefix(begins).strip(), said.strip()
        is_open = text.lstrip().startswith(begins) or self._asked.rstrip().endswith(begins)
        return (text.strip().removeprefix(begins).strip(), "") if is_open else ("", text)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _unfit(self, what: str, remedy: str = "") -> InputError:
        name = PurePath(str(getattr(self._tokenizer, "name_or_path", ""))).name or "this tokenizer"
        remedy = remedy or "set tokenizer.chat_template to one that takes such conversations"
        return InputError(f"the chat template of {name} {what}; {remedy}, or take another model")


def _asked() -> dict[str, str]:
    return {"role": "user", "content": "x"}
