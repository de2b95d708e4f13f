"""Rules: the list of all rules, and the findings they yield."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gruppo.doctor.completion_rules import (
    contradicted_reward,
    dominating_prompt,
    leaking_evaluation,
    length_exploitation,
    repetition,
)
from gruppo.doctor.finding import FEWEST_STEPS, Finding
from gruppo.doctor.metric_rules import (
    collapse,
    constant_reward,
    dead_groups,
    decline,
    entropy_collapse,
    gradient_spike,
    mostly_given,
    never_right,
    no_exploration,
    out_of_range,
    precision_lost,
    reward_hacking,
    stale_sampler,
    tools_never_called,
)
from gruppo.doctor.table import Table
from gruppo.run.reader import RunReader

Rule = Callable[[Table], Iterator[Finding]]

RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (  # causes before their consequences
        constant_reward,
        reward_hacking,
        contradicted_reward,
        collapse,
        no_exploration,
        stale_sampler,
        precision_lost,
        length_exploitation,
        tools_never_called,
        out_of_range,
        mostly_given,
        repetition,
        entropy_collapse,
        gradient_spike,
        leaking_evaluation,
        dominating_prompt,
        dead_groups,
        never_right,
        decline,
    )
}


def findings(run: RunReader) -> list[Finding]:
    """Likely faults of a run, problems first."""
    return applied(Table.of(run))


def applied(table: Table) -> list[Finding]:
    """Findings of all rules, problems first; none before `FEWEST_STEPS`."""
    if len(table.steps) < FEWEST_STEPS:
        return []
    found = [finding for rule in RULES.values() for finding in rule(table)]
    return sorted(found, key=lambda finding: finding.severity != "problem")


def advice(recent: Sequence[Mapping[str, Any]], config: Mapping[str, Any] | None = None, **facts: Any) -> list[str]:
    """Advice on the latest metrics of a running run, one sentence each; empty if nothing stands out.

    Args:
        facts: `correct_by` and `weights` of the rewards.
    """
    return [str(finding) for finding in applied(Table(metrics=recent, config=config or {}, **facts))]
