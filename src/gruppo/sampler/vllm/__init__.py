"""Rollouts from vLLM.

    sampler.py     vLLMSampler: requests to engines, weights to engines
    supervisor.py  one engine, restarted when it is lost and proven after each batch
    engine.py      interface of an engine, its requests and answers, and how one is started
    inprocess.py   engine in this process
    http.py        engine behind HTTP
    server.py      `vllm serve` as a child process
    guard.py       kills that server if the trainer dies
    worker.py      extension of vLLM's worker: loading weights with a receipt

vLLM itself is imported when an engine starts in this process.
"""
