"""Every process works on its own GPU, and its backend can carry what it computes."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from stagewright.core.errors import InvalidInput
from stagewright.runtime import distributed, elastic
from stagewright.runtime.distributed import DistributedPipeline, init_process_group
from stagewright.runtime.inference import distributed as distributed_inference
from stagewright.runtime.ranks.device_placement import CONNECTIONS, LOADING, choose_device
from stagewright.runtime.ranks.process_groups import LAUNCHER_VARIABLES
from stagewright.runtime.rpc import stage_builder
from tests.torch_models import make_case, make_plan

START = dist.init_process_group


@pytest.fixture
def calls(monkeypatch):
    """Calls to torch on a machine with two GPUs, of which the second is taken at first."""
    found = mock.Mock()
    found.is_available.return_value, found.device_count.return_value = True, 2
    found.current_device.return_value = 1
    for name in ("is_available", "device_count", "current_device", "set_device"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    monkeypatch.setattr(dist, "init_process_group", found.init_process_group)
    connect, world = "NCCL_RUNTIME_CONNECT", "LOCAL_WORLD_SIZE"
    for name in ("CUDA_VISIBLE_DEVICES", CONNECTIONS, LOADING, connect, world, "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # put back at the end, whatever the test sets
        monkeypatch.delenv(name)
    for name in LAUNCHER_VARIABLES:
        monkeypatch.setenv(name, "0")
    return found


def order(calls):
    wanted = ("set_device", "init_process_group")
    return [(name, args[0]) for name, args, _ in calls.mock_calls if name in wanted]


def test_the_gpu_of_the_local_rank_is_taken_before_the_group_is_made(calls, monkeypatch):
    """Every process came to the first GPU."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    init_process_group()
    assert order(calls) == [("set_device", 1), ("init_process_group", "nccl")]


def test_cuda_starts_with_all_kernels_and_connections_enough(calls, monkeypatch):
    """An operation that waits for its peer could hold up the work that the peer waits for.

    They were set after the question whether there are GPUs, which starts CUDA's driver.
    """
    seen = {}
    calls.is_available.side_effect = lambda: bool(seen.update(os.environ) or True)
    init_process_group()
    assert (seen[CONNECTIONS], seen[LOADING]) == ("32", "EAGER")
    assert seen["NCCL_RUNTIME_CONNECT"] == "0"


def test_the_caller_s_own_settings_of_cuda_stay(calls, monkeypatch):
    monkeypatch.setenv(CONNECTIONS, "16")
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    init_process_group()
    assert os.environ[CONNECTIONS] == "16"
    assert os.environ["CUDA_MODULE_LOADING"] == "LAZY"


def test_a_single_connection_is_refused(calls, monkeypatch):
    monkeypatch.setenv(CONNECTIONS, "1")
    with pytest.raises(InvalidInput, match=r"CUDA_DEVICE_MAX_CONNECTIONS is 1.*unset it"):
        init_process_group()
    assert order(calls) == []


def test_a_single_connection_is_refused_whoever_made_the_group(backend, monkeypatch):
    monkeypatch.setenv(CONNECTIONS, "1")
    if backend == "gloo":
        assert choose_device(nn.Linear(2, 2), None).type == "cpu"
    else:
        with pytest.raises(InvalidInput, match="CUDA_DEVICE_MAX_CONNECTIONS is 1"):
            choose_device(nn.Linear(2, 2), None)


@pytest.mark.parametrize("loading", [None, "LAZY"])
def test_kernels_loaded_at_first_use_are_refused_on_nccl(backend, monkeypatch, loading):
    """torch sets LAZY if CUDA starts before `init_process_group`."""
    monkeypatch.delenv(LOADING) if loading is None else monkeypatch.setenv(LOADING, loading)
    if backend == "gloo":
        assert choose_device(nn.Linear(2, 2), None).type == "cpu"
    else:
        with pytest.raises(InvalidInput, match=r"CUDA_MODULE_LOADING is .*, or set it to EAGER"):
            choose_device(nn.Linear(2, 2), None)


