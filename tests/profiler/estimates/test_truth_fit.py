"""Leaving a chip out of the fit is honest: none of its rows says anything about its prediction."""

from __future__ import annotations

import importlib
from collections import defaultdict
from dataclasses import replace

import pytest

from stagewright.core.cluster.accelerators import CATALOGUE, get_accelerator
from stagewright.core.cluster.collectives import load_link_table
from stagewright.profiler.estimates.device_table import load_gpu_table
from stagewright.profiler.estimates.flops import Cost

SHAPES = [(1, 4096, 4096, k) for k in (512, 1024, 4096)] + [(1, 512, 1024, 4096)]


@pytest.fixture
def scripts(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.config.rootpath / "benchmarks"))
    return importlib.import_module("truth_fit"), importlib.import_module("truth_rows")


def rows_of(scripts, device: str, share: float) -> list:
    """Products in float32 that reach a share of a device's peak."""
    rate = get_accelerator(device).peak_flops_per_s("float32") * share
    return [
        scripts[1].Row(
            "products, fp32", device, f"{shape}", flops / rate,
            ((Cost("matmul", flops, 4 * 4096 * 4096, shape),),), "float32",
        )
        for shape in SHAPES
        for flops in [2 * shape[0] * shape[1] * shape[2] * shape[3]]
    ]  # fmt: skip


def test_rows_of_a_chip_left_out_change_nothing(scripts):
    fit = scripts[0]
    others = rows_of(scripts, "V100-PCIe", 0.9) + rows_of(scripts, "A100-PCIe-40GB", 0.8)
    own = rows_of(scripts, "L4", 0.3)
    wrong = [replace(row, measured_s=3 * row.measured_s) for row in own]
    honest = fit.fit_table([*others, *own], frozenset({"L4"}))
    assert honest == fit.fit_table([*others, *wrong], frozenset({"L4"}))
    assert honest == fit.fit_table(others)
    assert "L4" not in honest.devices


def test_a_leak_would_be_seen(scripts):
    fit = scripts[0]
    others, own = rows_of(scripts, "V100-PCIe", 0.9), rows_of(scripts, "L4", 0.3)
    wrong = [replace(row, measured_s=3 * row.measured_s) for row in own]
    assert fit.fit_table([*others, *own]) != fit.fit_table([*others, *wrong])


def test_devices_of_one_chip_are_left_out_together(scripts):
    fit = scripts[0]
    others, twin = rows_of(scripts, "V100-PCIe", 0.9), rows_of(scripts, "A100-PCIe-40GB", 0.7)
    found = fit.fit_table([*others, *twin], fit.same_chip("A100-80GB"))
    assert not any(name.startswith("A100") for name in found.devices)


def test_published_products_stay_where_only_measured_rows_are_left_out(scripts):
    """They decide about a device without others, and weigh little beside its own."""
    fit = scripts[0]
    others, own = rows_of(scripts, "V100-PCIe", 0.9), rows_of(scripts, "L4", 0.3)
    published = [
        replace(row, group="published products, fp32") for row in rows_of(scripts, "L4", 0.5)
    ]
    rows = [*others, *own, *published]
    assert fit.fit_table(rows).devices["L4"].simt == pytest.approx(0.3, rel=0.1)
    assert fit.fit_table(rows).devices["L4"].published == ()
    kept = fit.fit_table(rows, frozenset({"L4"}), keep_published=True)
    assert kept.devices["L4"].simt == pytest.approx(0.5, rel=0.1)
    assert kept.devices["L4"].published == ("simt",)
    assert kept.product_share(get_accelerator("L4"), "float32")[1] == "rule"
    assert "L4" not in fit.fit_table(rows, frozenset({"L4"})).devices


def all_reduces(
    scripts, device: str, factor: float = 1.0, host: str = "measurements", rate: float = 1e11
) -> list:
    link = get_accelerator(device).link
    return [
        scripts[1].CollectiveRow(
            device, "all_reduce", count, size, factor * (1e-5 + size / rate), link, host
        )
        for count in (2, 8)
        for size in (1024, 2**20, 2**28)
    ]


