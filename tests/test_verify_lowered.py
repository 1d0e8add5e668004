"""The verifier on lowered graphs, of one rank and of all: each way of breaking one is caught by name and law."""

import pytest
import torch
from torch import fx, nn

from cpcompile.assemble import all_coords
from cpcompile.layout import Axis
from cpcompile.ops import collectives, neutral
from cpcompile.ops.markers import mark
from cpcompile.pipeline import lower_ranks
from cpcompile.verify import verify_lowered, verify_ranks
from tests import toys
from tests.breaking import caught, drop
from tests.toys import nodes_of

aten = torch.ops.aten
MESH = (Axis("ring", 2), Axis("ulysses", 2))


def lowered(built):
    return lower_ranks(built.rewritten)


# One rank's lowered graph.


def test_two_ranks_shards_swapped():
    built = toys.build(toys.Twice, axes=(Axis("ulysses", 7),))
    modules = lowered(built)
    slices = [nodes_of(module, aten.slice.Tensor)[0] for module in modules[:2]]
    slices[0].args, slices[1].args = (
        (one.args[0], *other.args[1:]) for one, other in (tuple(slices), tuple(reversed(slices)))
    )
    for rank, starts in enumerate(("starts at element 1", "starts at element 0")):
        caught(lambda rank=rank: verify_lowered(modules[rank], {"ulysses": rank}), "%shard", starts, "not this rank's")


def test_a_wrong_literal_size():
    built = toys.build(toys.Toy)
    module = lowered(built)[0]
    node = next(n for n in nodes_of(module, aten.view.default) + nodes_of(module, aten.reshape.default))
    assert node.args[1] == [2, 4, 2, 4]
    node.args = (node.args[0], [2, 2, 4, 4])
    caught(lambda: verify_lowered(module, {"ulysses": 0}), node, "(2, 2, 4, 4)", "promises (2, 4, 2, 4)")
    node.args = (node.args[0], [2, 4, 2, 5])
    caught(lambda: verify_lowered(module, {"ulysses": 0}), node, "cannot run on this rank's sizes")


def test_a_reduce_dropped_when_lowered():
    built = toys.build(toys.Pooled)
    module = lowered(built)[1]
    drop(nodes_of(module, collectives.all_reduce)[0])
    error = caught(lambda: verify_lowered(module, {"ulysses": 1}), "%reduce", "lowered to nothing")
    assert "on the rank at ulysses=1" in str(error)


def test_a_neutral_operator_and_a_marker_that_survive():
    built = toys.build(toys.Pooled)
    module = lowered(built)[0]
    node = nodes_of(module, aten.linear.default)[0]
    with module.graph.inserting_after(node):
        left = module.graph.call_function(neutral.pend, (node,))
        marker = module.graph.call_function(mark, (node, 0))
    caught(lambda: verify_lowered(module, {"ulysses": 0}), left, "rank-neutral operator survives")
    caught(lambda: verify_lowered(module, {"ulysses": 0}), marker, "a marker survives")


def test_an_operand_taken_from_elsewhere():
    built = toys.build(toys.Twice)
    module = lowered(built)[0]
    one, other = nodes_of(module, aten.linear.default)
    other.args = (other.args[0], one.args[1], other.args[2])
    caught(lambda: verify_lowered(module, {"ulysses": 0}), "%linear_1", "%enter.left.weight", "%enter.right.weight")


@pytest.mark.parametrize(("index", "value", "word"), [(9, True, "backward"), (8, "ring", "runs over ring")])
def test_an_exchange_with_another_flag_or_group(index, value, word):
    built = toys.build(toys.Fallback)
    module = lowered(built)[0]
    node = nodes_of(module, collectives.exchange_blocks)[0]
    node.args = (*node.args[:index], value, *node.args[index + 1 :])
    caught(lambda: verify_lowered(module, {"ulysses": 0}), "%gather", word)