def test_the_first_gpu_is_not_shared_by_later_processes(backend, calls, monkeypatch):
    """torch's own `init_process_group` leaves every process on it."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    calls.current_device.return_value = 0
    if backend == "nccl":
        with pytest.raises(InvalidInput, match=r"process 1 .* share the first of its 2 GPUs"):
            choose_device(nn.Linear(2, 2), None)
        assert choose_device(nn.Linear(2, 2), None, "cuda:0").index == 0
        calls.device_count.return_value = 1
        assert choose_device(nn.Linear(2, 2), None).index == 0


def test_a_restarted_job_takes_them_too(calls, monkeypatch):
    named = {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}
    named |= {"MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(elastic, "TCPStore", mock.Mock())
    monkeypatch.setattr(elastic, "PrefixStore", mock.Mock())
    elastic.join()
    assert order(calls) == [("set_device", 1), ("init_process_group", "nccl")]


def test_gloo_takes_no_gpu(calls, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "7")
    init_process_group(backend="gloo")
    assert order(calls) == [("init_process_group", "gloo")]


def test_more_processes_than_gpus_are_refused(calls, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(InvalidInput, match=r"process 2 .* torch finds 2.*--nproc-per-node 2"):
        init_process_group()
    assert order(calls) == []


def test_a_process_that_sees_its_own_gpu_alone_takes_it(calls, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    calls.device_count.return_value = 1
    init_process_group()
    assert order(calls) == [("set_device", 0), ("init_process_group", "nccl")]


@pytest.mark.parametrize(
    ("shown", "world", "is_own"),
    [
        ("GPU-5c1b", "4", True), ("MIG-77ab", "4", True), ("3", "4", True), ("0", "1", True),
        ("0", "4", False), ("", "4", False),
    ],
)  # fmt: skip
def test_a_lone_gpu_is_taken_unless_it_is_process_0_s(calls, monkeypatch, shown, world, is_own):
    """One named by UUID was refused; one that torchrun gave to all processes was shared."""
    for name, value in (("LOCAL_RANK", "3"), ("LOCAL_WORLD_SIZE", world)):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    calls.device_count.return_value = 1
    if is_own:
        init_process_group()
        assert order(calls)[0] == ("set_device", 0)
    else:
        with pytest.raises(InvalidInput, match="process 3 of this machine has no GPU"):
            init_process_group()


@pytest.fixture(params=["gloo", "nccl"])
def backend(request, calls, monkeypatch):
    """A process group of the backend, as far as torch's records go."""
    monkeypatch.setenv(LOADING, "EAGER")
    store = dist.HashStore()
    START("gloo", store=store, rank=0, world_size=1)
    configured = distributed_c10d._world.pg_backend_config
    configured[dist.group.WORLD] = "cuda:nccl" if request.param == "nccl" else "cpu:gloo,cuda:gloo"
    yield request.param
    dist.destroy_process_group()


GPU = torch.device("cuda", 1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_that_is_on_no_gpu_goes_where_its_messages_can(backend, calls, device):
    """NCCL met a model on the CPU when weights were compared."""
    model = nn.Linear(2, 2, device=device)
    wanted = GPU if backend == "nccl" else torch.device("cpu")
    assert choose_device(model, None) == wanted


def test_a_device_that_the_backend_cannot_serve_is_refused(backend, calls):
    model = nn.Linear(2, 2)
    if backend == "nccl":
        assert choose_device(model, None, "cuda") == GPU
        assert choose_device(model, None, "cuda:0") == torch.device("cuda", 0)
        # Or NCCL would use the other one for barriers.
        assert [args[0] for args, _ in calls.set_device.call_args_list] == [
            GPU,
            torch.device("cuda:0"),
        ]
        with pytest.raises(InvalidInput, match=r"device= is cpu; leave it out"):
            choose_device(model, None, "cpu")
    else:
        assert choose_device(model, None, "cpu") == torch.device("cpu")
        with pytest.raises(InvalidInput, match=r'gloo .*backend="nccl"'):
            choose_device(model, None, "cuda:0")


def test_inference_follows_nccl_to_the_gpu_and_gloo_to_the_model(backend, calls):
    """Weights on the CPU met NCCL when they were compared."""
    found = distributed_inference._choose_device(nn.Linear(2, 2), None, None)
    assert found == (GPU if backend == "nccl" else torch.device("cpu"))
    assert distributed_inference._choose_device(nn.Linear(2, 2), GPU, None) == GPU


@pytest.mark.parametrize(
    ("device", "wanted"), [("cuda", GPU), ("cuda:0", torch.device("cuda", 0)), (None, None)]
)
def test_a_worker_of_rpc_takes_the_gpu_of_its_local_rank(calls, monkeypatch, device, wanted):
    """``cuda`` was the first one in every process."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    made = mock.Mock()
    monkeypatch.setattr(stage_builder, "StageServer", made)
    stage = nn.Linear(2, 2)
    stage_builder._create_server(mock.Mock(stages=[stage], tied=()), 0, device)
    assert made.call_args.args[:3] == (stage, 0, wanted)
    assert order(calls) == ([("set_device", 1)] if device == "cuda" else [])


def test_all_that_a_stage_holds_goes_to_the_device_chosen(monkeypatch):
    """``meta`` plays the GPU. What stayed on the CPU met NCCL when weights were compared."""
    device = torch.device("meta")
    monkeypatch.setattr(distributed, "choose_device", lambda *_: device)
    case = make_case("resnet")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        pipeline = DistributedPipeline(case.model, make_plan(case, 1), loss_fn=case.loss_fn)
        held = pipeline.module.state_dict()
        pipeline.close()
    finally:
        dist.destroy_process_group()
    assert {name for name, tensor in held.items() if tensor.device != device} == set()
    assert any("running_mean" in name for name in held)


@pytest.mark.parametrize("left_out", LAUNCHER_VARIABLES)
def test_a_script_without_a_launcher_is_told_of_one(calls, monkeypatch, left_out):
    """torch's error named the variable and not what sets it, after the GPU had been taken."""
    monkeypatch.delenv(left_out)
    with pytest.raises(InvalidInput, match=f"{left_out} not set .*torchrun --nproc-per-node 2"):
        init_process_group()
    assert order(calls) == []
