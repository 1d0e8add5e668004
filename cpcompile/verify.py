from __future__ import annotations
from typing import Literal
Stage = Literal["propagate","reshard","attention","cotangents","enter"]
def verify(module, stage, *, outputs_whole): module.graph.lint()
def verify_lowered(module, coords): module.graph.lint()
