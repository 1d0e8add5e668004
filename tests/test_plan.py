"""Plans that fit: names expanded against a model, and notes on what a shallow model lacks."""

import functools
import inspect
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from cpcompile import plan as plan_module
from cpcompile.plan import ContextParallelInput, ContextParallelOutput, PlanEntry, resolve_plan
from tests.plan_model import SPLIT, Attention, Input, Model, Output, entries, names, the_problem

# Published plans


@pytest.fixture(scope="module")
def flux():
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )


@pytest.fixture(scope="module")
def wan():
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )


def test_the_published_plan_of_flux(flux):
    resolved = resolve_plan(flux._cp_plan, flux)
    assert resolved.notes == ()
    assert resolved.entries == (
        PlanEntry("", "split_input", "hidden_states", None, 1, 3),
        PlanEntry("", "split_input", "encoder_hidden_states", None, 1, 3),
        PlanEntry("", "split_input", "img_ids", None, 0, 2),
        PlanEntry("", "split_input", "txt_ids", None, 0, 2),
        PlanEntry("proj_out", "gather_output", 0, None, 1, 3),
    )


def test_the_published_plan_of_wan(wan):
    resolved = resolve_plan(wan._cp_plan, wan)
    assert resolved.notes == ()
    assert resolved.entries == (
        PlanEntry("rope", "split_output", 0, None, 1, 4),
        PlanEntry("rope", "split_output", 1, None, 1, 4),
        PlanEntry("blocks.0", "split_input", "hidden_states", None, 1, 3),
        PlanEntry("proj_out", "gather_output", 0, None, 1, 3),
        PlanEntry("", "split_input", "timestep", None, 1, 2),
    )


def test_a_plan_may_list_more_blocks_than_a_shallow_model_has(wan):
    plan = {
        "blocks.*.attn1": SPLIT,
        "blocks.*.ffn": {"hidden_states": Input(1)},
        **{f"blocks.{i}.attn1": Output(1, 3) for i in range(40)},
        **{f"blocks.{i}.ffn": Output(1, 3) for i in range(3)},
    }
    resolved = resolve_plan(plan, wan)
    assert [entry.name for entry in resolved.entries] == [
        "blocks.0.attn1.hidden_states",
        "blocks.1.attn1.hidden_states",
        "blocks.0.ffn.hidden_states",
        "blocks.1.ffn.hidden_states",
        "blocks.0.attn1 output 0",
        "blocks.1.attn1 output 0",
        "blocks.0.ffn output 0",
        "blocks.1.ffn output 0",
    ]
    assert len(resolved.notes) == 2
    assert "no blocks.2.attn1, blocks.3.attn1, ..., blocks.39.attn1:" in resolved.notes[0]
    assert "no blocks.2.ffn:" in resolved.notes[1]


def test_our_classes_are_read_and_printed_as_those_of_diffusers():
    from diffusers.models import _modeling_parallel as published

    for ours, theirs in (
        (ContextParallelInput, published.ContextParallelInput),
        (ContextParallelOutput, published.ContextParallelOutput),
    ):
        assert [(field.name, field.default) for field in fields(ours)] == [
            (field.name, field.default) for field in fields(theirs)
        ]
    assert repr(Input(1, 3, True)) == repr(published.ContextParallelInput(1, 3, True))
    assert repr(Output(-2)) == repr(published.ContextParallelOutput(-2))
    plan = {"": {"hidden_states": published.ContextParallelInput(1, 3)}, "proj": published.ContextParallelOutput(1)}
    assert entries(plan) == entries({"": SPLIT, "proj": Output(1)})


def test_any_class_with_these_attributes_will_do():
    spec = SimpleNamespace(split_dim=1, expected_dims=None, split_output=False)
    assert entries({"": {"hidden_states": spec}}) == entries({"": {"hidden_states": Input(1)}})


def test_the_plan_does_not_need_diffusers():
    assert "diffusers" not in {getattr(value, "__name__", "") for value in vars(plan_module).values()}
    assert "import diffusers" not in inspect.getsource(plan_module)


# Names


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("", ["hidden_states"]),
        ("blocks.1", ["blocks.1.hidden_states"]),
        ("blocks.*", ["blocks.0.hidden_states", "blocks.1.hidden_states"]),
        ("blocks.*.attn", ["blocks.0.attn.hidden_states", "blocks.1.attn.hidden_states"]),
        ("blocks.0.attn", ["blocks.0.attn.hidden_states"]),
        ("*.*.attn", ["blocks.0.attn.hidden_states", "blocks.1.attn.hidden_states"]),
    ],
)
def test_names_and_wildcards(pattern, expected):
    assert names({pattern: SPLIT}) == expected


def test_a_wildcard_is_any_one_child_not_only_of_a_list():
    assert names({"blocks.0.*": {0: Input(1, split_output=True)}}) == ["blocks.0.attn output 0", "blocks.0.ff output 0"]


