"""What the tests of the verifier share: how to break a graph, and what it takes to be caught."""

import pytest

from cpcompile.errors import VerificationError
from cpcompile.findings import REMEDY
from cpcompile.show import Names


def caught(run, node, *words):
    """Running ``run`` finds a law broken at ``node`` whose text has all ``words``."""
    name = node if isinstance(node, str) else Names(node.graph)[node]
    with pytest.raises(VerificationError) as found:
        run()
    mine = [problem for problem in found.value.problems if problem.where.split(" ")[0] == name]
    assert any(all(word in problem.law for word in words) for problem in mine), str(found.value)
    assert all(problem.remedy == REMEDY for problem in found.value.problems)
    return found.value


def drop(node):
    node.replace_all_uses_with(node.args[0])
    node.graph.erase_node(node)
