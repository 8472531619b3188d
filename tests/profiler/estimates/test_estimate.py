"""Estimates: labelled, calibrated, of anything that can be captured, without touching it."""

from pathlib import Path

import pytest
import torch
from torch import nn

from stagewright.core.cluster.accelerators import get_accelerator
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import InvalidInput
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.models.families import (
    GPT2Config,
    GPT2Spec,
    MLPConfig,
    MLPSpec,
    ResNetConfig,
    ResNetSpec,
    UNetConfig,
    UNetSpec,
)
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.plan.table import describe_error
from stagewright.core.profile.profile import Profile
from stagewright.core.requests.default_samples import default_sample
from stagewright.planner.plan import plan
from stagewright.profiler.estimates.calibration import (
    CalibrationPoint,
    calibrate,
    floating_dtype,
    make_calibration_point,
)
from stagewright.profiler.estimates.estimate import (
    document,
    estimate,
    estimate_spec,
    profile_work,
    rates_for,
    spec_work,
    target,
)
from stagewright.profiler.estimates.flops import Cost
from stagewright.profiler.estimates.for_cluster import estimate_for_cluster
from stagewright.profiler.estimates.roofline import CostTable, default_rates
from stagewright.profiler.measure.profile import profile
from stagewright.profiler.models.families import build_model

MLP = MLPSpec(family="mlp", config=MLPConfig(hidden_size=256))
RESNET = ResNetSpec(family="resnet", config=ResNetConfig(depth=18, width=8))
UNET = UNetSpec(family="unet", config=UNetConfig(width=4, depth=2))
HERE = target("CPU", "float32", 1)


def total_s(profile: Profile) -> float:
    return sum(entry.forward.median_s + entry.backward.median_s for entry in profile.layers)


def as_if_measured(spec, rates) -> Profile:
    """A measured profile of a device that really has these rates."""
    found = document(spec_work(spec, default_sample(spec, 4), HERE), HERE, rates, spec)
    measured = found.provenance.model_copy(update={"source": "measured", "error_band": None})
    return found.model_copy(update={"provenance": measured})


def test_labelled_with_a_measured_error():
    found = estimate_spec(MLP, device="H100")
    assert found.provenance.source == "estimated"
    assert found.provenance.device_name == "NVIDIA H100 SXM"
    assert found.provenance.error_band is not None
    assert 0 < found.provenance.error_band < 1
    assert found.notes[0].startswith("ESTIMATED for NVIDIA H100 SXM at bfloat16")
    made = plan([found], Cluster.parse("2x80GB"), PlanOptions(num_microbatches=4))
    assert (made.estimated, made.error_band) == (True, found.provenance.error_band)
    assert f"ESTIMATED profile, {describe_error(made)}" in str(made)


def test_backward_is_its_two_parts():
    for entry in estimate_spec(RESNET, device="A100").layers:
        assert entry.backward_input is not None
        assert entry.backward_weight is not None
        both = entry.backward_input.median_s + entry.backward_weight.median_s
        assert both == pytest.approx(entry.backward.median_s)


def test_a_model_of_ones_own_is_left_alone_and_need_not_be_of_a_family():
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = estimate(model, torch.randn(16, 32), device="A100", precision="float32")
    assert [entry.layer.name for entry in found.layers] == ["0", "1", "2"]
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_neither_the_model_nor_its_sample_need_fit():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(2**18, 2**18) for _ in range(4)])
        sample = torch.empty(2**20, 2**18)
    found = estimate(model, sample, device="MI300X")
    assert sum(entry.size_bytes for entry in found.parameters) > 5e11
    assert found.storages[0].size_bytes == 2**39


def test_more_memory_bandwidth_and_more_products_are_faster():
    # A batch large enough that kernels, not the host that starts them, take the time.
    sample = default_sample(RESNET, 64)
    times = [total_s(estimate_spec(RESNET, sample, device=name)) for name in ("L4", "A100", "H100")]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 3


