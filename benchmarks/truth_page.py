"""`docs/evidence/truth.md`: every public measurement against its prediction, worst first."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from tables import markdown_table
from truth_fit import HIGHEST
from truth_goals import REASONS, list_goals
from truth_singles import PUBLISHED

from stagewright.core.cluster.collectives import LinkFigures
from stagewright.profiler.estimates.basis import WORDS
from stagewright.profiler.estimates.device_table import DeviceFigures, GpuTable, ProductRule
from stagewright.profiler.estimates.flops import OPERATION_CLASSES

INTRODUCTION = """# Predictions against other people's measurements

Written by `python benchmarks/truth.py --data FOLDER --fit --leave-one-out --write`; FOLDER holds
extracts of public measurements. No GPU was at hand: nothing here was measured by this project.

**In sample** means that the tables were fitted to rows of the device. **Device left out** means
that they were fitted again without any row of these measurements of it. What others published of it
one by one stayed: single products and all-reduces, from benchmarks of cards and from logs, which
were searched for after these measurements (`benchmarks/published/`; some logs could not be traced
to their repository). **Chip left out** means that nothing of it was used, nor of any device with as
many multiprocessors of the same process (four A100s are one chip): what is said of it followed from
the rules alone. What the form of the model and its starting values are was decided with all rows in
sight, so that both flatter it a little. None uses the sets labelled "not fitted": "published
throughputs" are those that the project was asked to hold itself against, "looked-up" ones were
read in DeepLearningExamples' tables since, and "messages of two devices" are all-to-alls, in which
each of two devices sends the other half of its bytes. Errors are (predicted - measured) / measured.

Sources: NeuSight (MIT; float32, eager attention), aiconfigurator (Apache-2.0; bfloat16 kernels and
NCCL, under CUDA graphs), llm-foundry (Apache-2.0; MPT under FSDP on A100s), nnScaler (MIT;
collectives of MI200s), Megatron-LM (BSD-3-Clause; runs of its continuous integration), and tables
of NVIDIA's DeepLearningExamples. Left out: NeuSight's switch transformers (their experts take as
many tokens as a router gives them, which an estimate without values cannot know) and attention
with sliding windows.

Among the published figures are products of {devices} devices and all-reduces of {hosts} hosts.
Tables for devices and links that the measurements lack rest on them.
"""

BANDS = """## Bands of kernels

Nine of ten kernels of a class keep to its band with their chip left out. A class that was not
measured is a guess, as wide as the widest. Normalisations and sums were measured in float32. Whole
models keep to narrower bands, as errors of kernels cancel in part. So a layer's band is that of its
classes by their shares of its time, narrowed by one factor for all layers, with which their mean is
the model's: what may change a plan is by how much more one class can be off than another.

"""

LINKS = """## Links

What devices of the catalogue sum over and send by inside a node: bus bandwidths of large messages,
and times of small ones. The band holds nine of ten all-reduces, as the errors above are counted;
another host of the kind may differ by as much.

"""

SHARES = """## Shares of the data sheet's rates

A "published" share rests on single products that others published. Those of 16 bits are capped at
0.90, as training that we found published never reached three quarters of a sheet's rate; GeForce
cards run single products above their sheet's clock.

