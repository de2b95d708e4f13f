"""A run in a notebook: one output for the last step, lines of text beside it, a short result; in a thread as well."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipykernel")
pytestmark = pytest.mark.slow

CELL = """
from gruppo.trainer import GRPOTrainer, TrainConfig
trainer = GRPOTrainer(TrainConfig(
    output={output!r}, steps=40, prompts_per_step=4, group_size=4, max_new_tokens=4, eval_prompts=8, lr=1e-4,
    tensorboard=False, threads=1))
"""
IN_A_THREAD = """
import threading
thread = threading.Thread(target=trainer.train)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("last", ["trainer.train()", IN_A_THREAD])
def test_a_run_in_a_notebook_shows_the_last_step_in_place_and_a_short_result(last: str, tmp_path: Path) -> None:
    from jupyter_client.manager import run_kernel  # pyright: ignore[reportMissingImports]

    messages: list[dict[str, Any]] = []
    with run_kernel(kernel_name="python3") as client:
        reply = client.execute_interactive(
            CELL.format(output=str(tmp_path / "run")) + last, output_hook=messages.append, timeout=120
        )
    assert reply["content"]["status"] == "ok", reply["content"]
    shown = [m for m in messages if m["msg_type"] == "display_data"]
    updates = [m for m in messages if m["msg_type"] == "update_display_data"]
    assert len(shown) == 1
    number = shown[0]["content"]["transient"]["display_id"]
    assert {m["content"]["transient"]["display_id"] for m in updates} == {number}
    assert "40/40" in updates[-1]["content"]["data"]["text/plain"]
    text = "".join(m["content"]["text"] for m in messages if m["msg_type"] == "stream")
    assert "step 40/40  reward " in text and "sequences per step" in text
    results = [m["content"]["data"]["text/plain"] for m in messages if m["msg_type"] == "execute_result"]
    assert [r.partition(",")[0] for r in results] == (
        ["TrainResult(done after step 40"] if last == "trainer.train()" else []
    )
