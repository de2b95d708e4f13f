"""Diagnosis of a run: the likely fault, the evidence, and the option to change.

A rule is a function that takes a `Table`, the numbers of a run, and yields `Finding`s. The trainer prints the same
findings during a run (`advice`) and at its end (`summary`). To add a rule, write a function in `metric_rules.py` or
`completion_rules.py` with its thresholds above it, list it in `RULES`, and add a run with the fault to
`tests/doctor/real_runs.py`. Reading a run needs no torch.
"""

from gruppo.doctor.finding import Finding
from gruppo.doctor.metric_rules import sampler_gap
from gruppo.doctor.rules import RULES, advice, findings
from gruppo.doctor.state import State, state_line, summary
from gruppo.doctor.table import Table

__all__ = ["RULES", "Finding", "State", "Table", "advice", "findings", "sampler_gap", "state_line", "summary"]