def test_calibration_finds_what_a_device_really_reaches():
    """Other efficiencies than the usual, seen on two models, tell the time of a third."""
    start = default_rates(HERE.device, "float32")
    real = start.scaled("matmul", 0.4).scaled("convolution", 3.0).scaled("elementwise", 2.0)
    measured = [as_if_measured(spec, real) for spec in (MLP, RESNET)]
    truth = total_s(as_if_measured(UNET, real))
    sample = default_sample(UNET, 4)
    usual = total_s(estimate_spec(UNET, sample, device="CPU", num_threads=1))
    fitted = estimate_spec(UNET, sample, device="CPU", num_threads=1, calibrate_by=measured)
    assert abs(total_s(fitted) / truth - 1) < 0.1 < abs(usual / truth - 1)
    assert fitted.provenance.calibrated_by == tuple(entry.content_id() for entry in measured)


def test_what_was_not_observed_stays_where_it_was():
    start = default_rates(get_accelerator("A100"), "bfloat16")
    seen = CalibrationPoint([[Cost("elementwise", 0, 10**9)]], [5e-3])
    found = calibrate(start, [seen])
    assert found.efficiency["attention"] == start.efficiency["attention"]
    assert CostTable(seen.costs).seconds(found)[0] == pytest.approx(5e-3, rel=0.05)


def test_roofline_is_the_longer_of_arithmetic_and_traffic():
    device = get_accelerator("A100")
    rates = default_rates(device, "bfloat16", launch="graph")
    table = CostTable([[Cost("matmul", 10**12, 1)], [Cost("matmul", 1, 10**9)], []])
    arithmetic, traffic, nothing = table.seconds(rates)
    lasting, start_s = rates.gpu.in_model, rates.gpu.constants.start_s
    share = rates.efficiency["matmul"]
    assert arithmetic == pytest.approx(lasting * 1e12 / (312e12 * share) + start_s)
    assert traffic == pytest.approx(lasting * 1e9 / (2039e9 * rates.traffic) + start_s)
    assert nothing == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"source": "estimated"}, "itself estimated"),
        ({"device": "cuda:0", "device_name": "NVIDIA H200"}, "measured on NVIDIA H200"),
    ],
)
def test_profiles_that_cannot_calibrate_are_refused(change, said):
    measured = as_if_measured(MLP, default_rates(HERE.device, "float32"))
    wrong = measured.model_copy(
        update={"provenance": measured.provenance.model_copy(update=change)}
    )
    with pytest.raises(InvalidInput, match=said):
        estimate_spec(MLP, device="CPU", calibrate_by=[wrong])
    with pytest.raises(InvalidInput, match="no model of a family"):
        estimate_spec(MLP, device="CPU", calibrate_by=[measured.model_copy(update={"spec": None})])


def changed(profile, **provenance):
    found = profile.provenance.model_copy(update=provenance)
    return profile.model_copy(update={"provenance": found})


@pytest.mark.parametrize(
    ("change", "wanted", "said"),
    [
        ({"num_threads": 1}, {"num_threads": 16}, "with 1 threads, and the estimate is with 16"),
        ({"autocast": "bfloat16"}, {}, "under autocast to bfloat16, and the estimate is at float"),
        ({"compiled": True}, {}, "compiled, and the estimate is without"),
        (
            {"device": "cuda", "device_name": "NVIDIA H100 80GB HBM3"},
            {"device": "H100", "precision": "bfloat16"},
            "in float32, and the estimate is in bfloat16",
        ),
        (
            {"device": "cuda", "device_name": "NVIDIA H100 80GB HBM3", "tf32": "convolutions"},
            {"device": "H100", "precision": "tf32"},
            "with products in float32, and the estimate is at tf32",
        ),
        (
            {"device": "cuda", "device_name": "NVIDIA H100 80GB HBM3", "tf32": "products"},
            {"device": "H100", "precision": "float32"},
            "with products in tf32, and the estimate is at float32",
        ),
    ],
)
def test_profiles_of_other_settings_are_refused_with_both(change, wanted, said):
    """A profile of one thread once calibrated an estimate of 16, without a word."""
    measured = changed(as_if_measured(MLP, default_rates(HERE.device, "float32")), **change)
    with pytest.raises(InvalidInput, match=said):
        estimate_spec(MLP, **{"device": "CPU", "num_threads": 1, **wanted}, calibrate_by=[measured])


