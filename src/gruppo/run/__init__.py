"""Records of a run: the directory it writes, what reads it back, and what a person sees meanwhile.

    config.yaml     the resolved options
    env.json        versions, threads, device
    metrics.jsonl   one line per step; a function of config and seed alone, so that equal runs have equal files
    timings.jsonl   one line per step: seconds by stage
    events.jsonl    start, checkpoint, advice, warning, stop, with the time of each
    completions/    step-000010.parquet: one row per rollout (`completions.py` has the columns)
    checkpoints/    step-000050/: weights, optimizer, run state, manifest
    model/          the result, as transformers, PEFT and vLLM load it
    status.json     running, done, stopped or failed, and at which step
    lock            the process that owns the directory

Nothing here imports the trainer or the model, so that a report, a viewer or a replay can read a run without them.
`RunReader` needs no torch either.
"""
