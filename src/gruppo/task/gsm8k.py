"""GSM8K rows (`question`, `answer`) as prompts that ask for `#### number` at the end.

The `answer` column stays whole, worked steps and all; the reward takes the number after `####` from it. The
file is the user's: `gsm8k:PATH` in a config, with `?style=plain` for models without a chat template.
"""

from dataclasses import replace
from typing import Any, Literal

from gruppo.errors import InputError
from gruppo.task.dataset import BadRowPolicy, DroppedRow, Rows, check_dropped, read_rows

INSTRUCTION = "Solve the problem step by step. End with a line that holds only #### and the final number."

Style = Literal["chat", "plain"]


def gsm8k_prompt(question: str, style: Style = "chat") -> str | list[dict[str, str]]:
    """The question with the instruction: a conversation, or text that ends where the solution begins."""
    if style == "chat":
        return [{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}]
    if style == "plain":
        return f"{INSTRUCTION}\n\nProblem: {question}\nSolution:"
    raise InputError(f"style must be 'chat' or 'plain', got {style!r}")


def gsm8k_rows(source: Any, *, style: Style = "chat", on_bad_row: BadRowPolicy = "fail") -> Rows:
    """Rows with `prompt` and `answer` from anything that `read_rows` reads and that has GSM8K's columns."""
    raw = read_rows(source, prompt_column="question", on_bad_row=on_bad_row, label="gsm8k")
    rows, dropped = [], list(raw.dropped)
    for row in raw.rows:
        question, answer = row.values["prompt"], row.values.get("answer")
        if not isinstance(question, str):
            dropped.append(DroppedRow(row.place, "question must be a string"))
        elif not isinstance(answer, str) or "####" not in answer:
            dropped.append(DroppedRow(row.place, "answer must be text with '#### number'"))
        else:
            rows.append(replace(row, values={**row.values, "prompt": gsm8k_prompt(question, style)}))
    check_dropped(raw.source, dropped, len(rows) + len(dropped), on_bad_row)
    return replace(raw, rows=tuple(rows), dropped=tuple(dropped))
