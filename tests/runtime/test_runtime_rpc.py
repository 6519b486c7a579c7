"""Placement on a real second device: llama.cpp's RPC server on loopback holds what a placement sends there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rpcserver import RpcServer, llama_bin, rpc_server

from routing_lab import demo
from routing_lab.errors import RuntimeFailureError, RuntimeUnsupportedError
from routing_lab.model import ModelFacts, ModelMemory
from routing_lab.placement import HostTensors, Placement, TensorKind
from routing_lab.placement.plan import plan
from routing_lab.probes import ProbeSet
from routing_lab.runtime import RuntimeOptions
from routing_lab.runtime.llama import LlamaRuntime
from routing_lab.schedule import Schedule

pytestmark = pytest.mark.model

CONTEXT = 1024
PROMPT = "Q: 347+86=?\n"

PLACEMENTS = {
    "all on the device": Placement(99),
    "experts of two blocks on the host": Placement(99, (2, 3)),
    "all experts on the host": Placement(99, tuple(range(6))),
    "one kind of experts on the host": Placement(
        99, host_tensors=(HostTensors(TensorKind.DOWN_EXPERTS, (0, 1, 2)), HostTensors(TensorKind.ATTENTION, (5,)))
    ),
    "half of the layers": Placement(4),
    "cache and output on the host": Placement(99, host_output=True, host_kv=True),
}


@pytest.fixture(scope="module")
def device() -> Iterator[RpcServer]:
    with rpc_server(llama_bin()) as server:
        yield server


def options(device: RpcServer, placement: Placement, *, mmap: bool = True) -> RuntimeOptions:
    return RuntimeOptions(
        threads=1,
        context_tokens=CONTEXT,
        placement=placement,
        library_dir=device.library_dir,
        rpc_servers=(device.endpoint,),
        mmap=mmap,
    )


@pytest.fixture(scope="module")
def host(device: RpcServer, model: Path) -> Iterator[LlamaRuntime]:
    """The same library with everything on the host. An RPC server serves one client at a time, so this is none."""
    own = RuntimeOptions(threads=1, context_tokens=CONTEXT, library_dir=device.library_dir)
    with LlamaRuntime(model, own) as runtime:
        yield runtime


def taken(runtime: LlamaRuntime, *, device: bool, uses: set[str]) -> int:
    return sum(
        buffer.size_bytes
        for buffer in runtime.buffers
        if buffer.device.startswith("RPC") is device and buffer.use in uses
    )


@pytest.mark.parametrize("name", PLACEMENTS)
def test_what_a_plan_says_is_what_llama_cpp_puts_on_each_side(device: RpcServer, model: Path, name: str) -> None:
    placement = PLACEMENTS[name]
    planned = plan(ModelMemory.read(model), placement, context_tokens=CONTEXT)
    # Read and not mapped: of a mapped file, libllama counts everything between the first and the last tensor.
    with LlamaRuntime(model, options(device, placement, mmap=False)) as runtime:
        for on_device, side in ((True, planned.device), (False, planned.host)):
            assert taken(runtime, device=on_device, uses={"model"}) == pytest.approx(
                side.weight_bytes, rel=0.05, abs=20_000
            )
            assert taken(runtime, device=on_device, uses={"KV"}) == pytest.approx(side.cache_bytes, rel=0.01)
        compute = taken(runtime, device=True, uses={"compute"})
        # An estimate. This device leaves work on experts of the host to the host, for prompts too.
        assert planned.device.compute_bytes > 0.8 * compute
        if len(placement.host_experts) < len(ModelFacts.read(model).routed_blocks):
            assert planned.device.compute_bytes < 1.2 * compute


@pytest.mark.parametrize("name", PLACEMENTS)
def test_counts_are_attested_and_logits_equal_wherever_weights_live(
    device: RpcServer, host: LlamaRuntime, facts: ModelFacts, mixed: Schedule, name: str
) -> None:
    with LlamaRuntime(facts.files[0], options(device, PLACEMENTS[name])) as placed:
        assert any(listed.name.startswith("RPC") for listed in placed.devices)
        logits = []
        for schedule in (Schedule.baseline(facts), mixed):
            attestation = placed.apply(schedule)
            assert attestation.selected == attestation.summed == schedule.resolve(facts)
            host.apply(schedule)
            logits.append(placed.logits(PROMPT))
            assert logits[-1] == host.logits(PROMPT)
        assert logits[0] != logits[1]


def test_answers_do_not_depend_on_where_weights_live(device: RpcServer, host: LlamaRuntime, model: Path) -> None:
    probes = ProbeSet.load(demo.probes_path()).split("gate")[::15]
    assert probes
    host.apply(Schedule.baseline(host.facts))
    with LlamaRuntime(model, options(device, Placement(99, (2, 3)))) as placed:
        for probe in probes:
            assert placed.generate(probe.prompt, max_tokens=64).text == host.generate(probe.prompt, max_tokens=64).text


def test_a_server_that_is_not_there_is_said_to_be_missing(device: RpcServer, model: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{closed.getsockname()[1]}"
        lost = RpcServer(device.process, endpoint, device.library_dir)
        with pytest.raises(RuntimeUnsupportedError, match=f"no RPC server answers at {endpoint}"):
            LlamaRuntime(model, options(lost, Placement(99)))


def test_a_library_without_the_back_end_is_said_to_lack_it(device: RpcServer, model: Path) -> None:
    plain = RuntimeOptions(threads=1, placement=Placement(99), rpc_servers=(device.endpoint,))
    with pytest.raises(RuntimeUnsupportedError, match="has no RPC back end"):
        LlamaRuntime(model, plain)


def test_a_server_that_another_client_keeps_busy_is_named_in_the_failure(device: RpcServer, model: Path) -> None:
    hurried = replace(options(device, Placement(99)), request_timeout_s=6)
    with LlamaRuntime(model, options(device, Placement(99))), pytest.raises(RuntimeFailureError) as caught:
        LlamaRuntime(model, hurried)
    assert f"{device.endpoint}; it serves one client at a time" in caught.value.log_tail


def test_a_device_that_dies_is_a_failure_and_no_end_of_the_lab(model: Path) -> None:
    with rpc_server(llama_bin()) as server, LlamaRuntime(model, options(server, Placement(99))) as runtime:
        assert runtime.generate(PROMPT, max_tokens=4).text
        server.process.kill()
        server.process.wait()
        with pytest.raises(RuntimeFailureError):
            runtime.generate(PROMPT, max_tokens=4)
