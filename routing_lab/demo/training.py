"""The training of the demo model: batches, losses, steps, checkpoints.

The loss is the cross-entropy of the completion plus two terms of the routers: the usual balance
term, and a *spread* term (log k minus the entropy of the top-k weights) that keeps the router from
leaning on one expert. Without it the number of experts hardly matters: the demo model is **made**
to use all its experts. Needs the extra ``train``; the command line is ``routing_lab.demo.train``.
"""

import json
import math
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing
from torch.nn import functional

from routing_lab.demo import tasks, vocabulary
from routing_lab.demo.gguf_export import Precision, write_gguf
from routing_lab.demo.network import Layout, Network, NetworkConfig
from routing_lab.demo.settings import Job, TrainingConfig

__all__ = ["exact_match", "export", "load_network", "train"]

LOG_EVERY_STEPS = 25
EVALUATION_PROBLEMS = 50  # of each kind


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences laid end to end, and the positions whose next token is part of a completion."""

    tokens: Tensor  # [N]
    layout: Layout
    predicts: Tensor  # [M] positions that predict a completion token
    targets: Tensor  # [M] those tokens
    owners: Tensor  # [M] index of the problem each belongs to

    @staticmethod
    def of_problems(problems: Sequence[tasks.Problem]) -> "Batch":
        """Encode bos + prompt + completion + eos of each problem."""
        tokens: list[int] = []
        predicts: list[int] = []
        owners: list[int] = []
        lengths: list[int] = []
        for owner, problem in enumerate(problems):
            prompt = [vocabulary.BOS_ID, *vocabulary.encode(problem.prompt)]
            completion = [*vocabulary.encode(problem.completion), vocabulary.EOS_ID]
            first = len(tokens) + len(prompt) - 1
            predicts.extend(range(first, first + len(completion)))
            owners.extend([owner] * len(completion))
            tokens += prompt + completion
            lengths.append(len(prompt) + len(completion))
        at = torch.tensor(predicts)
        sequence = torch.tensor(tokens)
        return Batch(sequence, Layout.of_lengths(lengths), at, sequence[at + 1], torch.tensor(owners))


def _rate(step: int, config: TrainingConfig) -> float:
    """Return the learning rate at `step`: linear warm-up, then a cosine to the final rate."""
    if step < config.warmup_steps:
        return config.peak_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    swing = (1 + math.cos(math.pi * progress)) / 2
    return config.final_rate + (config.peak_rate - config.final_rate) * swing


def exact_match(network: Network, problems: Sequence[tasks.Problem], counts: Sequence[int] | None = None) -> float:
    """Return the share of `problems` whose whole completion the network predicts greedily.

    One pass with the right completion as input: if every token is the best one there, greedy
    decoding writes exactly this completion. A lower bound of the accuracy of the answers alone.
    """
    batch = Batch.of_problems(problems)
    with torch.no_grad():
        logits, _ = network(batch.tokens, batch.layout, counts)
    missed = batch.owners[logits[batch.predicts].argmax(dim=-1) != batch.targets]
    return 1.0 - len(set(missed.tolist())) / len(problems)


def _average_gradients(network: Network) -> None:
    """Average the gradients of all workers, in one message."""
    if not distributed.is_initialized():
        return
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    flat /= distributed.get_world_size()
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, mean in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(mean.view_as(gradient))


def _step(
    network: Network,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    config: TrainingConfig,
) -> dict[str, float]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, router = network(batch.tokens, batch.layout)
    answer = functional.cross_entropy(logits[batch.predicts], batch.targets)
    loss = answer + config.balance_weight * router.balance + config.spread_weight * router.spread
    optimizer.zero_grad()
    loss.backward()
    _average_gradients(network)
    norm = torch.nn.utils.clip_grad_norm_(network.parameters(), config.clip_norm)
    optimizer.step()
    return {
        "loss": answer.item(),
        "balance": router.balance.item(),
        "spread": router.spread.item(),
        "grad_norm": norm.item(),
    }


def _optimizer(network: Network, config: TrainingConfig) -> torch.optim.AdamW:
    matrices = [p for p in network.parameters() if p.dim() > 1]
    scales = [p for p in network.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": scales, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.peak_rate, betas=(0.9, 0.98), fused=True)


def _evaluate(network: Network, per_kind: int, seed: int) -> dict[str, float]:
    """Return exact match per kind with all experts, and over all kinds with fewer everywhere."""
    sets = {kind: tasks.fresh_problems(kind, per_kind, seed) for kind in tasks.KINDS}
    result = {kind: exact_match(network, problems) for kind, problems in sets.items()}
    everything = [problem for problems in sets.values() for problem in problems]
    full = network.config.expert_used_count
    for used in (full * 3 // 4, full // 2, full // 4, 1):
        counts = [used] * network.config.block_count
        result[f"uniform_{used}"] = exact_match(network, everything, counts)
    return {name: round(value, 4) for name, value in result.items()}


def _save(path: Path, network: Network, **state: object) -> None:
    partial = path.with_name(path.name + ".partial")
    weights = network.state_dict()
    torch.save({"network_config": asdict(network.config), "network": weights, **state}, partial)
    partial.replace(path)


def load_network(checkpoint: Path) -> Network:
    """Return the network stored in `checkpoint`."""
    state = torch.load(checkpoint, weights_only=True)
    network = Network(NetworkConfig(**state["network_config"]))
    network.load_state_dict(state["network"])
    return network


def export(checkpoint: Path, path: Path, precision: Precision = "q8_0") -> None:
    """Write the network in `checkpoint` as a GGUF file at `path`, atomically."""
    network = load_network(checkpoint)
    weights = {name: tensor.float().numpy() for name, tensor in network.state_dict().items()}
    write_gguf(path, asdict(network.config), weights, precision)


def _batches(config: TrainingConfig, skip: int, worker: int, workers: int) -> Iterator[Batch]:
    """Yield this worker's part of the run's batches; a resumed run skips those it has seen."""
    # A generator of its own: the problems do not depend on how the weights were initialised.
    stream = tasks.training_problems(random.Random(config.seed))
    for step in range(config.steps):
        problems = [next(stream) for _ in range(config.problems_per_step)]
        if step >= skip:
            share = len(problems) // workers
            yield Batch.of_problems(problems[worker * share : (worker + 1) * share])


@dataclass(slots=True)
class _Run:
    """What changes while the schedule runs."""

    network: Network
    optimizer: torch.optim.Optimizer
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def load(self, checkpoint: Path) -> None:
        state = torch.load(checkpoint, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]

    @property
    def progress(self) -> dict[str, float]:
        return {"step": self.step, "tokens": self.tokens, "seconds": self.seconds}


def _record(job: Job, values: dict[str, object]) -> None:
    with (job.directory / "log.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps(values) + "\n")


def _worker(worker: int, job: Job, shape: NetworkConfig, config: TrainingConfig) -> None:
    """Run one worker's part; the first one alone writes files."""
    if (parent := parent_process()) is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.set_num_threads(job.threads)
    if job.workers > 1:
        meeting = f"file://{(job.directory / 'workers').resolve()}"
        distributed.init_process_group("gloo", init_method=meeting, rank=worker, world_size=job.workers)
    torch.manual_seed(config.seed)
    network = Network(shape)
    run = _Run(network, _optimizer(network, config))
    if job.resume:
        run.load(job.checkpoint)
    started = time.monotonic() - run.seconds
    if worker == 0:
        _record(job, {"event": "start", **run.progress, "workers": job.workers, **asdict(config), **asdict(shape)})
    for batch in _batches(config, run.step, worker, job.workers):
        rate = _rate(run.step, config)
        for group in run.optimizer.param_groups:
            group["lr"] = rate
        losses = _step(network, run.optimizer, batch, config)
        run.step += 1
        run.tokens += len(batch.tokens) * job.workers
        run.seconds = time.monotonic() - started
        if worker == 0:
            _report(job, config, run, {"rate": rate, **losses})