def test_a_reduce_with_the_other_backward():
    built = toys.build(toys.Pooled)
    module = lowered(built)[0]
    node = nodes_of(module, collectives.all_reduce)[0]
    node.args = (node.args[0], node.args[1], True, node.args[3])
    caught(lambda: verify_lowered(module, {"ulysses": 0}), "%reduce", "backward for a pending cotangent")


@pytest.mark.parametrize("waits", [0, 2])
def test_a_collective_is_waited_for_once(waits):
    graph = fx.Graph()
    x = graph.placeholder("x")
    reduced = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "ulysses"))
    done = [graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (reduced,)) for _ in range(waits)]
    graph.output(tuple(done) or (reduced,))
    caught(lambda: verify_lowered(fx.GraphModule(nn.Module(), graph), {}), "%all_reduce", f"not {waits} waits")


# All ranks' lowered graphs.


def test_two_collectives_in_another_order_on_one_rank():
    built = toys.build(toys.Twice)
    modules = lowered(built)
    first, second = nodes_of(modules[1], collectives.exchange_blocks)
    last, item = next(iter(second.users)), next(iter(first.users))
    last.append(first)
    first.append(item)
    verify_lowered(modules[1], {"ulysses": 1})
    axes = built.rewritten.axes
    error = caught(lambda: verify_ranks(modules, axes), "%exchange_blocks_1", "same collectives", "for %gather_1")
    assert "collective 2 of the rank at ulysses=1" in str(error)


def test_a_collective_that_one_rank_lacks():
    built = toys.build(toys.Pooled)
    modules = lowered(built)
    drop(nodes_of(modules[0], collectives.all_reduce)[0])
    caught(lambda: verify_ranks(modules, built.rewritten.axes), "%reduce", "collective 2", "cp.all_reduce_sum")


def change_argument(node, index, change):
    node.args = (*node.args[:index], change(list(node.args[index])), *node.args[index + 1 :])


def exchange_arguments(module, index, change):
    change_argument(nodes_of(module, collectives.exchange_blocks)[0], index, change)


def test_blocks_that_a_rank_puts_in_each_others_place():
    built = toys.build(toys.Twice, axes=(Axis("ulysses", 7),))
    modules = lowered(built)
    exchange_arguments(modules[2], 3, lambda receive: [*receive[6:12], *receive[:6], *receive[12:]])
    verify_lowered(modules[2], {"ulysses": 2})
    caught(lambda: verify_ranks(modules, built.rewritten.axes), "%exchange_blocks", "at ulysses=2 gets other elements")


def test_what_is_sent_is_what_is_awaited():
    built = toys.build(toys.Twice)
    modules = lowered(built)
    exchange_arguments(modules[0], 2, lambda send: [*send[:9], 3, *send[10:]])
    law = "from the rank at ulysses=0 to the one at ulysses=1 what is sent is not what is awaited: 2x3x8, 2x4x8"
    caught(lambda: verify_ranks(modules, built.rewritten.axes), "%exchange_blocks", law)


def test_a_cotangent_that_two_ranks_keep():
    built = toys.build(toys.Pooled)
    modules = lowered(built)
    node = nodes_of(modules[1], collectives.pend_on_one)[0]
    node.args = (node.args[0], True)
    caught(lambda: verify_ranks(modules, built.rewritten.axes), "%pend", "kept on one rank, not on 2")


def test_equal_exchanges_are_not_taken_on_trust():
    built = toys.build(toys.Twice)
    modules = lowered(built)
    node = nodes_of(modules[1], collectives.exchange_blocks)[1]
    change_argument(node, 3, lambda receive: [*receive[:2], 1, *receive[3:]])
    caught(lambda: verify_ranks(modules, built.rewritten.axes), "%exchange_blocks_1", "gets other elements")


def test_every_rank_of_the_mesh_is_looked_at():
    built = toys.build(toys.Attend, axes=MESH)
    modules = lowered(built)
    assert len(modules) == len(all_coords(MESH)) == 4
    exchange_arguments(modules[3], 2, lambda send: [*send[:-1], 3])
    caught(lambda: verify_ranks(modules, MESH), "%exchange_blocks", "from the rank at ring=1, ulysses=1")
