"""Published recipes of tensor, data and pipeline parallelism, priced and planned anew.

    python benchmarks/published_recipes.py --folder /tmp/recipes --write docs/evidence/recipes.md

Each recipe is priced by the planner's simulator on an estimated profile, and the planner looks for
a better plan of the same micro-batches on the same GPUs. Printed are published and predicted
throughput, the plan's, and the rank correlation of the first two, whatever it is. Exits with 1 if a
plan is slower than the recipe.

The tables are quoted from memory of their sources. Left open by them and assumed here: the
micro-batch size, equal numbers of blocks a stage, recomputation of every block, and 1F1B. Rows
whose width is beyond the family's limit are left out (530 and 1,008 billion parameters).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tables import markdown_table, write_between_marks

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import Infeasible
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.profile import Profile
from stagewright.planner.plan import plan
from stagewright.planner.price_split import plan_from_balance

DEADLINE_S = 30


@dataclass(frozen=True)
class Recipe:
    """A published recipe; ``published`` is in teraflop/s a GPU, or in tokens/s a GPU."""

    source: str
    name: str
    family: str
    config: str
    device: str
    sequence: int
    microbatch: int
    tensor: int
    stages: int
    gpus: int
    microbatches: int
    published: float
    flops_per_token: float = 0.0

    @property
    def replicas(self) -> int:
        return self.gpus // self.tensor // self.stages


def megatron(
    billions: float, heads: int, width: int, layers: int, tensor: int, stages: int, gpus: int,
    batch: int, published: float,
) -> Recipe:  # fmt: skip
    """Return a row of table 1 of Narayanan et al., SC'21: GPT, 2,048 tokens, A100s of 80 GB.

    Flops are those of its equation 3, with all activations recomputed.
    """
    sequence, vocabulary = 2048, 51200
    flops = 96 * layers * width**2
    flops *= 1 + sequence / (6 * width) + vocabulary / (16 * layers * width)
    config = {
        "vocab_size": vocabulary, "n_positions": sequence, "n_embd": width, "n_layer": layers,
        "n_head": heads, "dropout": 0.0,
    }  # fmt: skip
    microbatch = 2
    return Recipe(
        "Megatron-LM, SC'21, table 1", f"GPT {billions}B", "gpt2", json.dumps(config), "A100-80GB",
        sequence, microbatch, tensor, stages, gpus, batch // microbatch, published, flops,
    )  # fmt: skip


MEGATRON = (
    megatron(1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    megatron(3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    megatron(7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    megatron(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    megatron(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    megatron(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    megatron(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    megatron(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
)

TITAN = "torchtitan, llama3_h100_202412"

TORCHTITAN = (
    Recipe(TITAN, "Llama 3.1 8B", "llama-3.1-8b", "", "H100", 8192, 1, 1, 1, 8, 8, 5762),
    Recipe(TITAN, "Llama 3.1 70B", "llama-3.1-70b", "", "H100", 8192, 1, 8, 1, 256, 512, 829),
    Recipe(TITAN, "Llama 3.1 405B", "llama-3.1-405b", "", "H100", 8192, 1, 8, 8, 512, 256, 100),
)


def estimate(recipe: Recipe, folder: Path) -> Profile:
    """Return the estimated profile of a recipe, from the folder if it is there already."""
    file = folder / f"{recipe.name.replace(' ', '-')}.json"
    if not file.exists():
        words = [
            sys.executable, "-m", "stagewright.cli", "estimate", recipe.family, "--device",
            recipe.device, "--sequence", str(recipe.sequence), "--microbatch",
            str(recipe.microbatch), "-o", str(file),
        ]  # fmt: skip
        if recipe.config:
            words += ["--config", recipe.config]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return Profile.read(file)


def equal_blocks(profile: Profile, stages: int) -> list[int]:
    """Return layers of each stage: equally many blocks, the rest at the ends."""
    names = [entry.layer.name for entry in profile.layers]
    blocks = [
        index for index, name in enumerate(names) if any(p.isdigit() for p in name.split("."))
    ]
    per_stage = -(-len(blocks) // stages)
    begins = [0, *(blocks[at] for at in range(per_stage, len(blocks), per_stage))]
    return [end - begin for begin, end in zip(begins, [*begins[1:], len(names)], strict=True)]


def price(recipe: Recipe, profile: Profile, cluster: Cluster) -> Plan | None:
    """Return the recipe as a plan; `None` if it does not fit."""
    options = PlanOptions(
        num_microbatches=recipe.microbatches,
        max_replicas=None,
        recompute="layers",
        tensor=recipe.tensor,
        strategies=("replicate", "zero1"),
        precision="bf16_mixed",
    )
    balance = equal_blocks(profile, recipe.stages)
    try:
        return plan_from_balance(
            profile, cluster, options, balance, replicas=[recipe.replicas] * len(balance)
        )
    except Infeasible as error:
        print(f"{recipe.name}: {str(error)[:200]}", file=sys.stderr)
        return None


def replan(recipe: Recipe, profile: Profile, cluster: Cluster) -> tuple[Plan, float]:
    """Return the planner's own plan, the faster of two ways to recompute, and the seconds taken."""
    began, found = time.process_time(), []
    for recompute in ("auto", "layers"):
        options = PlanOptions(
            num_microbatches=recipe.microbatches,
            max_replicas=None,
            recompute=recompute,  # type: ignore[arg-type]
            tensor="auto",
            strategies=("replicate", "zero1"),
            precision="bf16_mixed",
        )
        try:
            found.append(plan(profile, cluster, options, deadline_s=DEADLINE_S))
        except Infeasible as error:
            print(f"{recipe.name}, {recompute}: {str(error)[:200]}", file=sys.stderr)
    best = min(found, key=lambda made: made.step_time_s)
    return best, time.process_time() - began


