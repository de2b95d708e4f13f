"""environments_of: tools, and classes of TRL's, Gymnasium's or gruppo's kind, as the environments of a run."""

import asyncio
import inspect
import math
import threading
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from gruppo.errors import GruppoError, InputError
from gruppo.process.by_name import import_object
from gruppo.process.streams import printable
from gruppo.turns.ask import CallThread, is_async
from gruppo.turns.environment import COLUMN, Answer, Environment, Environments, ToolSchema
from gruppo.turns.tools import Toolbox, ToolEnvironment, cut, encodable
from gruppo.types import Message

_KINDS = (
    "give a subclass of gruppo.turns.Environment, a class whose public methods are tools beside reset (as TRL has "
    "it), or one with reset and step (as Gymnasium has it)"
)


def environments_of(
    environment: Any = None, tools: Sequence[Callable[..., Any] | str] = (), factory: Any = None
) -> Environments | None:
    """The environments of a run; None if there are no turns.

    Args:
        environment: a class or a function that makes an object, `module:name` of one, or a dict of them, among which
            a row's column `environment` chooses. Its kind is seen from the object.
        tools: functions, or `module:function`. A class of TRL's kind takes them beside its own.
        factory: TRL's `environment_factory`: as `environment`, but every public method is a tool, also `step`.
    """
    toolbox = Toolbox(tools or ())
    if environment is not None and factory is not None:
        raise InputError("environment and environment_factory were both given; give one, or a dict of both by name")
    given = factory if environment is None else environment
    if given is None:
        return Environments({"": partial(ToolEnvironment, toolbox)}, {"": toolbox.schemas}) if tools else None
    if isinstance(given, Mapping) and (not given or not all(isinstance(key, str) and key for key in given)):
        raise InputError(f"environments by name must have names, which are text, got the keys {list(given)}")
    by_name: Mapping[str, Any] = given if isinstance(given, Mapping) else {"": given}
    tried = {
        key: _try(_maker(each), each, toolbox, is_of_trl=factory is not None, is_chosen=bool(key))
        for key, each in by_name.items()
    }
    return Environments(
        factories={key: make for key, (make, _, _) in tried.items()},
        tools={key: schemas for key, (_, schemas, _) in tried.items()},
        gives_reward=any(gives for _, _, gives in tried.values()),
    )


