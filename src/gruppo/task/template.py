"""Chat templates, rendered in a child process with limits on time and memory.

A template comes with the model and is a program: transformers keeps it from the machine, but not from running for ever
or filling the memory.
"""

import gc
import json
import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gruppo.errors import InputError

SECONDS = 10.0
"""For one conversation; a template needs about a millisecond."""
MEMORY = 2**30
"""Bytes that the child may take beyond what this process has."""
MAX_BYTES = 16 * 2**20
"""Of a rendered conversation."""
REMEDY = "use the template of another model: tokenizer.chat_template = ..., or a folder with another chat_template"


def render_all(
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    tokenizer: Any,
    options: Mapping[str, Any],
    *,
    add_generation_prompt: bool = True,
) -> list[str | InputError]:
    """The text of each conversation, or why the template gives none.

    Args:
        add_generation_prompt: end where the assistant's turn begins; False: the conversation is complete.
    """
    options = {**options, "tokenize": False, "add_generation_prompt": add_generation_prompt}
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child calls the template alone, no thread of ours
        pid = os.fork()
    if pid == 0:
        _render(conversations, tokenizer, options, read, write)
    os.close(write)
    results: list[str | InputError] = []
    try:
        with open(read, "rb", buffering=0) as pipe:
            for _ in conversations:
                answer = _next(pipe)
                results.append(
                    InputError(f"the chat template {answer['error']}") if "error" in answer else answer["text"]
                )
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return results


def _next(pipe: Any) -> dict[str, str]:
    """The next answer of the child: four bytes with its length, then JSON."""
    ends = time.monotonic() + SECONDS
    size = int.from_bytes(_exactly(pipe, 4, ends))
    return json.loads(_exactly(pipe, size, ends))


def _exactly(pipe: Any, size: int, ends: float) -> bytes:
    found = bytearray()
    while len(found) < size:
        ready, _, _ = select.select([pipe], [], [], max(ends - time.monotonic(), 0))
        if not ready:
            raise InputError(f"the chat template did not end within {SECONDS:g} s for one conversation; {REMEDY}")
        part = pipe.read(size - len(found))
        if not part:
            raise InputError(f"the chat template ended its process, by too much memory or a fault; {REMEDY}")
        found += part
    return bytes(found)


def _render(conversations: Any, tokenizer: Any, options: Mapping[str, Any], read: int, write: int) -> None:
    """The child: it answers and ends without any clearing up, which is the parent's."""
    try:
        gc.disable()
        os.close(read)
        _limit_memory()
        for messages in conversations:
            payload = json.dumps(_answer(messages, tokenizer, options)).encode()
            left = memoryview(len(payload).to_bytes(4) + payload)
            while left:
                left = left[os.write(write, left) :]
    finally:
        os._exit(0)


def _answer(messages: Any, tokenizer: Any, options: Mapping[str, Any]) -> dict[str, str]:
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(messages, **options)
    except TemplateError as error:
        return {"error": f"refuses the conversation: {str(error)[:1000]}"}
    except Exception as error:
        return {"error": f"fails on the conversation: {type(error).__name__}: {str(error)[:1000]}; {REMEDY}"}
    if len(text) > MAX_BYTES:
        return {"error": f"makes {len(text):,} characters of the conversation, limit {MAX_BYTES:,}; {REMEDY}"}
    if any("\ud800" <= character <= "\udfff" for character in text):
        return {"error": f"makes half a character (a lone surrogate) of the conversation; {REMEDY}"}
    return {"text": text}


def _limit_memory() -> None:
    with suppress(OSError, ValueError):  # no /proc, or a lower limit already
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
