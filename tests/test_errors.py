"""Errors: one formatter, everything at once, and safe to send between processes."""

import pickle

import pytest

from cpcompile import errors
from cpcompile.errors import (
    CaptureError,
    CPCompileError,
    FallbackError,
    MeshError,
    PlanError,
    Problem,
    ProblemsError,
    Refusal,
    SimulationError,
    UnsupportedError,
    VerificationError,
    format_problems,
)

DIM = Problem("plan['blocks.0']['hidden_states']", "dim 3 of shape (2, 64, 16) does not exist", "use dim 1")
AXIS = Problem("mesh", "ulysses has 4 ranks, ulysses_degree is 2", "set ulysses_degree=4")


def test_problems_are_numbered_lines_of_where_law_and_remedy():
    assert format_problems("bad plan", [DIM, AXIS]) == (
        "bad plan (2 problems):\n"
        "  1. plan['blocks.0']['hidden_states']: dim 3 of shape (2, 64, 16) does not exist\n"
        "     fix: use dim 1\n"
        "  2. mesh: ulysses has 4 ranks, ulysses_degree is 2\n"
        "     fix: set ulysses_degree=4"
    )


def test_one_problem_is_not_plural():
    assert format_problems("bad plan", [DIM]).startswith("bad plan (1 problem):\n")


def test_further_lines_stay_under_their_problem():
    text = format_problems("t", [Problem("here", "first\nsecond", "do this\nthen that")] * 10)
    lines = text.splitlines()
    assert lines[1:5] == ["  1. here: first", "     second", "     fix: do this", "     then that"]
    assert lines[-4:] == ["  10. here: first", "      second", "      fix: do this", "      then that"]


@pytest.mark.parametrize("cls", [PlanError, MeshError, UnsupportedError, FallbackError])
def test_an_error_lists_all_its_problems(cls):
    error = cls(problem for problem in (DIM, AXIS))
    assert isinstance(error, ProblemsError)
    assert error.problems == (DIM, AXIS)
    assert str(error) == format_problems(cls.title, [DIM, AXIS])


def test_titles_tell_errors_apart():
    assert len({cls.title for cls in (PlanError, MeshError, UnsupportedError, FallbackError, CaptureError)}) == 5


def test_a_verification_error_names_the_stage():
    error = VerificationError("reshard", [DIM])
    assert error.stage == "reshard"
    assert str(error).startswith("the graph is not valid after reshard (1 problem):\n  1. plan['blocks.0']")


def test_a_capture_error_shows_the_users_line():
    error = CaptureError("a branch on a tensor's value", "model.py:12 in forward", "    if x.sum() > 0:\n", "use where")
    assert (error.reason, error.location) == ("a branch on a tensor's value", "model.py:12 in forward")
    assert str(error) == (
        "the model cannot be captured as one graph (1 problem):\n"
        "  1. model.py:12 in forward: a branch on a tensor's value\n"
        "     in: if x.sum() > 0:\n"
        "     fix: use where"
    )


def test_a_capture_error_without_a_place_still_reads():
    text = str(CaptureError("the graph breaks"))
    assert "the model's forward: the graph breaks" in text
    assert "None" not in text
    assert "fix: " in text


@pytest.mark.parametrize(
    "error",
    [
        PlanError([DIM, AXIS]),
        MeshError([AXIS]),
        UnsupportedError([DIM]),
        FallbackError([DIM]),
        CaptureError("reason", "a.py:1 in f", "x = y", "remedy"),
        CaptureError("reason"),
        VerificationError("lower", [DIM]),
        SimulationError("rank 3 failed"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickling(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_every_error_is_a_cpcompile_error():
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert {PlanError, CaptureError, VerificationError} <= set(classes)
    assert all(issubclass(cls, CPCompileError) and cls.__doc__ for cls in classes)


def test_a_refusal_is_a_value():
    assert not isinstance(Refusal("why"), Exception)
    assert Refusal("why") == Refusal("why") != Refusal("other")
