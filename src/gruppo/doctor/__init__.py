"""Diagnosis of a run: what its records point to, the evidence, and the option to change.

A rule is a function of a `Table`, the numbers of a run, that gives `Finding`s. The trainer prints the same findings
while a run goes on (`advice`) and at its end (`summary`). To add a rule: a function in `metric_rules.py` or
`completion_rules.py` with its thresholds above it, its name in `RULES`, a run with the fault in
`tests/doctor/real_runs.py`. Reading a run needs no torch.
"""

from gruppo.doctor.finding import Finding
from gruppo.doctor.metric_rules import sampler_gap
from gruppo.doctor.rules import RULES, advice, findings
from gruppo.doctor.state import State, state_line, summary
from gruppo.doctor.table import Table

__all__ = ["RULES", "Finding", "State", "Table", "advice", "findings", "sampler_gap", "state_line", "summary"]