def test_calibration_does_not_change_how_kinds_compare():
    """Speeds of other kinds were once a calibrated time over one that was not."""
    like = {"device": "cuda", "device_name": "NVIDIA A100-SXM4-80GB"}
    rates = default_rates(HERE.device, "float32").scaled("matmul", 0.3)
    measured = changed(as_if_measured(MLP, rates), **like)
    cluster = Cluster.parse("1x80GB,1x24GB")
    speeds = [
        estimate_for_cluster(
            RESNET, default_sample(RESNET, 8), cluster, precision="float32", calibrate_by=profiles
        )
        .cluster.devices[1]
        .speed
        for profiles in ([], [measured])
    ]
    assert speeds[0] == speeds[1]


def test_a_boolean_input_says_nothing_of_the_precision():
    profile = as_if_measured(MLP, default_rates(HERE.device, "float32"))
    mask = TensorSpec(name="mask", shape=(4,), dtype="bool")
    alone = profile.model_copy(update={"inputs": (mask, *profile.inputs), "boundaries": ()})
    assert floating_dtype(alone) == "float32"


def test_a_v100_is_estimated_in_float16_and_never_in_bfloat16():
    assert estimate_spec(MLP, device="V100").inputs[0].dtype == "float16"
    with pytest.raises(InvalidInput, match="does not support bfloat16"):
        estimate_spec(MLP, device="V100", precision="bfloat16")


@pytest.mark.parametrize(
    ("devices", "dtype", "said"),
    [
        ("1xA100,1xV100", "float16", ("V100", "A100-80GB")),
        ("1xRTX4090,1xP4", "float16", ("P4", "RTX4090")),
        ("1xcpu,1xcpu", "float32", None),
        ("1x80GB,1x24GB,1x8GB,1x16GB,1x32GB", "bfloat16", None),
        ("2xV100", "float16", None),
    ],
)
def test_a_device_that_decides_the_precision_of_others_is_named(devices, dtype, said):
    """Cause: one card of 2016 put a whole plan into float32, without a word."""
    cluster = Cluster.parse(devices)
    kind = "CPU" if "cpu" in devices else None
    found = estimate_for_cluster(MLP, default_sample(MLP), cluster, kind=kind).profile
    assert found.inputs[0].dtype == dtype
    told = [note for note in found.notes if "decides the precision" in note]
    assert len(told) == (said is not None)
    for note in told:
        decider, other = said
        words = f"{decider} decides the precision of all devices, {dtype}; alone, {other} in "
        assert note.startswith(words + "bfloat16 would be estimated")
    asked = estimate_for_cluster(
        MLP, default_sample(MLP), cluster, kind=kind, precision="float32"
    ).profile
    assert not any("decides" in note for note in asked.notes)


def test_a_p4_computes_16_bit_products_no_faster_than_others():
    found = [estimate_spec(MLP, device="P4", precision=name) for name in ("float16", "float32")]
    assert found[0].inputs[0].dtype == "float16"
    assert total_s(found[0]) > 0.45 * total_s(found[1]), "half the bytes at most"
    with pytest.raises(InvalidInput, match="ask for one of these, or leave the device out"):
        estimate_spec(MLP, device="P4", precision="bfloat16")


class Cached(nn.Module):
    """Keeps what it last computed, and a constant that is no buffer."""

    def __init__(self):
        super().__init__()
        self.linear, self.constant, self.last = nn.Linear(4, 4), torch.arange(4.0), None

    def forward(self, x):
        self.last = self.linear(x) * self.constant
        return self.last.relu()


def test_tensors_a_module_keeps_beside_its_state_do_not_matter():
    model = Cached()
    model(torch.randn(2, 4))
    assert total_s(estimate(model, torch.randn(2, 4), device="H100")) > 0
    assert model.last.device.type == model.constant.device.type == "cpu"
    assert model.last.requires_grad


def test_normalised_weights_can_be_estimated():
    with pytest.warns(FutureWarning):
        old = nn.utils.weight_norm(nn.Linear(4, 4))
    for layer in (old, nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))):
        model = nn.Sequential(layer, nn.ReLU())
        assert total_s(estimate(model, torch.randn(2, 4), device="H100")) > 0


