"""A reward that notes what it is called with."""

import json
import os


def notes_completions(prompts, completions, completion_ids, answer, **columns):
    """1 for an episode whose tool was called, and a line of JSON for each into the file of NOTES."""
    with open(os.environ["NOTES"], "a") as file:
        for prompt, completion, ids, gold in zip(prompts, completions, completion_ids, answer, strict=True):
            file.write(json.dumps([prompt, completion, list(ids), gold]) + "\n")
    return [float(any(message["role"] == "tool" for message in completion)) for completion in completions]
