"""Rollouts from vLLM.

sampler.py     vLLMSampler: requests to engines, weights to engines
engine.py      interface of an engine, what goes in and comes out, and how one is started
inprocess.py   engine in this process
http.py        engine behind HTTP
server.py      `vllm serve` as a child process
guard.py       kills that server if the trainer dies
worker.py      extension of vLLM's worker: loading weights with a receipt
"""
