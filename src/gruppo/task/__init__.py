"""Prompts: rows of a file become tokenised prompts; with the embedded task and its model (docs/data.md).

Importing this package imports neither torch nor transformers.
"""

from gruppo.task.builtin import builtin_model_path, builtin_tokenizer, rebuild_base
from gruppo.task.carries import carries_rows
from gruppo.task.dataset import DroppedRow, Rows, read_rows
from gruppo.task.order import prompt_indices
from gruppo.task.prompts import PromptSet, load_prompts
from gruppo.task.sources import resolve_source

__all__ = [
    "DroppedRow",
    "PromptSet",
    "Rows",
    "builtin_model_path",
    "builtin_tokenizer",
    "carries_rows",
    "load_prompts",
    "prompt_indices",
    "read_rows",
    "rebuild_base",
    "resolve_source",
]
