"""Probes: prompts with exact answers, the files they live in, and running them on a model.

``check`` (what a set is worth on a model) and ``dataset`` (import) are imported where they are needed.
"""

from routing_lab.probes.probeset import Probe, ProbeSet, Split
from routing_lab.probes.run import KEPT_CHARACTERS, Outcome, run_probes

__all__ = ["KEPT_CHARACTERS", "Outcome", "Probe", "ProbeSet", "Split", "run_probes"]
