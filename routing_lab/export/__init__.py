"""A schedule leaves the lab: what a server is started with, in every form, and proof that it does what it promises.

``document`` makes an ``Export`` from a certificate; ``forms`` are other texts of the same export, ``gguf_copy`` a copy
of the model with the counts in it, ``proof`` starts the printed command and looks.
"""

from __future__ import annotations

from routing_lab.export.document import UNVALIDATED, Export, ServerSettings, export

__all__ = ["UNVALIDATED", "Export", "ServerSettings", "export"]
