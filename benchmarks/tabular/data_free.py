"""How much each block loses by consulting fewer experts, from its weights alone: the ranking that LExI searches with.

What: for every block and count, the mean norm of the difference between what the block's experts give with its own
count and with fewer, on standard normal inputs (LExI, arXiv 2509.02753, section on layer sensitivity). No probe is
asked and no text is read. The comparison beside it is measured: the share of the baseline's tokens that the demo model
keeps when that block alone is cut, from the table.

    python benchmarks/tabular/data_free.py
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from routing_lab.demo import model_path

COUNTS = (2, 3, 5, 8)
SAMPLES = 512


def sensitivities(model: Path, counts: tuple[int, ...] = COUNTS, seed: int = 0) -> np.ndarray:
    """Loss of each (block, count): one row for each block, one column for each count."""
    reader = gguf.GGUFReader(model)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    blocks = sorted(int(name.split(".")[1]) for name in tensors if name.endswith("ffn_gate_inp.weight"))
    dice = np.random.default_rng(seed)

    def weights(name: str) -> np.ndarray:
        tensor = tensors[name]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tuple(reversed(tensor.shape)))

    rows = []
    for block in blocks:
        parts = tuple(
            weights(f"blk.{block}.ffn_{part}.weight") for part in ("gate_inp", "up_exps", "gate_exps", "down_exps")
        )
        inputs = dice.standard_normal((SAMPLES, parts[0].shape[1]))
        whole = _mixture(inputs, parts, max(counts))
        rows.append([float(np.linalg.norm(_mixture(inputs, parts, count) - whole, axis=1).mean()) for count in counts])
    return np.array(rows)


def _mixture(inputs: np.ndarray, parts: tuple[np.ndarray, ...], count: int) -> np.ndarray:
    """The experts' part of a block for ``count`` of them: softmax over all, the best ones weighed to a sum of 1."""
    router, up, gate, down = parts
    odds = inputs @ router.T
    odds = np.exp(odds - odds.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    best = np.argsort(-odds, axis=1)[:, :count]
    out = np.zeros_like(inputs)
    share = np.take_along_axis(odds, best, axis=1)
    share /= share.sum(axis=1, keepdims=True)
    for expert in range(len(up)):
        row, rank = np.nonzero(best == expert)
        x = inputs[row]
        inner = x @ gate[expert].T
        hidden = inner / (1 + np.exp(-inner)) * (x @ up[expert].T)
        out[row] += share[row, rank][:, None] * (hidden @ down[expert].T)
    return out


def main() -> None:
    """Print the losses beside what was measured."""
    losses = sensitivities(model_path())
    with np.load(Path(__file__).with_name("demo-space.npz")) as table:
        points, kept = table["points"], table["kept"].sum(axis=1)
    usual = kept[(points == max(COUNTS)).all(axis=1)][0]
    print("block  " + "  ".join(f"loss at {count}  kept" for count in COUNTS[:-1]))
    pairs = []
    for block, row in enumerate(losses):
        cells = []
        for count, loss in zip(COUNTS[:-1], row, strict=False):
            only = np.full(points.shape[1], max(COUNTS))
            only[block] = count
            share = kept[(points == only).all(axis=1)][0] / usual
            pairs.append((loss, 1 - share))
            cells.append(f"{loss:9.3f}  {share:4.0%}")
        print(f"{block:5}  " + "  ".join(cells))
    ranks = np.argsort(np.argsort(np.array(pairs), axis=0), axis=0)
    print(f"rank correlation of loss and tokens lost: {np.corrcoef(ranks.T)[0, 1]:.2f}")


if __name__ == "__main__":
    main()
