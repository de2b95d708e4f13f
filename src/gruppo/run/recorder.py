"""Recorder: the records of a run, for its directory, the trackers and the terminal."""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from statistics import median
from typing import Any

from gruppo.process.streams import printable
from gruppo.run.console import RunConsole
from gruppo.run.directory import RunDirectory
from gruppo.run.trackers import Trackers
from gruppo.types import Group, Rollout

logger = logging.getLogger(__name__)

ADVICE_EVERY = 20
"""Steps between two looks at the numbers of the steps since the last."""

MOST_UNWRITTEN = 2
"""Largest number of steps whose completions may wait to be written."""

SPIKE = 100.0
"""Warn when the gradient norm exceeds this multiple of the recent median."""
FEWEST_NORMS = 2
"""Fewest gradients to take a median of."""

_MAX_REASON = 300
"""Characters of an exception, or of a completion, in a warning."""


@dataclass(eq=False)
class Recorder:
    """Records one run. The methods are called in the order of a step: `sampled`, `step`, `flush`, `checkpointed`,
    `timed`.

    The record of a step is complete before its checkpoint: a run that resumes after the step will not write it again.
    A thread writes the completions during the next step; `flush` waits for it.
    """

    run: RunDirectory
    trackers: Trackers
    _: KW_ONLY
    steps: int
    completions_every: int = 1
    completions_limit: int | None = None
    quiet: bool = False
    advise: Callable[[Sequence[Mapping[str, Any]]], Sequence[str]] = lambda recent: ()
    """Advice on the lines of the last steps in metrics.jsonl: `gruppo.doctor.advice`."""
    stage: Callable[[], str] = lambda: ""
    """Current stage of the run, for the progress bar."""
    _console: RunConsole | None = None
    _recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=ADVICE_EVERY))
    _kept: list[Group] = field(default_factory=list)
    _has_said_limit: bool = False
    _writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "gruppo-completions"))
    _unwritten: deque[Future[None]] = field(default_factory=deque)
    """Completions that the thread has not written yet, the oldest first."""
    _warned: set[tuple[str, str]] = field(default_factory=set)

    def started(self, step: int, **facts: Any) -> None:
        """Record that the run starts or resumes after `step`; `facts` go to the event."""
        self.run.set_status("running", step)
        self.run.log_event("start", step=step, **facts)
        if not self.quiet:
            self._console = RunConsole(self.steps, first_step=step, stage=self.stage)

    def say(self, text: str) -> None:
        """Print a sentence on the terminal only."""
        if self._console is not None:
            self._console.say(text)

    def writes_completions(self, step: int) -> bool:
        """True if the completions of a step go to a file."""
        return bool(self.completions_every) and step % self.completions_every == 0

    def sampled(
        self, step: int, groups: Sequence[Group], recorded: Callable[[], Sequence[Group]] | None = None
    ) -> None:
        """All groups of a step with their advantages.

        Args:
            recorded: gives them with what the updates saw; the thread that writes calls it.
        """
        self._check_rewards(step, [rollout for group in groups for rollout in group.rollouts])
        if self._console is not None:
            self._kept = [group for group in groups if group.status == "kept"]
        if self.writes_completions(step):
            self.flush(MOST_UNWRITTEN - 1)
            self._unwritten.append(self._writer.submit(self._write, step, recorded or (lambda: groups)))

    def _write(self, step: int, recorded: Callable[[], Sequence[Group]]) -> None:
        left_out = self.run.write_completions(step, recorded(), self.completions_limit)
        if left_out and not self._has_said_limit:
            self._has_said_limit = True
            text = f"completions_limit={self.completions_limit} leaves {left_out} rollouts out of the file of a step"
            self.run.log_event("completions_limit", step=step, rows_left_out=left_out, text=text)

    def flush(self, unwritten: int = 0) -> None:
        """Wait until the completions of at most `unwritten` steps are left to write."""
        while len(self._unwritten) > unwritten:
            self._unwritten[0].result()
            self._unwritten.popleft()

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """The score of the weights before the first step."""
        self._log(step, metrics)
        if self._console is not None:
            self._console.evaluated(step, metrics)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The numbers of a step."""
        self._log(step, metrics)
        self._check_gradient(step, metrics.get("optim/grad_norm", 0.0))
        self._recent.append({**metrics, "step": step})

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log_metrics(step, metrics)
        self.trackers.log(step, metrics)

    def best(self, step: int, key: str, score: float) -> None:
        """The model was saved as the best so far, by the score of this key."""
        self.run.log_event("best", step=step, key=key, score=score)

    def checkpointed(self, step: int) -> None:
        self.run.log_event("checkpoint", step=step)
        self.run.set_status("running", step)

    def timed(self, step: int, seconds: Mapping[str, float], total: float) -> None:
        """Seconds of a step by stage, its checkpoint included; then the step is shown."""
        self.run.log_timings(step, seconds)
        for sentence in self.advise(self._recent) if step % ADVICE_EVERY == 0 else []:
            self.run.log_event("advice", step=step, text=sentence)
            self.say(f"note: {sentence}")
        if self._console is None:
            return
        self._console.step(step, self._recent[-1], total)
        if self._kept and (step == 1 or step % max(self.steps // 4, 1) == 0):
            self._console.completions(f"step {step}: best and worst of some groups", self._kept, limit=3)

    def warned(self, step: int, kind: str, text: str, about: str = "", **facts: Any) -> None:
        """A warning that does not stop the run, once for each kind and what it is about; `facts` go to the event."""
        if (kind, about) in self._warned:
            return
        self._warned.add((kind, about))
        self.run.log_event(kind, step=step, text=text, **facts)
        logger.warning("step %d: %s", step, printable(text))

    def _check_gradient(self, step: int, norm: float) -> None:
        """Warn of a gradient that is far larger than those of recent steps; it was clipped to max_grad_norm."""
        norms = [seen["optim/grad_norm"] for seen in self._recent if seen.get("optim/grad_norm")]
        if len(norms) < FEWEST_NORMS or norm <= SPIKE * median(norms):
            return
        text = (
            f"the gradient norm is {norm:.3g}, {norm / max(median(norms), 1e-30):,.0f} times the median of the last "
            f"{len(norms)} steps; it was clipped to max_grad_norm. Look at the completions of the step, or lower lr"
        )
        self.warned(step, "gradient_spike", text, about=str(step), grad_norm=norm)

    def _check_rewards(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Warn of reward functions that failed on some completions, or gave no value to any while others did."""
        failed = {name: rollout for rollout in reversed(rollouts) for name in rollout.errors}
        for name, first in failed.items():
            share = f"{sum(name in rollout.errors for rollout in rollouts)} of {len(rollouts)}"
            reason = first.errors[name].rstrip().rpartition("\n")[2][:_MAX_REASON]
            kind, what = "reward_failed", f"reward {name!r} failed on {share} completions"
            counted = f"reward/{name}/error_frac and timeout_frac"
            if first.trajectory.is_lost:
                kind, what, counted = "episodes_lost", f"the environment failed in {share} episodes", "turns/lost_frac"
            text = f"{what}: {reason} (traceback in events.jsonl; later failures are only counted, in {counted})"
            facts = {"completion": first.trajectory.text[:_MAX_REASON], "traceback": first.errors[name]}
            self.warned(step, kind, text, about=name, **facts)
        if all(rollout.reward is None for rollout in rollouts):
            return  # the whole step is without a reward, which has a warning of its own
        for name in rollouts[0].rewards:
            if name not in failed and all(rollout.rewards.get(name) is None for rollout in rollouts):
                text = f"reward {name!r} gave None to all {len(rollouts)} completions of the step"
                self.warned(step, "reward_abstained", f"{text}, so it counts for nothing", about=name)

    def stopped(self, step: int, signal: str) -> None:
        """A signal ended the run, which was saved."""
        self.run.log_event("stop", step=step, signal=signal)
        self.run.set_status("stopped", step)

    def failed(self, step: int, error: BaseException) -> None:
        text = printable(f"{type(error).__name__}: {error}")
        self.run.log_event("failed", step=step, error=text)
        self.run.set_status("failed", step, error=text)

    def finished(self, step: int, ended: Mapping[str, Any] | None = None) -> None:
        """The run is over, and the model is saved; `ended`: why before its last step."""
        self.run.set_status("done", step, **({} if ended is None else {"ended": ended}))

    def close(self) -> None:
        if self._console is not None:
            self._console.close()
        try:
            self.flush()
        finally:
            self._writer.shutdown()
            self.trackers.close()
