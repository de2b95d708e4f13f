"""Markdown of GitHub for mkdocs: TeX becomes MathML, which browsers show without a script, and `\\|` in code a bar."""

import re
from typing import Any

from latex2mathml.converter import convert

BLOCK = re.compile(r"^```math\n(.*?)^```$", re.M | re.S)
BAR_IN_CODE = re.compile(r"`[^`\n]*\\\|[^`\n]*`")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.M | re.S)
INLINE = re.compile(r"(?<![\\$\w])\$(?=\S)([^$\n]+(?:\n[^$\n]+)?)(?<=\S)\$(?![\w$])")


def on_page_markdown(markdown: str, **_: Any) -> str:
    text = BLOCK.sub(lambda match: f"\n{mathml(match[1], 'block')}\n", markdown)
    text = BAR_IN_CODE.sub(lambda match: match[0].replace("\\|", "|"), text)
    parts = CODE.split(text)  # code, where a dollar is a dollar, has the odd places
    parts[::2] = [INLINE.sub(lambda match: mathml(match[1], "inline"), part) for part in parts[::2]]
    return "".join(parts)


def mathml(tex: str, display: str) -> str:
    made = " ".join(convert(" ".join(tex.split()), display=display).split("\n"))
    return f'<div class="formula">{made}</div>' if display == "block" else made
