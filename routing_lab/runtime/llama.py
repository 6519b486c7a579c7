"""The runtime on llama.cpp: one model in a supervised process, schedules switched under attestation."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

from routing_lab.errors import AttestationError, RuntimeFailureError, RuntimeUnsupportedError
from routing_lab.model import ModelFacts
from routing_lab.runtime.base import (
    Attestation,
    Capability,
    DecodeTiming,
    Draft,
    Generation,
    RuntimeBuild,
    RuntimeOptions,
    Verified,
)
from routing_lab.runtime.engine import Loaded, LoadSpec, Switched
from routing_lab.runtime.libllama import Buffer, Device
from routing_lab.runtime.native import override_library, plain_kernels_library
from routing_lab.runtime.process import ModelProcess
from routing_lab.runtime.symbols import unfit_reason
from routing_lab.schedule import Schedule

__all__ = [
    "LlamaRuntime",
    "available_cores",
    "default_threads",
    "file_digest",
    "graph_too_large",
    "libllama_path",
    "with_errors_of",
]

_TINY_MODEL_BYTES = 32 * 2**20

# What llama.cpp says before it aborts on a graph with more nodes than it has room for.
# (A server's own log is written by another thread, and of its last words only the assertion is certain.)
_GRAPH_TOO_LARGE = ("cgraph->n_nodes <", "not enough space in the context's memory pool", "GGML_ASSERT(obj_new) failed")


def libllama_path(library_dir: Path | None = None) -> Path:
    """The libllama that ``llama_cpp`` would load, found without importing it.

    Raises:
        RuntimeUnsupportedError: llama-cpp-python is not installed, or there is no library in its folder.
    """
    named = library_dir or os.environ.get("LLAMA_CPP_LIB_PATH")
    if named:
        folder = Path(named)
    else:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or spec.origin is None:
            raise RuntimeUnsupportedError("llama-cpp-python is not installed: pip install llama-cpp-python==0.3.36")
        folder = Path(spec.origin).parent / "lib"
    names = {"darwin": ("libllama.so", "libllama.dylib"), "win32": ("llama.dll", "libllama.dll")}
    for name in names.get(sys.platform, ("libllama.so",)):
        if (folder / name).is_file():
            return folder / name
    raise RuntimeUnsupportedError(
        f"there is no libllama in {folder}: LLAMA_CPP_LIB_PATH or library_dir must name the folder of a shared build"
    )


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_threads(facts: ModelFacts) -> int:
    """Threads for a model where the user names none: every core, but one for a model that fits a core's caches.

    Threads meet at a barrier after every node of the graph, hundreds of times per token. A tiny model decodes a token
    in half a millisecond, so the barriers cost more than a second core brings, and on a busy machine far more.
    """
    return 1 if facts.size_bytes < _TINY_MODEL_BYTES else available_cores()


@functools.cache
def _digest(path: Path, _size: int, _modified_ns: int) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def file_digest(path: Path) -> str:
    """``sha256:`` and the digest of a file, read again only where the file has changed."""
    status = path.stat()
    return _digest(path, status.st_size, status.st_mtime_ns)


class LlamaRuntime:
    """A model in llama.cpp whose schedule can be switched; see ``base.Runtime`` for the contract.

    The weights are read once, and again only after the process was lost or for another uniform count where the
    override cannot be used. Before the first ``apply`` the model's own counts are applied, attested like any schedule.
    Calls from several threads wait for each other.

    Raises:
        UserFileError: The model file is bad, or the placement does not fit it.
        RuntimeUnsupportedError: There is no usable libllama, or it cannot load the model.
        RuntimeFailureError: The process died while it loaded the model.
    """

    def __init__(self, model: Path, options: RuntimeOptions | None = None) -> None:
        self._facts = ModelFacts.read(model)
        given = options or RuntimeOptions()
        # Resolved here and not where it is used, so that studies and certificates name the number that was used.
        self._options = replace(given, threads=given.threads or default_threads(self._facts))
        self._options.placement.check(self._facts)
        self._library = libllama_path(self._options.library_dir)
        self._override, self._no_override = self._find_override()
        self._lock = threading.RLock()
        self._weight_loads = 0
        self._loads_of_process = 0
        self._process: ModelProcess | None = None
        self._applied: Schedule | None = None
        self._loaded = self._start()

    # ---- what it is ------------------------------------------------------------------------------------------------

    @property
    def facts(self) -> ModelFacts:
        """Facts of the loaded model."""
        return self._facts

    @property
    def options(self) -> RuntimeOptions:
        """The options the model was loaded with."""
        return self._options

    @property
    def capability(self) -> Capability:
        """How this runtime sets expert counts."""
        if self._no_override is None:
            return Capability.PRELOAD
        own = dict(self._facts.experts_used)
        if len(set(own.values())) > 1 and dict(self._loaded.switched.selected) == own:
            return Capability.GGUF_ARRAY
        return Capability.UNIFORM_ONLY

    @property
    def no_override_reason(self) -> str | None:
        """Why per-block counts cannot be set here; ``None`` where they can."""
        return self._no_override

    @property
    def override(self) -> Path | None:
        """The override library in use."""
        return self._override if self._no_override is None else None

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that llama.cpp lists."""
        return tuple(self._loaded.devices)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """What libllama said it took of each device's memory when it loaded the model."""
        return tuple(self._loaded.buffers)

    @property
    def build(self) -> RuntimeBuild:
        """The library that runs the model."""
        return RuntimeBuild(
            name="llama.cpp",
            version=self._loaded.version,
            library=self._loaded.library,
            library_digest=file_digest(Path(self._loaded.library).resolve()),
            system_info=self._loaded.system_info,
        )

    @property
    def weight_loads(self) -> int:
        """How often the weights were read so far."""
        return self._weight_loads

    @property
    def process_id(self) -> int | None:
        """Id of the model's process; ``None`` while there is none."""
        return self._process.pid if self._process else None

    # ---- what it does ----------------------------------------------------------------------------------------------

    def apply(self, schedule: Schedule) -> Attestation:
        """Switch to ``schedule`` and read the counts back; see ``base.Runtime.apply``."""
        counts = schedule.resolve(self._facts)
        request = self._switch_request(schedule, counts)
        with self._lock:
            if self._process is None:
                self._loaded = self._start()
            attestation = self._switch(request, counts)
            self._applied = schedule
        return attestation

    def render_chat(self, user: str, *, thinking: bool | None = None) -> str:
        """The prompt of the model's own chat template; see ``base.Runtime.render_chat``."""
        text: str = self._ask("render_chat", user=user, thinking=thinking)["text"]
        return text

    def generate(self, prompt: str, *, max_tokens: int, stop: Sequence[str] = (), margins: bool = False) -> Generation:
        """Greedy completion; see ``base.Runtime.generate``."""
        reply = self._ask("generate", prompt=prompt, max_tokens=max_tokens, stop=list(stop), margins=margins)
        return _generation(reply)

    def verify(self, drafts: Sequence[Draft], *, stop: Sequence[str] = (), tie_margin: float = 0.0) -> list[Verified]:
        """Check drafts in batches; see ``base.Verifier.verify``."""
        given = [asdict(draft) for draft in drafts]
        replies = self._ask("verify", drafts=given, stop=list(stop), tie_margin=tie_margin)["verified"]
        return [Verified(**{**reply, "generation": _generation(reply["generation"])}) for reply in replies]

    def decode_timing(self, *, tokens: int, prompt_tokens: int = 16) -> DecodeTiming:
        """Time single-token decodes; see ``base.Runtime.decode_timing``."""
        return DecodeTiming(**self._ask("decode_timing", tokens=tokens, prompt_tokens=prompt_tokens))

    def logits(self, prompt: str) -> bytes:
        """Logits after the last token of ``prompt`` as float32 in native byte order; for checks of exactness."""
        return bytes.fromhex(self._ask("logits", prompt=prompt)["float32"])

    def close(self) -> None:
        """End the model's process; safe to call twice. A later call starts it again."""
        with self._lock:
            self._discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the process -----------------------------------------------------------------------------------------------

    def _find_override(self) -> tuple[Path | None, str | None]:
        """The override library, or why there is none to use."""
        if self._options.override == "off":
            return None, "the expert override is switched off"
        if reason := unfit_reason(self._library):
            return None, reason
        try:
            return override_library(), None
        except RuntimeUnsupportedError as error:
            return None, str(error)

    def _load_spec(self) -> LoadSpec:
        options = self._options
        return LoadSpec(
            model=str(self._facts.files[0]),
            architecture=self._facts.architecture,
            override_library=str(self._override) if self._override else None,
            threads=options.threads or default_threads(self._facts),
            context_tokens=options.context_tokens,
            batch_tokens=options.batch_tokens,
            kv_type=options.kv_type,
            gpu_layers=options.placement.gpu_layers,
            host_tensors=list(options.placement.override_patterns()),
            plain_library=str(plain) if (plain := plain_kernels_library()) else None,
            host_kv=options.placement.host_kv,
            mmap=options.mmap,
            rpc=list(options.rpc_servers),
        )

    def _start(self) -> Loaded:
        process = ModelProcess(library_dir=self._library.parent, request_timeout_s=self._options.request_timeout_s)
        self._process, self._loads_of_process = process, 0
        try:
            reply = process.request("load", **asdict(self._load_spec()))
        except RuntimeUnsupportedError as error:
            self._discard()  # first, so that the tail is complete: the answer can overtake the log
            raise RuntimeUnsupportedError(with_errors_of(process.log_tail(), str(error))) from None
        except BaseException:
            self._discard()
            raise
        loaded = Loaded(
            **{
                **reply,
                "devices": [Device(**device) for device in reply["devices"]],
                "buffers": [Buffer(**buffer) for buffer in reply["buffers"]],
                "switched": self._switched(reply["switched"]),
            }
        )
        self._require_device(loaded)
        if self._override and self._facts.is_moe and not loaded.override_reached:
            self._no_override = (
                f"{loaded.library} does not call build_moe_ffn through its symbol table (linked with -Bsymbolic?), "
                "so the expert override cannot reach it"
            )
        return loaded

    def _require_device(self, loaded: Loaded) -> None:
        """Refuse layers on a device that is not there: libllama takes the host, and says nothing."""
        layers = self._options.placement.gpu_layers
        if layers and not any(device.kind in {"gpu", "integrated gpu"} for device in loaded.devices):
            self._discard()
            raise RuntimeUnsupportedError(
                f"the placement puts {layers} layers on a device, and {loaded.library} lists none, so all would run in "
                "host memory; leave the placement away, or name a --library that has one"
            )

    def _switched(self, reply: Mapping[str, Any]) -> Switched:
        self._weight_loads += reply["loads"] - self._loads_of_process
        self._loads_of_process = reply["loads"]
        return Switched(**reply)

    def _discard(self) -> None:
        if self._process:
            self._process.close()
            self._process = None

    def _request(self, do: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
        assert self._process is not None, "started by the caller"  # noqa: S101
        try:
            return self._process.request(do, **fields)
        finally:
            if self._process.closed:
                self._process = None

    def _ask(self, do: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
        """One request under the applied schedule, on a process that is started where there is none."""
        with self._lock:
            if self._process is None or self._applied is None:
                self.apply(self._applied or Schedule.baseline(self._facts))
            return self._request(do, **fields)

    # ---- switching -------------------------------------------------------------------------------------------------

    def _switch_request(self, schedule: Schedule, counts: Mapping[int, int]) -> dict[str, Any]:
        if self._no_override is None:
            return {"experts": schedule.key(self._facts) if counts else "", "uniform": None}
        if dict(counts) == dict(self._facts.experts_used):
            return {"experts": "", "uniform": None}
        distinct = set(counts.values())
        if len(distinct) == 1:
            return {"experts": "", "uniform": distinct.pop()}
        raise RuntimeUnsupportedError(
            f"schedule {schedule.name} sets counts per block, which this runtime cannot do "
            f"(a uniform schedule works): {self._no_override}"
        )

    def _switch(self, request: Mapping[str, Any], counts: Mapping[int, int]) -> Attestation:
        try:
            switched = self._switched(self._request("switch", **request))
            return _attest(counts, switched)
        except AttestationError:
            self._discard()  # nothing may run under counts that nobody asked for
            raise
        except RuntimeFailureError as error:
            if refusal := graph_too_large(error, counts):
                raise refusal from error
            raise


def _generation(reply: Mapping[str, Any]) -> Generation:
    margins = reply["margins"]
    return Generation(
        **{**reply, "token_ids": tuple(reply["token_ids"]), "margins": None if margins is None else tuple(margins)}
    )


def _attest(counts: Mapping[int, int], switched: Switched) -> Attestation:
    """Compare every witness with the counts that were wanted."""
    selected, summed = dict(switched.selected), dict(switched.summed)
    built = {block: (given, length) for block, given, length in switched.built}
    for block, wanted in counts.items():
        if selected.get(block) != wanted:
            raise AttestationError(block, wanted, selected.get(block))
        if summed.get(block) != wanted:
            raise AttestationError(block, wanted, summed.get(block), "that is the length of the sum over its experts")
        if built and built.get(block) != (wanted, wanted):
            raise AttestationError(block, wanted, built.get(block, (None,))[0], "that is the working context's graph")
    return Attestation(selected=selected, summed=summed)


def graph_too_large(error: RuntimeFailureError, counts: Mapping[int, int]) -> RuntimeUnsupportedError | None:
    """The refusal that a failure stands for where llama.cpp had no room for the graph of ``counts``."""
    if not any(sign in error.log_tail for sign in _GRAPH_TOO_LARGE):
        return None
    return RuntimeUnsupportedError(
        f"the schedule consults {sum(counts.values())} experts over all blocks, and a graph of that size "
        "exceeds what llama.cpp reserves for this model (most architectures: 8 nodes for each tensor, at "
        "least 1024); every expert takes two nodes, so lower the largest counts"
    )


def with_errors_of(log: str, message: str) -> str:
    """Add the lines of the log in which libllama says what went wrong."""
    telling = [line for line in log.splitlines() if "error" in line.lower() or "failed" in line.lower()]
    return "\n  ".join([message, *telling[-3:]])
