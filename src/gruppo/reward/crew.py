"""The worker processes together: assign, wait, kill, replace.

Who decides about scores is `pool.py`; this file only promises that every job that goes in comes out once, with a
reply, within its time limit, and that afterwards there are as many workers as before.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import wait

from gruppo.errors import InputError, RewardError
from gruppo.reward.call import Reply
from gruppo.reward.child import Child
from gruppo.reward.worker import Job, Load

_log = logging.getLogger(__name__)

_MAX_FAILED_STARTS = 3
_POLL_S = 0.5
_EXIT_S = 1.0


class Crew:
    """A fixed number of workers that do jobs."""

    def __init__(
        self,
        loads: Sequence[Load],
        *,
        size: int,
        start_limit_s: float,
        on_wait: Callable[[], None] | None = None,
    ) -> None:
        self._loads = loads
        self._size = size
        self._start_limit_s = start_limit_s
        self._on_wait = on_wait
        self._workers: list[Child] = []
        self._failed_starts = 0
        self._shown: set[int] = set()

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def start(self) -> None:
        """Start what is missing, without waiting for it to be ready."""
        while len(self._workers) < self._size:
            self._workers.append(Child(self._loads, self._start_limit_s))

    def close(self) -> None:
        while self._workers:
            self._workers.pop().kill()

    def run(self, queue: deque[Job]) -> Generator[tuple[Job, Reply], None, None]:
        """Do all jobs of the queue, also those appended meanwhile; replies come as they are ready."""
        self.start()
        try:
            while queue or any(worker.job for worker in self._workers):
                self._assign(queue)
                for worker in self._talking():
                    done = self._listen(worker)
                    if done is not None:
                        yield done
                for worker in [worker for worker in self._workers if worker.waits]:
                    if time.monotonic() >= worker.expires and not worker.connection.poll():
                        done = self._expire(worker)
                        if done is not None:
                            yield done
        finally:
            # Left early, by an error or Ctrl-C: a busy worker would answer into the next step.
            for worker in [worker for worker in self._workers if worker.job]:
                self._replace(worker)

    def _assign(self, queue: deque[Job]) -> None:
        for worker in list(self._workers):
            if not queue or worker.waits:
                continue
            try:
                worker.send(queue[0])
            except OSError:  # it died while idle, or no longer reads: nobody's fault in this job
                self._replace(worker)
            except Exception as error:
                raise InputError(
                    f"the arguments of reward {self._loads[queue[0].load].name!r} cannot be sent to its worker: "
                    f"{error}; use plain values in the columns, or isolated=False"
                ) from error
            else:
                queue.popleft()

    def _talking(self) -> list[Child]:
        if self._on_wait is not None:
            self._on_wait()
        until = min((worker.expires for worker in self._workers if worker.waits), default=time.monotonic())
        timeout = min(max(until - time.monotonic(), 0.0), _POLL_S)
        ready = wait([worker.connection for worker in self._workers], timeout)
        return [worker for worker in self._workers if worker.connection in ready]

    def _listen(self, worker: Child) -> tuple[Job, Reply] | None:
        message = worker.receive()
        if message is None:
            return self._lost(worker)
        if "failed" in message:
            raise InputError(f"a reward worker cannot use what it was sent:\n{message['failed']}")
        if "ready" in message:
            worker.is_ready, self._failed_starts = True, 0
            return None
        job = worker.job
        if job is None or message.get("id") != job.id:
            return None
        reply = _read_reply(message.get("reply"), job.num)
        if reply is None:
            return self._lost(worker)
        worker.job = None
        if reply.kind == "died":  # it says so itself, and is about to be useless
            self._replace(worker)
        return job, reply

    def _lost(self, worker: Child) -> tuple[Job, Reply] | None:
        job, was_ready = worker.job, worker.is_ready
        is_late = time.monotonic() >= worker.expires
        ending = self._replace(worker, start=was_ready, ends_by_itself_s=_EXIT_S)
        if not was_ready:
            self._retry_start(ending)
            return None
        if job is None:
            return None
        kind = "timeout" if is_late else "died"
        return job, Reply(kind=kind, text=f"the worker {ending}")

    def _expire(self, worker: Child) -> tuple[Job, Reply] | None:
        job = worker.job
        if job is None:
            self._replace(worker, start=False)
            self._retry_start(f"was not ready within {self._start_limit_s:g} s")
            return None
        if job.load not in self._shown:  # once per function is enough to see where it hangs
            self._shown.add(job.load)
            _log.warning("reward %r is late; its stack follows on stderr", self._loads[job.load].name)
            worker.dump_stack()
        self._replace(worker)
        return job, Reply(kind="timeout", text=f"no answer within {job.limit_s:g} s; the worker was killed")

    def _replace(self, worker: Child, *, start: bool = True, ends_by_itself_s: float = 0.0) -> str:
        self._workers.remove(worker)
        ending = worker.kill(ends_by_itself_s=ends_by_itself_s)
        if start:
            self.start()
        return ending

    def _retry_start(self, ending: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= _MAX_FAILED_STARTS:
            raise RewardError(
                f"a reward worker {ending} before it was ready, {self._failed_starts} times in a row; its own output "
                "is on stderr. If the reward is defined in the script you run, put the rest of that script under "
                "`if __name__ == '__main__':`"
            )
        time.sleep(0.1 * 2**self._failed_starts)
        self.start()


def _read_reply(fields: object, num: int) -> Reply | None:
    """A reply that is sound, or None: whatever ran in the worker could write to its pipe as well."""
    try:
        reply = Reply(**fields)  # pyright: ignore[reportCallIssue]  anything may have come; TypeError says so
        if reply.kind != "scored":
            return reply
        numbers = [value for value in reply.values if value is not None] + list(reply.metrics.values())
        is_sound = (
            len(reply.values) == num
            and all(isinstance(number, float) and math.isfinite(number) for number in numbers)
            and all(isinstance(place, int) and 0 <= place < num for place in reply.non_finite)
            and all(isinstance(column, list) and len(column) == num for column in reply.extras.values())
        )
    except (TypeError, AttributeError):
        return None
    return reply if is_sound else None
