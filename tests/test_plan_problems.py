"""Plans that do not fit: every problem with its words, and all of them in one error."""

from typing import Any

import pytest
from torch import nn

from cpcompile.errors import PlanError
from cpcompile.plan import resolve_plan
from tests.plan_model import SPLIT, Input, Model, Output, Stacked, entries, problems, the_problem

# Names


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("block.0", "'blocks.0'"),
        ("blocks.0.atn", "'blocks.0.attn'"),
        ("blocks.*.atn", "'blocks.*.attn'"),
        ("blocks.7.atn", "'blocks.0.attn'"),
        ("blocks..0", "'blocks.0'"),
        ("proj.*", "'proj'"),
        ("proj.0", "'proj'"),
        ("proj_out", "'proj'"),
        ("forward", "'rope', 'blocks'"),
        ("blocks.*.ff.*", "'blocks.*.ff'"),
        ("blocks.-1", "'blocks.1'"),
    ],
)
def test_a_name_that_means_nothing_is_a_problem(name, closest):
    problem = the_problem({"": SPLIT, name: SPLIT})
    assert problem.where == f"plan[{name!r}]"
    assert problem.law == f"Model has no module {name!r}"
    assert "name a module that exists; the closest: " in problem.remedy
    assert closest in problem.remedy


def test_a_series_of_unlike_modules_has_no_missing_members():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert "no module '5'" in the_problem({"0": {"input": Input(1)}, "5": Output(1)}, model).law


def test_a_list_of_modules_is_never_called():
    problem = the_problem({"": SPLIT, "blocks": Output(1)})
    assert "blocks only holds other modules and is never called" in problem.law
    assert problem.remedy == "name its members, as in 'blocks.*'"


# Parameters of forward


def test_an_unknown_parameter():
    problem = the_problem({"blocks.*.attn": {"hidden_state": Input(1)}})
    assert problem.where == "plan['blocks.*.attn']['hidden_state']"
    assert problem.law == "the forward of Attention (blocks.0.attn and 1 more) has no parameter 'hidden_state'"
    assert problem.remedy == "use 'hidden_states'; its parameters are: hidden_states, mask"


def test_an_unknown_parameter_of_the_root():
    problem = the_problem({"": {"zzz": Input(1)}})
    assert "Model (the root) has no parameter 'zzz'" in problem.law
    assert problem.remedy == "its parameters are: hidden_states, states, text"


def test_positional_varargs_take_no_name():
    class Varargs(nn.Module):
        def forward(self, *args):
            return args

    assert "has no parameter 'args'" in the_problem({"": {"args": Input(1)}}, Varargs()).law


def test_a_wildcard_over_several_classes_names_those_that_refuse():
    problem = the_problem({"blocks.*.*": SPLIT})
    assert "the forward of Feedforward (blocks.0.ff and 1 more) has no parameter 'hidden_states'" in problem.law


# Values


@pytest.mark.parametrize("plan", [None, [], "hidden_states", Input(1)])
def test_a_plan_is_a_dict(plan):
    problem = the_problem(plan)
    assert problem.where == "plan"
    assert "a plan is a dict, not " in problem.law
    assert "pass a dict of module names" in problem.remedy


def test_an_empty_plan():
    problem = the_problem({})
    assert "the plan is empty" in problem.law
    assert "split at least one tensor" in problem.remedy


@pytest.mark.parametrize("plan", [{"proj": Output(1)}, {"blocks.9": SPLIT}, {"proj": [None]}])
def test_a_plan_that_splits_nothing(plan):
    problem = the_problem(plan)
    assert "splits no tensor of this model" in problem.law
    assert "split at least one tensor" in problem.remedy


