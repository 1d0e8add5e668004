"""The law on random models: a plan can cost speed, never correctness."""

from __future__ import annotations

import contextlib

import hypothesis

from cpcompile import PlanError
from tests.random_models import Random, arguments, cases
from tests.small_models import equal


@hypothesis.settings(
    max_examples=60,
    derandomize=True,  # the same examples in every run
    deadline=None,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(cases())
def test_no_plan_changes_a_number(case):
    steps, plan, sizes, mesh = case
    with contextlib.suppress(PlanError):  # it splits only what these steps do not use
        equal(Random(steps), plan, *arguments(*sizes), meshes=[mesh], tolerance=1e-9)
