"""Text that comes from models and data sets: its answer in tags, and a form that is safe to print."""

import unicodedata
from typing import Any


def completion_text(completion: Any) -> str:
    """The text of a completion, be it a string or a list of messages (then of the last one)."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else ""
    if isinstance(content, list):  # parts of a multimodal message
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content or ""


def text_inside(text: str, tag: str) -> str | None:
    """The content of the last `<tag>...</tag>`, or None without one.

    Searching from the end takes linear time; the usual regular expression is quadratic on hostile text.

    >>> text_inside("<answer>1</answer> no, <answer>2</answer>", "answer")
    '2'
    """
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, end) if end >= 0 else -1
    return text[start + len(tag) + 2 : end] if start >= 0 else None


def printable(text: str, keep: str = "\n\t") -> str:
    r"""Text that is safe on a terminal: control, format and unassigned characters as escapes, but for those in `keep`.

    >>> print(printable("\x1b[2J Caf\u00e9\u202e"))
    \x1b[2J Café\u202e
    """
    return "".join(
        # A space of another width is not printable to Python, and harmless.
        c if c.isprintable() or c in keep or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text
    )
