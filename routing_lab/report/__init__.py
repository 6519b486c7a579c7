"""Show results to people: terminal tables, strips of blocks, pandas frames and figures.

Tables and strips need rich only; frames import pandas and figures import matplotlib when they are called. Nothing here
runs a model or decides anything: a report is a view of a study, an evaluation, an acceptance run or a certificate.
"""

from routing_lab.report.figures import FIGURE_FORMATS, figure_frontier, figure_published, figure_strip
from routing_lab.report.frames import (
    block_columns,
    block_effects,
    evaluation_frame,
    frontier,
    published_frame,
    study_frame,
)
from routing_lab.report.joint import JointRow, joint_fields, joint_rows, joint_table
from routing_lab.report.placements import figure_sweep, memory_table, published_table, sweep_table
from routing_lab.report.sensitivity import (
    SingleCut,
    figure_sensitivity,
    sensitivity_fields,
    sensitivity_table,
    single_cuts,
)
from routing_lab.report.strip import BlockKind, StripCell, schedule_strip, strip_cells
from routing_lab.report.tables import certificate_table, evaluation_table, screening_table, validated_table

__all__ = [
    "FIGURE_FORMATS",
    "BlockKind",
    "JointRow",
    "SingleCut",
    "StripCell",
    "block_columns",
    "block_effects",
    "certificate_table",
    "evaluation_frame",
    "evaluation_table",
    "figure_frontier",
    "figure_published",
    "figure_sensitivity",
    "figure_strip",
    "figure_sweep",
    "frontier",
    "joint_fields",
    "joint_rows",
    "joint_table",
    "memory_table",
    "published_frame",
    "published_table",
    "schedule_strip",
    "screening_table",
    "sensitivity_fields",
    "sensitivity_table",
    "single_cuts",
    "strip_cells",
    "study_frame",
    "sweep_table",
    "validated_table",
]