@pytest.mark.parametrize("device", ["A100-80GB", "L40S", "MI250"])
def test_all_reduces_of_a_device_left_out_change_nothing(scripts, device):
    links = importlib.import_module("truth_links")
    others = [
        row
        for name in {"A100-80GB", "L40S", "MI250"} - {device}
        for row in all_reduces(scripts, name)
    ]
    honest, wrong = (
        links.fit_links_without(
            [*others, *all_reduces(scripts, device, factor)], frozenset({device})
        )
        for factor in (1.0, 10.0)
    )
    assert honest == wrong
    own = honest[get_accelerator(device).link]
    small_s, large_s = (own.all_reduce_time_s(1024, count) for count in (2, 8))
    assert small_s < large_s < 1e-4
    assert own.basis == "guess"


def test_every_host_of_a_link_weighs_the_same(scripts):
    """Two fast hosts outweigh a slow one whose log is ten times as long."""
    links = importlib.import_module("truth_links")
    fast = [
        row
        for host in ("one", "two")
        for row in all_reduces(scripts, "A6000", host=host, rate=2e10)
    ]
    slow = all_reduces(scripts, "L40S", rate=2e9) * 10
    found = links.fit_links([*fast, *slow])["PCIe 4.0 x16"]
    assert found.bus_bandwidth(2) > 1e10
    assert found.error_band > 0.5
    assert found.source.startswith("3 hosts with A6000, L40S")


def test_published_all_reduces_of_a_device_stay_where_only_measured_ones_are_left_out(scripts):
    links = importlib.import_module("truth_links")
    rows = [
        *all_reduces(scripts, "A100-80GB", rate=1e11),
        *all_reduces(scripts, "A100-80GB", host="a log", rate=5e10),
    ]
    left_out = frozenset({"A100-80GB"})
    kept = links.fit_links_without(rows, left_out, keep_published=True)["NVLink 3"]
    assert kept.bus_bandwidth(2) == pytest.approx(5e10, rel=0.2)
    assert links.fit_links_without(rows, left_out)["NVLink 3"].basis == "guess"


def test_a_link_of_which_only_other_collectives_were_measured_follows_from_another(scripts):
    links = importlib.import_module("truth_links")
    gathers = [replace(row, operation="all_gather") for row in all_reduces(scripts, "L40S")]
    assert links.fit_links(gathers)["PCIe 4.0 x16"].basis == "guess"


def test_what_a_row_sends_is_priced_by_the_links_given(scripts):
    """Those of a device left out, and not those that the package ships for it."""
    predict = importlib.import_module("truth_predict")
    row = scripts[1].Row(
        "training, bf16", "A100-80GB", "sends 1 GB", 1.0, (), "bfloat16", "eager", sent=(1e9, 8)
    )
    figures = load_link_table()["NVLink 3"]
    slow = figures.model_copy(update={"bandwidth": ((2, 1e9),)})
    table = load_gpu_table()
    shipped, given = (
        predict.Predictor([row], links).seconds(table)[0] for links in (None, {"NVLink 3": slow})
    )
    assert shipped == pytest.approx(1e9 / figures.bus_bandwidth(8))
    assert given == pytest.approx(1.0)


def test_numbers_of_devices_not_measured_follow_the_ratio_of_the_nearest_kind(scripts):
    """A B200's host was measured with 8 devices alone."""
    links = importlib.import_module("truth_links")
    rows = [
        row
        for name, rate in (("H100", 3e11), ("B200", 6e11))
        for row in all_reduces(scripts, name, rate=rate)
        if name == "H100" or row.num_devices == 8
    ]
    table = links.fit_links(rows)
    near, found = (dict(table[f"NVLink {number}"].bandwidth) for number in (4, 5))
    assert found[2] / found[8] == pytest.approx(near[2] / near[8])