def throughput(recipe: Recipe, step_s: float) -> float:
    """Return teraflop/s a GPU where the source counts those, else tokens/s a GPU."""
    tokens = recipe.microbatch * recipe.microbatches * recipe.sequence / step_s / recipe.gpus
    return tokens * recipe.flops_per_token / 1e12 if recipe.flops_per_token else tokens


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's coefficient, equal values with their mean rank."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [
            sum(each < value for each in values) + (values.count(value) + 1) / 2  # type: ignore[attr-defined]
            for value in values
        ]

    first, second = ranks(list(one)), ranks(list(other))
    middle = (len(first) + 1) / 2
    both = sum((x - middle) * (y - middle) for x, y in zip(first, second, strict=True))
    spread = [sum((x - middle) ** 2 for x in each) for each in (first, second)]
    return both / (spread[0] * spread[1]) ** 0.5


def shape(found: Plan) -> str:
    """Describe a plan in a word: tensor x replicas x stages."""
    counts = sorted({stage.replicas for stage in found.stages})
    replicas = str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
    return f"{found.stages[0].tensor} x {replicas} x {found.num_stages}"


def report(recipes: Sequence[Recipe], folder: Path) -> tuple[str, int]:
    """Return a table of the recipes, and the number of plans slower than theirs."""
    rows, slower, pairs = [], 0, []
    for recipe in recipes:
        profile = estimate(recipe, folder)
        cluster = Cluster.parse(f"{-(-recipe.gpus // 8)}x8x{recipe.device}")
        theirs, (ours, took_s) = price(recipe, profile, cluster), replan(recipe, profile, cluster)
        predicted = throughput(recipe, theirs.step_time_s) if theirs else 0.0
        if theirs:
            pairs.append((recipe.published, predicted))
            slower += ours.step_time_s > theirs.step_time_s * (1 + 1e-9)
        rows.append(
            [
                recipe.name, f"{recipe.tensor} x {recipe.replicas} x {recipe.stages}",
                f"{recipe.published:g}", f"{predicted:.0f}" if theirs else "does not fit",
                shape(ours), f"{throughput(recipe, ours.step_time_s):.0f}", f"{took_s:.0f} s",
            ]
        )  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
    unit = "teraflop/s" if recipes[0].flops_per_token else "tokens/s"
    heads = [
        "model", "tensor x replicas x stages", f"published, {unit} a GPU", "predicted", "our plan",
        "its throughput", "planning",
    ]  # fmt: skip
    text = f"{recipes[0].source}:\n\n{markdown_table(heads, rows)}"
    if len(pairs) > 1:
        published, predicted_all = zip(*pairs, strict=True)
        found = rank_correlation(published, predicted_all)
        text += f"\n\nRank correlation of predicted with published throughput: {found:.2f}."
    return text, slower


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True, help="where estimates are kept")
    parser.add_argument("--write", type=Path, help="a document with marks for the tables")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    found = [report(recipes, arguments.folder) for recipes in (MEGATRON, TORCHTITAN)]
    slower = sum(count for _, count in found)
    text = "\n\n".join(table for table, _ in found)
    text += f"\n\nPlans slower than a recipe that fits: {slower}."
    if arguments.write:
        write_between_marks(arguments.write, "published_recipes.py", text)
    print(text)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