class Adapter(Environment):
    """Environment around an object of the user's, which one thread makes at the first `reset` and calls from then on.

    A call that was given up may go on for ever: it keeps its thread and its object, and the next `reset` makes others.
    """

    closer: ClassVar[str] = "close"
    """Method of the object that releases what it holds, if it has one."""
    _owners: ClassVar[WeakValueDictionary[int, "Adapter"]] = WeakValueDictionary()
    """The adapter of each object, by the object's id."""

    def __init__(
        self, make: Callable[[], Any], toolbox: Toolbox, schemas: Sequence[ToolSchema], is_chosen: bool
    ) -> None:
        self.tools = schemas
        self._instance: Any = None
        self._make = make
        self._given = toolbox
        self._is_chosen = is_chosen
        self._thread = CallThread()

    @staticmethod
    def schemas(instance: Any, toolbox: Toolbox) -> Sequence[ToolSchema]:
        """The tools of such an object, with those that were given beside it."""
        if toolbox.schemas:
            raise InputError(
                f"tools were given beside the environment {type(instance).__name__}, which answers turns itself, so "
                "that nobody would call them; leave tools out, or make the environment a class of TRL's kind"
            )
        return ()

    @staticmethod
    def rewards(instance: Any) -> bool:
        """Whether such an object rewards its episodes."""
        return True

    @property
    def instance(self) -> Any:
        """The user's object."""
        if self._instance is None:
            raise RuntimeError("an episode begins with reset")
        return self._instance

    async def open(self) -> Any:
        """The user's object, made if there is none."""
        if self._instance is None:
            instance = await self.ask(self._make)
            other = self._owners.get(id(instance))
            if other is not None and other is not self and other._instance is instance:
                raise InputError(
                    f"environment {type(instance).__name__}: the same object was made for two episodes, which play at "
                    "a time; let the function make a new one at each call"
                )
            self._owners[id(instance)], self._instance = self, instance
        return self._instance

    async def ask(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call code of the user's in the object's thread, or await it."""
        try:
            return await self._thread.ask(function, *args, **kwargs)
        except asyncio.CancelledError:
            if not is_async(function):
                close = getattr(self._instance, self.closer, None)
                if close is not None and not is_async(close):
                    self._thread.leave(close)
                self._thread, self._instance = CallThread(), None
            raise

    async def reward(self) -> float | None:
        return None

    async def close(self) -> None:
        instance, self._instance = self._instance, None
        if (close := getattr(instance, self.closer, None)) is not None:
            await self.ask(close)


class OwnEnvironment(Adapter):
    """A subclass of gruppo's `Environment`."""

    @staticmethod
    def schemas(instance: Environment, toolbox: Toolbox) -> Sequence[ToolSchema]:
        Adapter.schemas(instance, toolbox)
        for each in instance.tools:
            if not isinstance(each, Mapping) or "function" not in each:
                raise InputError(
                    f"tools of {type(instance).__name__} must be schemas, got {each!r}; "
                    "write tools = [gruppo.turns.tool_schema(function)]"
                )
        return tuple(instance.tools)

    @staticmethod
    def rewards(instance: Environment) -> bool:
        return instance.gives_reward

    async def reset(self, row: Mapping[str, Any], seed: int) -> list[Message] | None:
        messages = await self.ask((await self.open()).reset, row, seed)
        if messages is None:
            return None
        return _prompt(messages, f"reset of {self._name}")

    async def step(self, message: Message) -> Answer:
        answer = await self.ask(self.instance.step, message)
        if not isinstance(answer, Answer):
            raise InputError(f"step of {self._name} returned {_shown(answer)}; return gruppo.turns.Answer(...)")
        reward = self._declared(answer.reward, "step")
        messages = _answers(answer.messages, f"step of {self._name}")
        return Answer(messages=messages, reward=reward, is_over=answer.is_over)

    async def reward(self) -> float | None:
        return self._declared(await self.ask(self.instance.reward), "reward")

    def _declared(self, value: Any, method: str) -> float | None:
        """A reward, which the class must have said it gives: else no reward of the run would read it."""
        reward = _number(value, f"{method} of {self._name}")
        if reward is not None and not self.instance.gives_reward:
            raise InputError(f"{method} of {self._name} gave a reward; set gives_reward = True in {self._name}")
        return reward

    @property
    def _name(self) -> str:
        return type(self.instance).__name__


class TRLEnvironment(Adapter):
    """A class as TRL's `environment_factory` takes it: `reset(**row)`, tools as methods, and perhaps `get_reward()`."""

    closer = ""  # a public method `close` is a tool

    @staticmethod
    def schemas(instance: Any, toolbox: Toolbox) -> Sequence[ToolSchema]:
        return Toolbox([*toolbox.functions.values(), *_methods(instance)]).schemas

    @staticmethod
    def rewards(instance: Any) -> bool:
        return hasattr(instance, "get_reward")

    async def open(self) -> Any:
        if self._instance is None:
            self._toolbox = Toolbox([*self._given.functions.values(), *_methods(await super().open())])
        return self._instance

    async def reset(self, row: Mapping[str, Any], seed: int) -> list[Message] | None:
        instance = await self.open()
        columns = {key: value for key, value in row.items() if not (self._is_chosen and key == COLUMN)}
        text = await self.ask(instance.reset, **columns)
        if text is None:
            return None
        return _with_text(row, _text(text, f"reset of {type(instance).__name__}", "text, or None"), "")

    async def step(self, message: Message) -> Answer:
        return await self._toolbox.answer(message, self.ask)

    async def reward(self) -> float | None:
        if not self.rewards(self.instance):
            return None
        return _number(await self.ask(self.instance.get_reward), f"get_reward of {type(self.instance).__name__}")


class GymEnvironment(Adapter):
    """A class of Gymnasium's kind, whose observations are text.

    `reset(seed=) -> (text, info)` and `step(text) -> (text, reward, terminated, truncated, info)`, or as SkyRL has it:
    `init(messages) -> (messages, info)` and `step(text) -> {"observations": [...], "reward": ..., "done": ...}`.
    """

    async def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        instance = await self.open()
        if not hasattr(instance, "reset"):
            messages, _ = await self.ask(instance.init, _messages(row))
            return _prompt(messages, f"init of {type(instance).__name__}")
        takes_row = "options" in inspect.signature(instance.reset).parameters
        seed &= 0x7FFFFFFF  # NumPy takes no more
        returned = await self.ask(instance.reset, seed=seed, **({"options": dict(row)} if takes_row else {}))
        text = returned[0] if isinstance(returned, tuple) else returned
        return _with_text(row, _text(text, f"reset of {type(instance).__name__}", "(text, info)"), "\n\n")

    async def step(self, message: Message) -> Answer:
        where = f"step of {type(self.instance).__name__}"
        returned = await self.ask(self.instance.step, message["content"])
        if isinstance(returned, Mapping):
            observed, reward, is_over = returned["observations"], returned["reward"], returned["done"]
        elif isinstance(returned, tuple) and len(returned) == 5:
            observed, reward, is_over = returned[0], returned[1], returned[2] or returned[3]
        else:
            raise InputError(f"{where} returned {_shown(returned)}; return (text, reward, terminated, truncated, info)")
        reward = _number(reward, where)
        if is_over:
            return Answer(reward=reward, is_over=True)
        if isinstance(observed, list):
            return Answer(messages=_answers(observed, where), reward=reward)
        text = _text(observed, where, "text as its first value")
        return Answer(messages=(Message(role="user", content=cut(text)),), reward=reward)


def _maker(given: Any) -> Callable[[], Any]:
    """What makes an object, from a class, a function or the name of one."""
    make = import_object(given, "environment") if isinstance(given, str) else given
    if isinstance(make, Environment) or not callable(make):
        raise InputError(
            f"environment {given!r} is one object of type {type(make).__name__}, and a run plays many episodes at a "
            "time; give the class, or a function that makes one"
        )
    return make


def _try(
    make: Callable[[], Any], given: Any, toolbox: Toolbox, *, is_of_trl: bool, is_chosen: bool
) -> tuple[Callable[[], Environment], Sequence[ToolSchema], bool]:
    """A factory of the adapter, its tools and whether it gives a reward, from one object that is made and closed."""
    name = given if isinstance(given, str) else getattr(make, "__qualname__", repr(make))

    async def trial() -> tuple[Callable[[], Environment], Sequence[ToolSchema], bool]:
        thread = CallThread()
        try:
            instance = await thread.ask(make)
        except GruppoError:
            raise
        except Exception as error:  # of the user's code
            raise InputError(f"environment {name} cannot be made: {_last_line(error)}") from error
        kind = _kind(instance, name, is_of_trl)
        try:
            schemas, gives_reward = kind.schemas(instance, toolbox), kind.rewards(instance)
        finally:
            if (close := getattr(instance, kind.closer, None)) is not None:
                try:
                    await thread.ask(close)
                except Exception as error:  # of the user's code
                    raise InputError(f"environment {name} cannot be closed: {_last_line(error)}") from error
        return partial(kind, make, toolbox, schemas, is_chosen), schemas, gives_reward

    return _wait(trial())


def _kind(instance: Any, name: str, is_of_trl: bool) -> type[Adapter]:
    if isinstance(instance, Environment):
        return OwnEnvironment
    has = {method for method in ("reset", "init", "step") if callable(getattr(instance, method, None))}
    if "step" in has and len(has) > 1 and not is_of_trl:
        return GymEnvironment
    if "reset" in has:
        return TRLEnvironment
    missing = "no reset" if "step" in has or is_of_trl else "neither reset nor step"
    raise InputError(f"environment {name} makes an object of type {type(instance).__name__} with {missing}; {_KINDS}")


def _wait(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, also where an event loop runs, as in a notebook."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(asyncio.run(coroutine))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    for error in errors:
        raise error
    return results[0]


def _methods(instance: Any) -> list[Callable[..., Any]]:
    """The tools of an object of TRL's kind. They are read from its class: reading the object runs its properties."""
    functions = inspect.getmembers(type(instance), inspect.isfunction)
    names = [name for name, _ in functions if not name.startswith("_") and name not in ("reset", "get_reward")]
    return [getattr(instance, name) for name in names]


def _messages(row: Mapping[str, Any]) -> list[Message]:
    """The prompt of a row as messages."""
    prompt = row.get("prompt") or []
    return [Message(role="user", content=prompt)] if isinstance(prompt, str) else list(prompt)


def _with_text(row: Mapping[str, Any], text: str, between: str) -> list[Message]:
    """A row's prompt with more text in its last message, or in a user's message of its own."""
    messages = _messages(row)
    if messages and not text:
        return messages
    if not messages or messages[-1]["role"] != "user":
        return [*messages, Message(role="user", content=text)]
    before = messages[-1]["content"]
    return [*messages[:-1], {**messages[-1], "content": f"{before}{between}{text}" if before else text}]


def _answers(messages: Any, where: str) -> tuple[Message, ...]:
    """The messages of an answer, none longer than one may be."""
    if not isinstance(messages, list | tuple):
        raise InputError(f"{where} answered with {_shown(messages)}; give a list of messages")
    for each in messages:
        if not isinstance(each, Mapping) or not all(isinstance(each.get(key), str) for key in ("role", "content")):
            raise InputError(f"{where} answered with {_shown(each)}; a message has a role and content, which are text")
        if each["role"] == "assistant":  # a reward would take it for what the policy said
            raise InputError(f"{where} answered with a message of the role 'assistant', the policy's own; give 'user'")
    return tuple(_with_texts(each, cut) for each in messages)


def _prompt(messages: Any, where: str) -> list[Message]:
    """The messages of a prompt, whose text can be encoded."""
    is_list = isinstance(messages, list | tuple) and bool(messages)
    if not is_list or not all(isinstance(each, Mapping) for each in messages):
        raise InputError(f"{where} returned {_shown(messages)}; return a list of messages, or None")
    for each in messages:
        if not isinstance(each.get("role"), str) or not (each.get("content") is not None or each.get("tool_calls")):
            raise InputError(f"{where} returned a message without a role or content: {_shown(each)}; give it both")
    return [_with_texts(each, encodable) for each in messages]


def _with_texts(message: Mapping[str, Any], change: Callable[[str], str]) -> Any:
    return {key: change(value) if isinstance(value, str) else value for key, value in message.items()}


def _text(value: Any, where: str, wanted: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where} returned {_shown(value)}; return {wanted}")
    return encodable(value)


def _number(value: Any, where: str) -> float | None:
    """A reward, which may be of NumPy or torch."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{where} gave the reward {_shown(value)}; give a finite number, or None")
    return number


def _shown(value: Any) -> str:
    text = printable(repr(value), keep="")
    return f"{type(value).__name__} {text[:80]}{'...' if len(text) > 80 else ''}"


def _last_line(error: Exception) -> str:
    return printable(traceback.format_exception_only(error)[-1].strip())
