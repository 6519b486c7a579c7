"""What a graph consults, read off its nodes before it runs: the witness that needs nobody's word."""

from __future__ import annotations

import ctypes
import re
from typing import Any

from routing_lab.runtime.libllama import ggml_function

__all__ = ["Witness"]

_SELECTION = re.compile(rb"ffn_moe_topk-(\d+)")
_LAST_NODE = b"result_output"
# The sum over experts begins with one view of their weighted outputs for each expert. (Llama 4 weighs the input
# instead, so that its outputs are summed as they come out of the down projection.)
_SUMMAND = re.compile(rb"ffn_moe_(?:weighted|down|down_scaled|down_biased)-(\d+) \(view\)")


class Witness:
    """Reads expert counts off the nodes of a graph that is about to run, through llama.cpp's ``cb_eval``.

    ``selected`` has for each block the length of its top-k, ``summed`` that of the sum over its experts. A part of a
    graph is shown as a whole before it is computed. ``stop`` is an abort callback for the computation of the part that
    ends with the last node: with everything on the CPU there is one part, and nothing is computed.
    """

    def __init__(self, api: Any) -> None:  # noqa: ANN401 (the module llama_cpp.llama_cpp has no type)
        self.selected: dict[int, int] = {}
        self.summed: dict[int, int] = {}
        self._complete = False
        self._name, self._elements, self._rows = (
            ggml_function(api, name, restype)
            for name, restype in (
                ("ggml_get_name", ctypes.c_char_p),
                ("ggml_nelements", ctypes.c_int64),
                ("ggml_nrows", ctypes.c_int64),
            )
        )
        self.callback = api.ggml_backend_sched_eval_callback(self._see)
        self.stop = api.ggml_abort_callback(lambda _data: self._complete)

    def _see(self, tensor: int, ask: bool, _data: int | None) -> bool:  # noqa: FBT001 (the C signature)
        if ask:
            name = self._name(tensor)
            if selection := _SELECTION.fullmatch(name):
                self.selected[int(selection[1])] = self._elements(tensor) // max(1, self._rows(tensor))
            elif summand := _SUMMAND.fullmatch(name):
                block = int(summand[1])
                self.summed[block] = self.summed.get(block, 0) + 1
            elif name == _LAST_NODE:
                self._complete = True
        return False  # the data of no node is needed, so the graph stays in one piece