def _end_with(parent: BaseProcess) -> None:
    """End this worker when the process that started it is gone: its fellows would wait for ever for its part."""
    parent.join()
    os._exit(1)


def _report(job: Job, config: TrainingConfig, run: _Run, losses: dict[str, float]) -> None:
    """Log, save and evaluate after the steps that ask for it."""
    if run.step % LOG_EVERY_STEPS == 0:
        _record(job, {name: round(value, 5) for name, value in {**run.progress, **losses}.items()})
    if run.step % job.save_every_steps == 0 or run.step == config.steps:
        state = {"optimizer": run.optimizer.state_dict(), "training_config": asdict(config), **run.progress}
        _save(job.checkpoint, run.network, **state)
        accuracy = _evaluate(run.network, EVALUATION_PROBLEMS, seed=run.step)
        _record(job, {"event": "evaluation", "step": run.step, **accuracy})


def train(job: Job, shape: NetworkConfig, config: TrainingConfig) -> None:
    """Run the schedule of `config`; write ``checkpoint.pt`` and ``log.jsonl`` to the job's directory."""
    job.directory.mkdir(parents=True, exist_ok=True)
    (job.directory / "workers").unlink(missing_ok=True)
    if job.workers == 1:
        _worker(0, job, shape, config)
    else:
        multiprocessing.spawn(_worker, args=(job, shape, config), nprocs=job.workers)