VALUES = [
    # plan, where, words of the law, words of the remedy
    ({5: SPLIT}, "plan[5]", "named by a string, not a value of type int", '"" is the root'),
    ({"": 3}, "plan['']", "not a value of type int", "split inputs with"),
    ({"": None}, "plan['']", "not None", "gather an output with ContextParallelOutput"),
    ({"": Input(1)}, "plan['']", "not a value of type ContextParallelInput", "{name: ContextParallelInput(...)}"),
    ({"": {}}, "plan['']", "names no input and no output", "name one"),
    ({"": []}, "plan['']", "names no output", "one element for each output"),
    ({"": [Input(1)]}, "plan[''][0]", "not a value of type ContextParallelInput", "inputs stand in a dict"),
    ({"": [Output(1), 3]}, "plan[''][1]", "not a value of type int", "or None to leave this output"),
    ({"": {"text": 1}}, "plan['']['text']", "not a value of type int", "use ContextParallelInput(split_dim=...)"),
    ({"": {"text": None}}, "plan['']['text']", "not None", "use ContextParallelInput(split_dim=...)"),
    ({"": {"text": Output(1)}}, "plan['']['text']", "what is gathered", "outside this dict"),
    ({"": {0: [Input(1)]}}, "plan[''][0]", "not a value of type list", "use ContextParallelInput"),
    ({"": {"text": []}}, "plan['']['text']", "describes no tensor", "for each tensor of the argument"),
    ({"": {"text": [3]}}, "plan['']['text'][0]", "not a value of type int", "or None to leave this tensor"),
    ({"": {"text": [Input(None)]}}, "plan['']['text'][0]", "is an integer, not None", "set split_dim"),
    ({"": {"text": Input(1, None, True)}}, "plan['']['text']", "string key names an input", "split_output=False"),
    ({"": {0: Input(1)}}, "plan[''][0]", "integer key names an output", "set split_output=True"),
    ({"": {"text": Input(1, None, 1)}}, "plan['']['text']", "True or False, not 1", "set split_output"),
    ({"": {True: Input(1, None, True)}}, "plan[''][True]", "the key True is neither", "an integer from 0"),
    ({"": {-1: Input(1, None, True)}}, "plan[''][-1]", "the key -1 is neither", "an integer from 0"),
    ({"": {None: Input(1)}}, "plan[''][None]", "the key None is neither", "a string for an input"),
    ({"": {"text": Input("1")}}, "plan['']['text']", "split_dim is an integer, not '1'", "set split_dim"),
    ({"": {"text": Input(True)}}, "plan['']['text']", "split_dim is an integer, not True", "set split_dim"),
    ({"": Output(1.0)}, "plan['']", "gather_dim is an integer, not 1.0", "set gather_dim"),
    ({"": {"text": Input(0, 0)}}, "plan['']['text']", "positive integer or None, not 0", "leave it out"),
    ({"": {"text": Input(0, True)}}, "plan['']['text']", "positive integer or None, not True", "leave it out"),
    ({"": {"text": Input(3, 3)}}, "plan['']['text']", "split_dim=3 is out of range", "from -3 to 2"),
    ({"": {"text": Input(-4, 3)}}, "plan['']['text']", "expected_dims=3 dimensions", "from -3 to 2"),
    ({"": Output(2, 1)}, "plan['']", "gather_dim=2 is out of range", "from -1 to 0"),
]


@pytest.mark.parametrize(("plan", "where", "law", "remedy"), VALUES, ids=[str(row[0]) for row in VALUES])
def test_a_wrong_value(plan, where, law, remedy):
    problem = the_problem(plan)
    assert problem.where == where
    assert law in problem.law
    assert remedy in problem.remedy


@pytest.mark.parametrize("dim", [-3, -1, 0, 2])
def test_every_dim_in_range_is_allowed(dim):
    assert entries({"": {"text": Input(dim, 3)}})[0].dim == dim


# Contradictions


@pytest.mark.parametrize("other", [Input(2, 3), Input(1, 4), Input(1), [Input(1, 3)]])
def test_two_patterns_that_contradict(other):
    problem = the_problem({"blocks.*": SPLIT, "blocks.1": {"hidden_states": other}})
    assert problem.where == "plan['blocks.1']['hidden_states']"
    assert "blocks.1.hidden_states is given " in problem.law
    assert "but dim=1, expected_dims=3 at plan['blocks.*']['hidden_states']" in problem.law
    assert problem.remedy == "keep one of the two"


def test_a_contradiction_over_many_modules_is_one_problem():
    problem = the_problem({"blocks.*": SPLIT, "*.*": {"hidden_states": Input(2)}}, Stacked())
    assert "blocks.0.hidden_states and 2 more is given dim=2" in problem.law


def test_outputs_contradict_too():
    problem = the_problem({"": SPLIT, "blocks.*": [None, Output(1)], "blocks.0": [Output(1), Output(2)]})
    assert "blocks.0 output 1 is given dim=2" in problem.law


# All at once


def test_all_problems_are_reported_together():
    plan = {
        "": {"hidden": Input(1), "text": Input(4, 3), 0: Input(1)},
        "block.0": {"x": 3},
        7: Output(1),
        "proj": [Output(None), 2],
        "blocks.*": SPLIT,
        "blocks.0": {"hidden_states": Input(2)},
    }
    assert [problem.where for problem in problems(plan)] == [
        "plan['']['text']",
        "plan[''][0]",
        "plan['']['hidden']",
        "plan['block.0']['x']",
        "plan['block.0']",
        "plan[7]",
        "plan['proj'][0]",
        "plan['proj'][1]",
        "plan['blocks.0']['hidden_states']",
    ]


def state_of(model):
    return {
        name: (id(module), module.forward, dict(vars(module)), {k: dict(v) for k, v in hooks_of(module).items()})
        for name, module in model.named_modules()
    }


def hooks_of(module):
    return {name: value for name, value in vars(module).items() if "hooks" in name}


BAD: dict[str, Any] = {"": SPLIT, "blocks.*": {**SPLIT, 0: Input(1)}, "nothing": Output(1)}


@pytest.mark.parametrize("plan", [BAD, {"": SPLIT}])
def test_the_model_stays_untouched(plan):
    model = Model()
    before = state_of(model)
    try:
        resolve_plan(plan, model)
    except PlanError:
        assert "nothing" in plan
    assert state_of(model) == before