def test_a_lazy_module_has_to_meet_a_sample_first():
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(InvalidInput, match=r"0\.weight.*no shape yet.*call the model on a sample"):
        estimate(model, torch.randn(2, 4), device="H100")


def test_a_frozen_part_stays_frozen_and_a_whole_model_is_trained():
    frozen = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5).eval(), nn.Linear(4, 4))
    sample = torch.randn(2, 4)
    assert estimate(frozen, sample, device="CPU").layers[1].forward.median_s < (
        estimate(frozen.eval(), sample, device="CPU").layers[1].forward.median_s
    )


def test_an_estimate_inside_no_grad_has_its_backward():
    sample = torch.randn(2, 4)
    with torch.no_grad():
        found = estimate(nn.Linear(4, 4), sample, device="H100")
    assert total_s(found) == total_s(estimate(nn.Linear(4, 4), sample, device="H100"))


def test_an_estimate_for_amd_says_that_few_were_measured():
    assert "few were AMD's" in estimate_spec(MLP, device="MI300X").notes[0]
    assert "AMD" not in estimate_spec(MLP, device="H100").notes[0]


def test_unknown_device_lists_the_catalogue():
    with pytest.raises(InvalidInput, match=r"A100-40GB.*MI300X.*CPU"):
        estimate_spec(MLP, device="TPU")


def test_slower_devices_of_a_mixed_cluster_carry_their_speed():
    cluster = Cluster.parse("1x80GB,2x24GB")
    found = estimate_for_cluster(RESNET, default_sample(RESNET, 64), cluster)
    assert {kind: entry.name for kind, entry in found.taken.items()} == {
        "80GB": "A100-80GB",
        "24GB": "RTX4090",
    }
    fast, slow, _ = found.cluster.devices
    assert fast.speed == 1.0
    alone = estimate_spec(RESNET, default_sample(RESNET, 64), device="RTX4090")
    assert slow.speed == pytest.approx(total_s(found.profile) / total_s(alone))
    assert slow.speed < 1


def test_one_kind_for_all_on_request():
    found = estimate_for_cluster(
        RESNET, default_sample(RESNET), Cluster.parse("2x24GB"), kind="L4", precision="float16"
    )
    assert found.profile.provenance.device_name == "NVIDIA L4"
    assert found.profile.inputs[0].dtype == "float16"
    assert not found.guessed


def test_calibration_by_recorded_profiles_of_a_real_cpu():
    """The profiles behind docs/evidence/estimates.md: one model by two others of its kind."""
    pytest.importorskip("transformers")
    recorded = Path(__file__).parents[3] / "benchmarks" / "profiles" / "estimate"
    held, *others = (
        Profile.read(recorded / f"{name}.json") for name in ("llama-like", "gpt2", "vit-like")
    )
    seen = make_calibration_point(profile_work(held, HERE), held)
    table, goal_s = CostTable(seen.costs), sum(seen.measured_s)
    usual, fitted = (
        table.seconds(rates).sum() / goal_s - 1
        for rates in (rates_for(HERE, ()), rates_for(HERE, others))
    )
    assert abs(fitted) < 0.2 < abs(usual)


def test_layers_split_as_those_of_a_measured_profile():
    pytest.importorskip("transformers")
    config = GPT2Config(n_layer=5, n_embd=64, n_head=8, vocab_size=128, n_positions=32)
    spec = GPT2Spec(family="gpt2", config=config)
    repeated = estimate_spec(spec, device="cpu", precision="float32")
    sample = {"input_ids": torch.zeros(repeated.inputs[0].shape, dtype=torch.int64)}
    measured = profile(build_model(spec), sample)
    assert [split.degree for split in repeated.splits] == [2, 4, 8]
    for one, other in zip(repeated.splits, measured.splits, strict=True):
        assert (one.degree, one.divided) == (other.degree, other.divided)
        for entry, found in zip(one.layers, other.layers, strict=True):
            update = {"saved_activation_bytes": 0, "workspace_bytes": 0}
            assert entry.model_copy(update=update) == found.model_copy(update=update)