"""

WORST_KERNELS = 15
"""Kernels shown of one set; `--rows FILE` writes all of them as CSV."""


@dataclass(frozen=True)
class Verdict:
    """One row's prediction with tables fitted to all devices, and to all but its own chip.

    ``band`` is the error that an estimate of it prints, ``share_of_peak`` the data sheet's rate at
    which it was measured.
    """

    group: str
    device: str
    name: str
    measured_s: float
    in_sample: float
    left_out: float
    chip_out: float
    is_large: bool = False
    band: float = math.nan
    share_of_peak: float = math.nan

    @property
    def is_kernel(self) -> bool:
        models = ("forward,", "training", "published throughputs", "looked-up", "Megatron")
        return not self.group.startswith(models)

    @property
    def judged(self) -> float:
        """The error with the chip left out, or in sample for rows that are only fitted to."""
        return self.in_sample if math.isnan(self.chip_out) else self.chip_out


def write_page(
    verdicts: Sequence[Verdict],
    table: GpuTable,
    not_fitted: Sequence[str],
    links: Mapping[str, LinkFigures],
    floors: dict[str, float],
    hosts: int,
) -> str:
    """Return the page.

    ``floors`` has what even the device's own rows leave, by set; ``hosts`` is the number of those
    whose all-reduces were published.
    """
    devices = len({one.device for one in verdicts if one.group in PUBLISHED})
    groups = defaultdict(list)
    for verdict in verdicts:
        groups[verdict.group].append(verdict)
        if verdict.is_large:
            groups[verdict.group + ", from 4,096 rows"].append(verdict)
    parts = [
        INTRODUCTION.format(devices=devices, hosts=hosts),
        "## Goals\n",
        list_goals(groups, table, floors),
        REASONS,
        "## Summary\n",
        _summary(groups, not_fitted),
        _kernel_bands(table),
        _figures(table),
        _links(links),
    ]
    for group, found in sorted(groups.items()):
        if "4,096" in group:
            continue
        label = " (not fitted)" if group in not_fitted else ""
        worst = sorted(found, key=lambda one: -abs(one.judged))
        shown = worst[:WORST_KERNELS] if worst[0].is_kernel else worst
        left = f" The worst {len(shown)} of {len(found)} rows." if len(shown) < len(found) else ""
        parts += [f"## {group.capitalize()}{label}\n", f"{left.strip()}\n" if left else ""]
        parts.append(_rows(shown, with_bands=group.endswith("throughputs")))
    return "\n".join(part for part in parts if part)


def _summary(groups: dict[str, list[Verdict]], not_fitted: Sequence[str]) -> str:
    head = (
        "set",
        "rows",
        "in sample: median",
        "mean",
        "worst",
        "device left out: median",
        "mean",
        "worst",
        "chip left out: median",
        "mean",
        "worst",
    )
    rows = []
    for group, found in sorted(groups.items()):
        cells: list[str] = []
        for name in ("in_sample", "left_out", "chip_out"):
            errors = [getattr(one, name) for one in found]
            if math.isnan(errors[0]):
                cells += ["", "", ""]
                continue
            sizes = [abs(error) for error in errors]
            worst = max(errors, key=abs)
            cells += [f"{median(sizes):.1%}", f"{mean(sizes):.1%}", f"{worst:+.0%}"]
        label = f"{group} (not fitted)" if group in not_fitted else group
        rows.append((label, f"{len(found):,}", *cells))
    return markdown_table(head, rows) + "\n"


def _kernel_bands(table: GpuTable) -> str:
    rows = []
    for kind in OPERATION_CLASSES:
        cells = (table.kernel_bands[name].get(kind) for name in ("simt", "tensor"))
        rows.append((WORDS[kind], *("guess" if band is None else f"{band:.0%}" for band in cells)))
    return BANDS + markdown_table(("class", "float32", "16 bits and tf32"), rows) + "\n"


def _figures(table: GpuTable) -> str:
    head = ("device", "16-bit products", "float32 products", "memory", "source")
    rows = [
        (
            name,
            *(_share(entry, kind) for kind in ("tensor", "simt", "memory")),
            entry.source,
        )
        for name, entry in sorted(table.devices.items())
    ]
    rules = [
        (
            "rule for others",
            *(
                f"min({rule.ceiling:.2f}{_width(rule)}, "
                f"{rule.flops_per_joule / 1e9:.0f} GFLOP/J at 7 nm)"
                for rule in (table.products["tensor"], table.products["simt"])
            ),
            f"{table.memory.copy_share:.2f}",
            "fitted to the devices above",
        )
    ]
    return SHARES + markdown_table(head, [*rows, *rules], 5) + "\n"


def _links(links: Mapping[str, LinkFigures]) -> str:
    head = (
        "link",
        "GB/s among (devices)",
        "2 sum few bytes",
        "latency of a message",
        "band",
        "source",
    )
    rows = []
    for name, entry in sorted(links.items()):
        latency_s, _ = entry.price_messages(math.inf)
        rates = ", ".join(f"{rate / 1e9:.0f} ({count})" for count, rate in entry.bandwidth)
        small_s = entry.all_reduce_time_s(1, 2)
        times = (f"{1e6 * time_s:.0f} µs" for time_s in (small_s, latency_s))
        source = f"{entry.basis}: {entry.source}"
        rows.append((name, rates, *times, f"{entry.error_band:.0%}", source))
    return LINKS + markdown_table(head, rows, 6) + "\n"


def _width(rule: ProductRule) -> str:
    if rule.width_exponent is None:
        return ""
    return f" x (0.2 TFLOP/s / rate of a multiprocessor) ^ {rule.width_exponent:.2f}"


def _share(entry: DeviceFigures, kind: str) -> str:
    share = getattr(entry, kind)
    if share is None:
        return ""
    if share >= HIGHEST.get(kind, 1.0):
        return f"{share:.2f} (capped)"
    return f"{share:.2f}" + (" (published)" if kind in entry.published else "")


def _rows(verdicts: Sequence[Verdict], *, with_bands: bool) -> str:
    head = ["device", "what", "measured", "in sample", "device left out", "chip left out"]
    head += ["printed band", "share of peak measured"] if with_bands else []
    rows = []
    for one in verdicts:
        cells = [one.device, one.name, f"{one.measured_s * 1e3:,.3g} ms"]
        errors = (one.in_sample, one.left_out, one.chip_out)
        cells += ["" if math.isnan(error) else f"{error:+.1%}" for error in errors]
        if with_bands:
            cells += [f"{one.band:.0%}", f"{one.share_of_peak:.0%}"]
        rows.append(cells)
    return markdown_table(head, rows, 2) + "\n"
