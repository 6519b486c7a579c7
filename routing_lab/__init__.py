"""Per-layer expert counts for mixture-of-experts models: searched for speed, gated by exact answers, run by llama.cpp.

Importing the package loads nothing heavy; each room imports what it needs when it is entered.
"""

__version__ = "0.1.0"