def test_truth_singles_are_of_the_catalogue_and_possible(scripts):
    figures = importlib.import_module("truth_singles")
    products, sums = list(figures.published_products()), list(figures.published_all_reduces())
    assert len(products) > 200
    assert len(sums) > 200
    for row in products:
        peak = get_accelerator(row.device).peak_flops_per_s(row.precision)
        flops = sum(cost.flops for part in row.parts for cost in part)
        assert 0.1 < flops / row.measured_s / peak < 1.25, row
    rates = {entry.link: entry.link_bandwidth_bytes_per_s for entry in CATALOGUE}
    for row in sums:
        moved = 2 * (row.num_devices - 1) / row.num_devices * row.size_bytes
        # Meshes have a link to each of their peers, and switches sum by themselves.
        assert moved / row.measured_s < rates[row.link] * max(1.1, row.num_devices - 1), row


@pytest.mark.parametrize("name", ["products.csv", "all_reduces.csv"])
def test_every_published_figure_names_its_source(scripts, name):
    figures = importlib.import_module("truth_singles")
    sources = {entry["source"] for entry in figures.read_csv(figures.FOLDER / name)}
    assert len(sources) > 20
    # A log that could not be traced to its repository says so.
    assert all("/" in source or "untraced" in source or "SC24" in source for source in sources)


def test_the_table_of_links_has_the_hosts_published(scripts):
    """Fitted before a log was added, it would say less of them than the files do."""
    figures = importlib.import_module("truth_singles")
    hosts = defaultdict(set)
    for row in figures.published_all_reduces():
        hosts[row.link].add((row.host, row.device))
    for name in ("A100-80GB", "L40S", "MI250"):  # the measurements' own
        hosts[get_accelerator(name).link].add(("measurements", name))
    found = {
        name: int(entry.source.split()[0])
        for name, entry in load_link_table().items()
        if entry.basis == "table"
    }
    assert found == {name: len(members) for name, members in hosts.items()}


def test_the_floor_of_a_smooth_device_is_small_and_that_of_a_noisy_one_its_noise(scripts):
    floor = importlib.import_module("truth_floor")
    rows = [
        scripts[1].Row(
            "products, fp32", "L4", f"{m} x {n} x {k}", 2 * m * n * k / 1e13,
            ((Cost("matmul", 2 * m * n * k, 1, (1, m, n, k)),),), "float32", facts={"m": m},
        )
        for m in (4096, 8192, 16384)
        for n in (512, 1024, 2048, 4096)
        for k in (512, 1024, 2048, 4096)
    ]  # fmt: skip
    assert floor.find_floors(rows)["products, fp32"] < 1e-6
    noisy = [
        replace(row, measured_s=row.measured_s * (1.2 if index % 2 else 0.8))
        for index, row in enumerate(rows)
    ]
    assert floor.find_floors(noisy)["products, fp32"] > 0.1


@pytest.mark.parametrize(
    ("folders", "options", "says"),
    [
        (None, [], "is no folder"),
        (["neusight"], ["--fit"], "lacks aiconfigurator, llm-foundry, megatron, nnscaler"),
    ],
)
def test_tables_are_not_fitted_to_parts_of_the_measurements(
    scripts, monkeypatch, tmp_path, capsys, folders, options, says
):
    """A mistyped folder would leave the package's tables with published figures alone."""
    truth = importlib.import_module("truth")
    data = tmp_path / "data"
    for name in folders or ():
        (data / name).mkdir(parents=True)
    monkeypatch.setattr("sys.argv", ["truth.py", "--data", str(data), *options])
    for name in ("TABLE", "LINKS"):  # were it to go on, it would write these
        monkeypatch.setattr(truth, name, tmp_path / name)
    with pytest.raises(SystemExit) as ended:
        truth.main()
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_a_device_that_the_catalogue_lacks_is_named(scripts):
    assert scripts[1].find_device("AMD_Instinct_MI210") == "MI210"
    with pytest.raises(ValueError, match="'GeForce 256'; add it to the catalogue"):
        scripts[1].find_device("GeForce 256")
