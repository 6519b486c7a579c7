"""The certificate: what exactly was validated, in one file that everything leaving the lab starts from."""

from routing_lab.certificate.document import SCHEMA, Certificate, now
from routing_lab.certificate.parts import (
    Answer,
    CertifiedModel,
    CertifiedOptions,
    CertifiedProbes,
    CertifiedSchedule,
    EvenSpread,
    SpeedRule,
)

__all__ = [
    "SCHEMA",
    "Answer",
    "Certificate",
    "CertifiedModel",
    "CertifiedOptions",
    "CertifiedProbes",
    "CertifiedSchedule",
    "EvenSpread",
    "SpeedRule",
    "now",
]
