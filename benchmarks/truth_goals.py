"""The goals of the page of truth, what of them is reached, and why some cannot be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median
from typing import TYPE_CHECKING

from tables import markdown_table

from stagewright.profiler.estimates.device_table import GpuTable
from stagewright.profiler.estimates.error_band import BY_RULE

if TYPE_CHECKING:
    from truth_page import Verdict

REASONS = """**Floors.** Rows of one device contradict each other: its clock falls under load, and
libraries choose kernels by rules of their own. So each large product was also predicted by a plane
through its nearest neighbours among the *same device's* other rows, the best number of them chosen
with all rows in sight. What even that leaves is the floor above; no rule for unseen devices comes
below it but by chance.

**Products.** Cards of one kind differ. In the middle of the large float32 products NeuSight's L4
sustained 8.7 TFLOP/s, and squares of 4,096 to 10,240 rows on L4s of others 10.7 to 12.5; its P100
6.8, and those of others 7.6 to 8.2 at 4,096. Small cards lose their clock by heat and power, and
how much no data sheet says.

**All-reduces.** Hosts differ more than kinds of link. The cards of the L40S's host reach 20 GB/s
with 2, 5 with 4 and 1.5 with 8; four A100s on two sockets 5; RTX 4090s with a patched driver, which
lets them talk to each other, 25 with 4 and 20 with 8. The table has the middle of these hosts for
all devices on this PCIe, with a band of its own; the figures of PCIe 5.0 with peer-to-peer are from
RTX 5090s with a patched driver. We found no all-reduces of MI250s by others; their smallest take
100 to 160 \u00b5s where RCCL's constants say 14 to 36, since the host started them one by one. Even
with every bandwidth known, delays of others leave the floor above.

**Messages.** Plans price a message between two devices by the all-reduces of two, those of large
messages, and at most at the data sheet's rate. From 1 MB on, those of L40Ss are right within 2 %
and A100s' up to 35 % too fast; below 64 KB both take half as long as predicted. Between MI250s the
host started them one by one, which no link explains. In a node of eight cards on PCIe, plans count
on what each has when all of them send; no messages of eight at once were measured.

**Published throughputs.** At 512 tokens BERT-large is said to train 210 sequences a second, 2.8
times fewer than at 128. The same authors' table of 20.06 has 78 on an A100, 5.3 times fewer than at
128, as the work would have it, and 4.8 times on a V100. Those eight rows are among the looked-up
ones, and all are predicted within 20 %. The odd one cannot be of the same work. ResNet-50's and
GPT-2's rows were looked up as well (nanoGPT's README at 0110f3c8); BERT's others and Llama-3's are
as the project was given them.

**Training.** Steps of llm-foundry's ran under FSDP, and its traffic is added as if nothing hid it:
inside a node by the table of links, between nodes at four fifths of the rate stated. Where they
recompute, the last product of a block is left out, which no backward needs: the table's own steps
take 1.07 to 1.2 times as long with recomputation, a whole forward more would be 1.33. The worst
rows contradict their neighbours. mpt-70b took 3.6 ms a token with micro-batches of 2 on 64 GPUs of
40 GB, 2.7 ms with as many on 32 of 80 GB. mpt-1b took 22 % longer on 32 GPUs than on 16 and on 64.
mpt-30b took 2.8 times as long for 8,192 tokens as for 4,096. mpt-760m took longer for 96 sequences
of 512 tokens than for 24 of 2,048, which is as many tokens and more attention.

**Megatron-LM.** The extract has 4 runs of real models with pipelines, where ten were asked for; 3
of them (mixtral) do not say how many devices they ran on. On the 64 that the smaller two are
usually given, one would have sustained more than an A100's peak. They are not predicted.
"""

Pick = Callable[[Sequence[float]], float]


def _worst(sizes: Sequence[float]) -> float:
    return max(sizes)


GOALS: tuple[tuple[str, tuple[str, ...], str, Pick, float, str], ...] = (
    ("training, median", ("training, bf16", "training, fp32"), "left_out", median, 0.06, ""),
    ("training, worst", ("training, bf16", "training, fp32"), "left_out", _worst, 0.20, ""),
    ("forward alone, median", ("forward, fp32",), "left_out", median, 0.08, ""),
    (
        "float32 products from 4,096 rows, mean",
        ("products, fp32, from 4,096 rows",), "left_out", mean, 0.08, "products, fp32",
    ),
    (
        "bfloat16 products from 4,096 rows, mean",
        ("products, bf16, from 4,096 rows",), "left_out", mean, 0.08, "products, bf16",
    ),
    ("all-reduce, mean", ("all-reduce",), "left_out", mean, 0.15, "all-reduce"),
    ("published throughputs, median", ("published throughputs",), "left_out", median, 0.12, ""),
    ("Megatron-LM, median", ("Megatron-LM 7B, bf16",), "left_out", median, 0.12, ""),
)  # fmt: skip
"""Name, sets, the errors that are judged, figure, bound and set of the floor."""


def list_goals(
    groups: Mapping[str, Sequence[Verdict]], table: GpuTable, floors: Mapping[str, float]
) -> str:
    """Return the table of goals: what was asked for, what is reached, and what any rule leaves."""
    rows = []
    for name, sets, judged, pick, bound, floor in GOALS:
        found = [one for group in sets for one in groups[group]]
        if not found:
            continue
        reached, chip_out, inside = (
            pick([abs(getattr(one, kind)) for one in found])
            for kind in (judged, "chip_out", "in_sample")
        )
        left = f"{floors[floor]:.1%}" if floor else ""
        verdict = "yes" if reached <= bound else "no"
        figures = (f"{value:.1%}" for value in (reached, chip_out, inside))
        rows.append((name, f"{bound:.0%}", *figures, left, verdict))
    published = groups["published throughputs"]
    outside, left_out, chip_out = (
        sum(abs(getattr(one, kind)) > one.band for one in published)
        for kind in ("in_sample", "left_out", "chip_out")
    )
    rows.append(
        (
            "published throughputs outside their band",
            "0",
            left_out,
            chip_out,
            outside,
            "",
            _no(left_out),
        )
    )
    for suffix in ("", BY_RULE):
        band = table.bands["16-bit transformer" + suffix]
        name = f"band of 16-bit transformers{suffix}"
        rows.append((name, "15%", f"{band:.0%}", "", "", "", _no(band > 0.15)))
    head = (
        "what", "asked for", "reached, device left out", "chip left out", "in sample", "floor",
        "kept",
    )  # fmt: skip
    return markdown_table(head, rows) + "\n"


def _no(is_missed: float) -> str:
    return "no" if is_missed else "yes"
