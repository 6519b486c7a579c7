"""Per-layer expert counts for mixture-of-experts models: searched for speed, gated by exact answers, run on llama.cpp."""

__version__ = "0.1.0"
