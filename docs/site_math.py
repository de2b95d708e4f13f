"""Formulas of the site: TeX of the pages becomes MathML at build time, which browsers show without a script."""

import re
from typing import Any

from latex2mathml.converter import convert

BLOCK = re.compile(r"^```math\n(.*?)^```$", re.M | re.S)
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.M | re.S)
INLINE = re.compile(r"(?<![\\$\w])\$(?=\S)([^$\n]+(?:\n[^$\n]+)?)(?<=\S)\$(?![\w$])")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with its formulas as MathML. GitHub shows the same TeX itself."""
    text = BLOCK.sub(lambda match: f"\n{mathml(match[1], 'block')}\n", markdown)
    parts = CODE.split(text)  # code, where a dollar is a dollar, has the odd places
    parts[::2] = [INLINE.sub(lambda match: mathml(match[1], "inline"), part) for part in parts[::2]]
    return "".join(parts)


def mathml(tex: str, display: str) -> str:
    made = " ".join(convert(" ".join(tex.split()), display=display).split("\n"))
    return f'<div class="formula">{made}</div>' if display == "block" else made
