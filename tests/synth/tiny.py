"""The shapes at sizes that take milliseconds."""

from __future__ import annotations

from routing_lab.synth import DEEPSEEK_V2_LITE, NEMOTRON_3_NANO_30B_A3B, QWEN3_30B_A3B, QWEN35_35B_A3B, Shape

TINY: dict[str, Shape] = {
    "qwen3moe": QWEN3_30B_A3B.scaled(blocks=4, width=1 / 16, experts=16, vocabulary=512),
    # Blocks 3 and 7 have full attention, block 8 is for drafting.
    "qwen35moe": QWEN35_35B_A3B.scaled(blocks=9, width=1 / 16, experts=16, vocabulary=512),
    "deepseek2": DEEPSEEK_V2_LITE.scaled(blocks=4, width=1 / 16, experts=16, vocabulary=512),
    # Mixers in blocks 0, 2, 4 and 7, attention in 5, experts in 1, 3, 6 and 8.
    "nemotron_h_moe": NEMOTRON_3_NANO_30B_A3B.scaled(blocks=9, width=1 / 16, experts=16, vocabulary=512),
    # llama.cpp knows the published model by its number of blocks and asks any other for one key more.
    "deepseek2-27": DEEPSEEK_V2_LITE.scaled(width=1 / 32, experts=8, vocabulary=512),
}
