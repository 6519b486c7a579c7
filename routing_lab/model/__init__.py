"""What a model file says about itself: facts from the header of a GGUF, and the digest that names its bytes."""

from routing_lab.model.blocks import MAX_BLOCKS, block_runs, count_runs, format_blocks, parse_blocks
from routing_lab.model.digest import model_digest
from routing_lab.model.facts import BlockBytes, ModelFacts
from routing_lab.model.frozen import FrozenMap
from routing_lab.model.gguf_header import TensorInfo
from routing_lab.model.memory import BlockCache, ModelMemory

__all__ = [
    "MAX_BLOCKS",
    "BlockBytes",
    "BlockCache",
    "FrozenMap",
    "ModelFacts",
    "ModelMemory",
    "TensorInfo",
    "block_runs",
    "count_runs",
    "format_blocks",
    "model_digest",
    "parse_blocks",
]
