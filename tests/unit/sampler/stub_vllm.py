"""A server that answers as `vllm serve` does, with a transformers model inside: weights, seeds and log-probs are real.

Faults are planted by assigning to its fields: a client is tested against answers that vLLM gives only on bad days.
"""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from gruppo.model import LoraSpec, TransformersModel
from gruppo.sampler import SamplingParams, TorchSampler
from gruppo.types import InputFeature

Answer = dict[str, Any]


class StubServer:
    """Serves the embedded model on localhost.

    Fields to plant faults: `spoil` changes an answer to a sampling request, `hangs` lets sampling requests wait,
    so many `failures` are answered with the status `failure`; `raw_logprobs`, `has_extension` and `has_dev_mode` are
    how it was started.
    """

    def __init__(self, *, lora: LoraSpec | None = None, port: int = 0) -> None:
        self.lora = lora
        self.spoil: Callable[[Answer], Answer | None] = lambda answer: answer
        self.hangs = False
        self.failures = 0
        self.failure = 500
        self.tokenizer: Any = None
        """Texts and stop texts are read with it; None: the stop texts of requests are not looked at."""
        self.raw_logprobs = False
        self.has_extension = True
        self.has_dev_mode = True
        self.unknown = "Method {!r} is not implemented."
        self.started = 0
        """Sampling requests that came."""
        self.dropped = 0
        """Sampling requests whose client left before the answer."""
        self.seen: list[str] = []
        self.prompts: list[tuple[int, ...]] = []
        self.lock = threading.Lock()
        self.restart()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None: ...

            def do_GET(self) -> None:
                self._answer(*stub.get(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.seen.append(self.path)
                if self.path == "/v1/completions" and "prompt_logprobs" not in body:
                    stub.started += 1
                    while stub.hangs:
                        if self._is_left():
                            stub.dropped += 1
                            self.close_connection = True
                            return
                        time.sleep(0.01)
                with stub.lock:
                    answer = stub.post(self.path, body)
                with suppress(OSError):  # the client has left
                    self._answer(*answer)

            def _is_left(self) -> bool:
                self.connection.settimeout(0.01)
                try:
                    return self.connection.recv(1) == b""
                except TimeoutError:
                    return False
                except OSError:
                    return True
                finally:
                    self.connection.settimeout(None)

            def _answer(self, status: int, content: Any) -> None:
                data = (content if isinstance(content, str) else json.dumps(content)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.daemon_threads = False  # closing waits for them
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}"

    def restart(self) -> None:
        """As if the process had died and come back: the weights are those of the start, adapters are gone."""
        self.base = TransformersModel("builtin", device="cpu")
        self.adapted: TransformersModel | None = None

    def close(self) -> None:
        self.hangs = False
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def get(self, path: str) -> tuple[int, Any]:
        return 200, {"data": [{"id": "base"}]} if path == "/v1/models" else {}

    def post(self, path: str, body: Answer) -> tuple[int, Any]:
        if path == "/v1/completions":
            if body["model"] not in ("base", "gruppo") or (body["model"] == "gruppo" and self.adapted is None):
                return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
            return self.completions(body)
        if path == "/v1/unload_lora_adapter":
            had, self.adapted = self.adapted, None
            return (200, "Success") if had is not None else (404, {"error": {"message": "cannot be found"}})
        if path == "/v1/load_lora_adapter":
            if self.adapted is not None and not body.get("load_inplace"):
                return 400, {"error": {"message": "The lora adapter 'gruppo' has already been loaded."}}
            self.adapted = TransformersModel("builtin", device="cpu", lora=self.lora)
            _put(self.adapted, load_file(Path(body["lora_path"]) / "adapter_model.safetensors"))
            return 200, "Success: LoRA adapter added."
        if not self.has_dev_mode:
            return 404, {"detail": "Not Found"}
        if path.partition("?")[0] in ("/reset_prefix_cache", "/pause", "/resume"):
            return 200, {"success": True}
        return self.command(body["method"], body["kwargs"])

    def command(self, method: str, arguments: dict[str, str]) -> tuple[int, Any]:
        if method.startswith("gruppo_") and not self.has_extension:
            return 500, {"error": {"message": f"Call to collective_rpc method failed: {self.unknown.format(method)}"}}
        folder = Path(arguments["weights_path" if method == "reload_weights" else "folder"])
        tensors = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
        if method != "gruppo_count":
            _put(self.base, tensors)
        if method == "reload_weights":
            return 200, {"results": [None]}
        return 200, {"results": [{"tensors": len(tensors), "bytes": sum(t.nbytes for t in tensors.values())}]}

    def completions(self, body: Answer) -> tuple[int, Any]:
        model = self.base if body["model"] == "base" else self.adapted
        assert model is not None
        prompt = tuple(body["prompt"])
        if "prompt_logprobs" in body:
            feature = InputFeature(prompt_ids=prompt[:1], completion_ids=prompt[1:])
            logps = model.forward_only([feature], temperature=1.0)["logps"][0].tolist()
            scored = [{str(t): {"logprob": x, "rank": 1}} for t, x in zip(prompt[1:], logps, strict=True)]
            return 200, {"choices": [{"index": 0, "prompt_logprobs": [None, *scored]}]}
        if self.failures:
            self.failures -= 1
            return self.failure, {"error": {"message": "EngineCore encountered an issue."}}
        self.prompts.append(prompt)
        choices = []
        model.tokenizer = self.tokenizer or model.tokenizer
        for i in range(body["n"]):
            params = SamplingParams(
                temperature=body["temperature"],
                max_new_tokens=body["max_tokens"],
                seed=body["seed"] + i,
                stop=tuple(body["stop"]) if self.tokenizer else (),
            )
            ((sequence,),) = (r.sequences for r in TorchSampler(model).sample([prompt], 1, params))
            logps = list(sequence.logps)
            if self.raw_logprobs:
                feature = InputFeature(prompt_ids=prompt, completion_ids=sequence.tokens)
                logps = model.forward_only([feature], temperature=1.0)["logps"][0].tolist()
            choices.append(
                {
                    "index": i,
                    "text": sequence.text,
                    "token_ids": list(sequence.tokens),
                    "prompt_token_ids": list(prompt),
                    "logprobs": {"token_logprobs": logps},
                    "finish_reason": sequence.stop_reason,
                }
            )
        answer = self.spoil({"choices": choices[::-1]})  # in any order: `index` says which is which
        return 200, "this is not JSON" if answer is None else answer


def _put(model: TransformersModel, tensors: dict[str, Any]) -> None:
    """Names that the file lacks keep their values and unknown ones are ignored, as in vLLM."""
    if model.lora is not None:
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model.model, tensors)  # type: ignore[arg-type]
    else:
        model.model.load_state_dict(tensors, strict=False)
