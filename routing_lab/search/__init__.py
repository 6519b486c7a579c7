"""Search a space of schedules with Optuna: the only room of the house that knows Optuna.

``run_study`` runs or continues a study; ``load_study`` reads one; ``candidates`` lists what passed. Importing this
package loads Optuna.
"""

from routing_lab.search.records import BaselineRecord, Ending, Seconds, StudyRecord, TrialRecord, candidates
from routing_lab.search.session import Progress, Stop
from routing_lab.search.settings import SAMPLER_NAMES, StudySettings
from routing_lab.search.storage import load_study, read_trials, study_names
from routing_lab.search.study import StudyResult, run_study

__all__ = [
    "SAMPLER_NAMES",
    "BaselineRecord",
    "Ending",
    "Progress",
    "Seconds",
    "Stop",
    "StudyRecord",
    "StudyResult",
    "StudySettings",
    "TrialRecord",
    "candidates",
    "load_study",
    "read_trials",
    "run_study",
    "study_names",
]