def test_entries_keep_the_order_of_the_plan():
    plan = {"proj": Output(1), "blocks.1": SPLIT, "": SPLIT}
    assert names(plan) == ["proj output 0", "blocks.1.hidden_states", "hidden_states"]


def test_what_the_report_calls_a_tensor():
    plan = {
        "": {"states": [Input(1), Input(2)], 0: Input(1, split_output=True)},
        "rope": {1: Input(1, split_output=True)},
        "blocks.0": {"context": (Input(1),)},
        "proj": [None, Output(-1)],
    }
    assert names(plan) == [
        "states[0]",
        "states[1]",
        "output 0",
        "rope output 1",
        "blocks.0.context[0]",
        "proj output 1",
    ]


def test_a_module_has_inputs_under_one_pattern_and_an_output_under_another():
    found = entries({"blocks.*": SPLIT, "blocks.1": Output(1)})
    assert [(entry.module, entry.role) for entry in found] == [
        ("blocks.0", "split_input"),
        ("blocks.1", "split_input"),
        ("blocks.1", "gather_output"),
    ]


def test_the_same_entry_twice_is_one():
    plan = {"blocks.*": {"hidden_states": Input(1, 3)}, "blocks.0": {"hidden_states": Input(-2, 3)}}
    assert names(plan) == ["blocks.0.hidden_states", "blocks.1.hidden_states"]


def test_one_output_is_a_list_of_one():
    assert entries({"": SPLIT, "proj": Output(1)}) == entries({"": SPLIT, "proj": [Output(1)]})


def test_a_tied_module_is_split_once_under_its_first_name():
    model = Model()
    model.blocks[1] = model.blocks[0]
    assert names({"blocks.*": SPLIT}, model) == ["blocks.0.hidden_states"]
    assert names({"blocks.1": SPLIT}, model) == ["blocks.1.hidden_states"]


def test_lists_skip_outputs_and_none():
    plan = {"": {"states": [None, Input(1), Input(2, split_output=True)]}}
    assert entries(plan) == (PlanEntry("", "split_input", "states", 1, 1, None),)


# What a shallow model lacks


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("blocks.7", SPLIT),
        ("blocks.7.attn", SPLIT),
        ("single_blocks.*", SPLIT),
        ("single_blocks.*.attn", SPLIT),
        ("single_blocks.0", SPLIT),
        ("layers.5", Output(1)),
        ("audio", Output(1)),
        ("audio.proj", Output(1)),
        ("video", Output(1)),
    ],
)
def test_what_a_smaller_model_lacks_is_a_note(name, value):
    resolved = resolve_plan({"": SPLIT, name: value}, Model())
    assert [entry.name for entry in resolved.entries] == ["hidden_states"]
    assert len(resolved.notes) == 1
    assert f"this model has no {name}:" in resolved.notes[0]


def test_a_part_that_only_some_blocks_have_is_a_note():
    resolved = resolve_plan({"blocks.*.cross": SPLIT}, Model(depth=3, crosses=[1]))
    assert [entry.name for entry in resolved.entries] == ["blocks.1.cross.hidden_states"]
    assert len(resolved.notes) == 1
    assert "no blocks.0.cross, blocks.2.cross:" in resolved.notes[0]


# Parameters of forward


@pytest.mark.parametrize("name", ["hidden_states", "states", "text"])
def test_parameters_of_every_kind(name):
    assert names({"": {name: Input(1)}}) == [name]


def test_keywords_take_any_name():
    assert names({"blocks.0": {"anything": Input(1)}}) == ["blocks.0.anything"]


def wrapped_in_place(module):
    """As offload hooks do: forward becomes an attribute of the instance, and remembers the one before."""
    before = module.forward

    def hooked(module, *args, **kwargs):
        return before(*args, **kwargs)

    module.forward = functools.update_wrapper(functools.partial(hooked, module), before)
    return module


def decorated(module):
    cls = type(module)

    def decorate(forward):
        @functools.wraps(forward)
        def run(self, *args, **kwargs):
            return forward(self, *args, **kwargs)

        return run

    return type(cls.__name__, (cls,), {"forward": decorate(decorate(cls.forward))})()


@pytest.mark.parametrize("wrap", [wrapped_in_place, decorated])
def test_the_signature_behind_wrappers(wrap):
    module = wrap(Attention())
    assert names({"": {"mask": Input(1)}}, module) == ["mask"]
    assert "'self'" not in the_problem({"": {"masks": Input(1)}}, module).remedy
    assert "use 'mask'" in the_problem({"": {"masks": Input(1)}}, module).remedy


def test_a_module_inside_a_checkpoint_wrapper_keeps_its_plain_name():
    model = Model()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    found = entries({"blocks.0.attn": SPLIT}, model)
    assert [model.get_submodule(entry.module) for entry in found] == [model.get_submodule("blocks.0").attn]


def test_a_compiled_model():
    model = torch.compile(Model())
    assert names({"": {"text": Input(1)}}, model) == ["text"]
    assert [entry.key for entry in entries({"blocks.0": SPLIT}, model)] == ["hidden_states"]
