"""Context parallelism as a compiler pass on torch.fx graphs."""

import cpcompile.ops  # noqa: F401  registers the operators of rewritten graphs
from cpcompile.check_report import CheckReport
from cpcompile.config import ContextParallelConfig, ParallelConfig
from cpcompile.errors import (
    CaptureError,
    CPCompileError,
    FallbackError,
    MeshError,
    PlanError,
    Problem,
    RanksDisagreeError,
    UnsupportedError,
    VerificationError,
)
from cpcompile.parallelize import ParallelModule, parallelize
from cpcompile.plan import (
    ContextParallelInput,
    ContextParallelInputType,
    ContextParallelModelPlan,
    ContextParallelOutput,
    ContextParallelOutputType,
)
from cpcompile.report import Report
from cpcompile.simulate import check

__all__ = [
    "CPCompileError",
    "CaptureError",
    "CheckReport",
    "ContextParallelConfig",
    "ContextParallelInput",
    "ContextParallelInputType",
    "ContextParallelModelPlan",
    "ContextParallelOutput",
    "ContextParallelOutputType",
    "FallbackError",
    "MeshError",
    "ParallelConfig",
    "ParallelModule",
    "PlanError",
    "Problem",
    "RanksDisagreeError",
    "Report",
    "UnsupportedError",
    "VerificationError",
    "check",
    "parallelize",
]
