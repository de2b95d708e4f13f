"""Stage 1, prompts: rows of a file become tokenised prompts, and the embedded task and model live here.

    reader     records of JSONL, CSV and Parquet files and of the hub, each with its place
    row        what a row must be
    dataset    rows of a source, checked: read_rows
    chat       a prompt becomes token ids, through the chat template or as plain text
    prompts    rows become prompts: load_prompts, PromptSet
    order      which prompts a step takes: prompt_indices
    load       from the name of a source to its rows: resolve_source
    gsm8k, reasoning_gym    adapters
    carries    the embedded task "dropped carries"
    builtin    its tokenizer and model, and how the shipped weights are made

To add a source, write a function that gives `Rows` (see `gsm8k.py`) and a branch in `load.py`. Importing this
package imports neither torch nor transformers.
"""

from gruppo.task.builtin import builtin_model_path, builtin_tokenizer, rebuild_base
from gruppo.task.carries import carries_rows
from gruppo.task.dataset import DroppedRow, Rows, read_rows
from gruppo.task.load import resolve_source
from gruppo.task.order import prompt_indices
from gruppo.task.prompts import PromptSet, load_prompts

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
