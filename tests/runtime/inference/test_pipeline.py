"""Forwards in one process: the model's own outputs, in order, with many requests under way."""

import copy
import threading
import time
from concurrent.futures import CancelledError, wait

import pytest
import torch
from torch import nn

from stagewright import InferencePipeline, for_inference, profile
from stagewright.capture.equivalence.check import relative_difference
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import InvalidInput, PlanMismatch
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.plan import plan
from stagewright.planner.price_split import plan_from_balance
from tests.runtime import odd_models
from tests.runtime.test_odd_models import plan_with_every_cut
from tests.torch_models import Case, call, make_batch, make_case, make_plan, traced_profile

WIDTH = 6
DEADLINE_S = 20


def chain(layers=4):
    """Layers that can be cut everywhere and take batches of any size."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


@pytest.fixture
def model():
    return chain()


@pytest.fixture
def four_stages(model):
    return plan_with_every_cut(model, torch.randn(4, WIDTH))


def before_stage(pipeline, stage, hook):
    """Have a stage, all its replicas, do something before each forward."""

    def run(module, inputs):
        hook(*inputs)

    for replica in pipeline.stages[stage]:
        replica.register_forward_pre_hook(run)


def tensors(output):
    leaves = torch.utils._pytree.tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def expected_of(whole, batches, size):
    """Outputs of the unsplit model on the same micro-batches, put together."""
    found = []
    for batch in batches:
        with torch.no_grad():
            parts = [tensors(whole(part.clone())) for part in batch.split(size)]
        found.append(
            [torch.cat(column) if column[0].dim() else torch.stack(column).mean()
             for column in zip(*parts, strict=True)]
        )  # fmt: skip
    return found


ODD = [
    odd_models.AverageReplaced, odd_models.TiedThrice, odd_models.TwoNames, odd_models.CalledAgain,
    odd_models.SeveralOutputs, odd_models.SkipInPlace, odd_models.Recurrent, odd_models.DropPath,
    odd_models.Counting, odd_models.shared_relu, odd_models.in_place_children,
]  # fmt: skip


@pytest.mark.parametrize("build", ODD, ids=lambda build: build.__name__)
def test_odd_models_compute_the_same(build):
    """Outputs, one batch after the other, of models that keep averages in evaluation too."""
    torch.manual_seed(0)
    model = build()
    plan = plan_with_every_cut(model, torch.randn(4, 4))
    whole = copy.deepcopy(model).eval()
    batches = [torch.randn(count, 4) for count in (4, 8, 4, 12)]
    with InferencePipeline(model, plan) as pipeline:
        found = list(pipeline.map(batch.clone() for batch in batches))
    for output, expected in zip(found, expected_of(whole, batches, 4), strict=True):
        for ours, theirs in zip(tensors(output), expected, strict=True):
            assert relative_difference(ours, theirs) <= 1e-6
    for (name, ours), theirs in zip(model.named_buffers(), whole.buffers(), strict=True):
        assert relative_difference(ours, theirs) <= 1e-6, name


class Crossing(nn.Module):
    """A late input, whole numbers over a cut, a long skip, and two outputs of different stages."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(5)])
        self.experts = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x, scale):
        first = self.layers[0](x)
        expert = first.argmax(-1)
        y = self.layers[2](self.layers[1](first))
        late = self.layers[4](self.layers[3](y) * scale + self.experts(expert))
        return {"late": late + first, "early": y}


def test_what_crosses_several_stages_arrives():
    torch.manual_seed(0)
    model = Crossing().double()
    sample = tuple(torch.randn(4, WIDTH, dtype=torch.float64) for _ in range(2))
    plan = plan_with_every_cut(model, sample)
    assert plan.num_stages >= 5
    batches = [tuple(torch.randn_like(each) for each in sample) for _ in range(6)]
    with InferencePipeline(model, plan) as pipeline:
        found = list(pipeline.map(batches))
        (x, scale) = batches[0]
        by_name = pipeline.submit(scale=scale, x=x).result(DEADLINE_S)
    for batch, output in zip(batches, found, strict=True):
        expected = model(*batch)
        for name in ("late", "early"):
            assert relative_difference(output[name], expected[name]) <= 1e-12
    assert torch.equal(by_name["late"], found[0]["late"])


def test_a_unet_computes_the_same():
    case = make_case("unet")
    plan = make_plan(case, 3)
    batches = [make_batch(case, plan, seed=seed)[0] for seed in range(3)]
    with InferencePipeline(case.model, plan) as pipeline:
        found = list(pipeline.map(batches))
    with torch.no_grad():
        for batch, output in zip(batches, found, strict=True):
            torch.testing.assert_close(output, call(case.model, batch))


def test_a_mode_that_cannot_be_left_is_refused():
    model = odd_models.Auxiliary()
    plan = plan_with_every_cut(model, torch.randn(4, 4))
    with pytest.raises(PlanMismatch, match="cannot switch to evaluation"):
        InferencePipeline(model, plan)


def test_inputs_are_left_alone(model):
    """A first stage that works in place would change what the caller still has."""
    model = odd_models.InPlaceInput()
    batch = torch.randn(4, 4)
    before = batch.clone()
    with InferencePipeline(model, plan_with_every_cut(model, batch)) as pipeline:
        pipeline.submit(batch).result(DEADLINE_S)
    assert torch.equal(batch, before)


def test_outputs_are_of_inference_mode_and_weights_are_the_models(model, four_stages):
    batch = torch.randn(4, WIDTH)
    with InferencePipeline(model, four_stages) as pipeline:
        output = pipeline.submit(batch).result(DEADLINE_S)
        assert output.is_inference()
        with torch.no_grad():
            model[0].weight.zero_()
        changed = pipeline.submit(batch).result(DEADLINE_S)
    assert not model.training
    assert not torch.equal(output, changed)
    torch.testing.assert_close(changed, model(batch))


def test_batches_of_any_size_where_the_model_takes_them(model, four_stages):
    batches = [torch.randn(count, WIDTH) for count in (1, 3, 4, 9, 40)]
    with InferencePipeline(model, four_stages) as pipeline:
        found = list(pipeline.map(batches))
    for batch, output in zip(batches, found, strict=True):
        torch.testing.assert_close(output, model(batch))


def test_a_model_captured_at_one_shape_says_which_and_pads_if_asked():
    torch.manual_seed(0)
    model = odd_models.TwoNames()
    plan = plan_with_every_cut(model, torch.randn(4, 4))
    batches = [torch.randn(count, 4) for count in (1, 3, 4, 6)]
    with InferencePipeline(model, plan) as pipeline:
        for wrong in (torch.randn(3, 4), torch.randn(0, 4)):
            with pytest.raises(InvalidInput, match=r"use \(4, 4\) or a multiple.*pad=True"):
                pipeline.submit(wrong)
        for wrong in (torch.randn(4, 5), torch.randn(4)):
            with pytest.raises(InvalidInput, match=r"was captured at \(4, 4\), and only its first"):
                pipeline.submit(wrong)
    with InferencePipeline(model, plan, pad=True) as pipeline:
        found = list(pipeline.map(batches))
        with pytest.raises(InvalidInput, match=r"captured at \(4, 4\)"):
            pipeline.submit(torch.randn(3, 5))
    for batch, output in zip(batches, found, strict=True):
        assert len(output) == len(batch)
        torch.testing.assert_close(output, model(batch))


def test_stages_work_at_the_same_time(model, four_stages):
    """Stage s waits at piece 3 - s until all four stages are there."""
    together = threading.Barrier(4, timeout=DEADLINE_S)
    pieces = [0] * 4

    def meet(stage):
        pieces[stage] += 1
        if pieces[stage] == 4 - stage:
            together.wait()

    with InferencePipeline(model, four_stages) as pipeline:
        for stage in range(4):
            before_stage(pipeline, stage, lambda _, stage=stage: meet(stage))
        for future in [pipeline.submit(torch.randn(4, WIDTH)) for _ in range(4)]:
            future.result(DEADLINE_S)
    assert pieces == [4] * 4


def test_no_more_is_taken_than_there_is_room_for(model, four_stages):
    taken = []

    def stream():
        for index in range(50):
            taken.append(index)
            yield torch.randn(4, WIDTH)

    gate = threading.Event()
    with InferencePipeline(model, four_stages, max_in_flight=3) as pipeline:
        before_stage(pipeline, 0, lambda _: gate.wait(DEADLINE_S))
        results = pipeline.map(stream())
        first = threading.Thread(target=lambda: next(results))
        first.start()
        time.sleep(0.2)
        assert len(taken) == 3
        gate.set()
        first.join(DEADLINE_S)
        assert len(taken) <= 4
        results.close()
        submitted = threading.Event()
        gate.clear()
        threading.Thread(
            target=lambda: ([pipeline.submit(torch.randn(4, WIDTH)) for _ in range(4)],
                            submitted.set()),
        ).start()  # fmt: skip
        assert not submitted.wait(0.2)
        gate.set()
        assert submitted.wait(DEADLINE_S)


def test_results_come_in_the_order_of_submission(model, four_stages):
    ended = []
    with InferencePipeline(model, four_stages, devices=["cpu"], max_in_flight=20) as pipeline:
        before_stage(pipeline, 1, lambda x: time.sleep(0.01 if x.shape[0] == 1 else 0))
        futures = []
        for index in range(12):
            futures.append(pipeline.submit(torch.randn(1 + index % 4, WIDTH)))
            futures[-1].add_done_callback(lambda _, index=index: ended.append(index))
        wait(futures, DEADLINE_S)
    assert ended == list(range(12))


def test_an_error_is_the_requests_own(model, four_stages):
    batch = torch.randn(4, WIDTH)

    def refuse(x):
        if x.shape[0] == 2:
            raise ArithmeticError("two samples")

    with InferencePipeline(model, four_stages) as pipeline:
        before_stage(pipeline, 2, refuse)
        futures = [pipeline.submit(batch[:count]) for count in (4, 2, 3, 2, 1)]
        for index in (0, 2, 4):
            torch.testing.assert_close(
                futures[index].result(DEADLINE_S), model(batch[: (4, 2, 3, 2, 1)[index]])
            )
        for index in (1, 3):
            error = futures[index].exception(DEADLINE_S)
            assert isinstance(error, ArithmeticError)
            assert "in stage 2" in error.__notes__
        results = pipeline.map([batch, batch[:2], batch])
        next(results)
        with pytest.raises(ArithmeticError):
            next(results)
        wide = torch.randn(4, WIDTH + 1)  # any size is tried where any may be right
        assert pipeline.submit(wide).exception(DEADLINE_S) is not None
        torch.testing.assert_close(pipeline.submit(batch).result(DEADLINE_S), model(batch))


def test_a_cancelled_request_is_left_out(model, four_stages):
    gate, seen = threading.Event(), []
    with InferencePipeline(model, four_stages, max_in_flight=10) as pipeline:
        before_stage(pipeline, 0, lambda _: gate.wait(DEADLINE_S))
        before_stage(pipeline, 1, lambda x: seen.append(x.shape[0]))
        futures = [pipeline.submit(torch.randn(count, WIDTH)) for count in (4, 1, 2)]
        assert futures[1].cancel()
        gate.set()
        wait(futures, DEADLINE_S)
        with pytest.raises(CancelledError):
            futures[1].result()
        assert not futures[2].cancel()
    assert seen == [4, 2]


def test_closing_waits_for_what_is_under_way_and_ends_the_threads(model, four_stages):
    threads = threading.active_count()
    pipeline = InferencePipeline(model, four_stages)
    assert threading.active_count() > threads
    before_stage(pipeline, 3, lambda _: time.sleep(0.02))
    futures = [pipeline.submit(torch.randn(4, WIDTH)) for _ in range(6)]
    pipeline.close()
    assert all(future.done() and future.exception() is None for future in futures)
    assert threading.active_count() == threads
    pipeline.close()
    with pytest.raises(InvalidInput, match="closed"):
        pipeline.submit(torch.randn(4, WIDTH))


def test_an_error_in_the_block_cancels_what_is_under_way(model, four_stages):
    futures = []

    def interrupted():
        with InferencePipeline(model, four_stages) as pipeline:
            before_stage(pipeline, 0, lambda _: time.sleep(0.05))
            futures.extend(pipeline.submit(torch.randn(4, WIDTH)) for _ in range(8))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert futures[-1].cancelled()


def test_a_callback_that_submits_is_told_it_would_wait_for_itself(model, four_stages):
    errors = []

    def again(_):
        try:
            pipeline.submit(torch.randn(4, WIDTH))
        except InvalidInput as error:
            errors.append(str(error))

    gate = threading.Event()
    with InferencePipeline(model, four_stages) as pipeline:
        before_stage(pipeline, 0, lambda _: gate.wait(DEADLINE_S))
        pipeline.submit(torch.randn(4, WIDTH)).add_done_callback(again)
        gate.set()
    assert len(errors) == 1
    assert "from another thread" in errors[0]


def test_many_threads_may_submit(model, four_stages):
    batches = [torch.randn(4, WIDTH) for _ in range(40)]
    found = {}
    with InferencePipeline(model, four_stages, max_in_flight=3) as pipeline:

        def client(start):
            for index in range(start, 40, 4):
                found[index] = pipeline.submit(batches[index]).result(DEADLINE_S)

        clients = [threading.Thread(target=client, args=(start,)) for start in range(4)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(DEADLINE_S)
    for index, batch in enumerate(batches):
        torch.testing.assert_close(found[index], model(batch))


def replicated(model, replicas):
    """A plan of equal layers with so many replicas of each stage."""
    case = Case("chain", None, model, torch.randn(4, WIDTH), None)
    balance = [len(model) // len(replicas)] * len(replicas)
    options = PlanOptions(num_microbatches=4)
    return plan_from_balance(
        traced_profile(case), Cluster.uniform(sum(replicas)), options, balance, replicas=replicas
    )


@pytest.mark.parametrize("replicas", [(1, 3), (2, 1), (3, 2)])
def test_replicas_take_turns(model, replicas):
    plan = replicated(model, replicas)
    batches = [torch.randn(1 + index % 4, WIDTH) for index in range(13)]
    counts = {}
    with InferencePipeline(model, plan, devices=["cpu"] * sum(replicas)) as pipeline:
        for stage, copies in enumerate(pipeline.stages):
            assert len(copies) == replicas[stage]
            for number, replica in enumerate(copies):
                replica.register_forward_pre_hook(
                    lambda module, inputs, key=(stage, number): counts.update(
                        {key: counts.get(key, 0) + 1}
                    )
                )
        first = pipeline.stages[0][0]
        first.register_forward_pre_hook(lambda module, inputs: time.sleep(0.003))
        found = list(pipeline.map(batches))
    for batch, output in zip(batches, found, strict=True):
        torch.testing.assert_close(output, model(batch))
    for stage, count in enumerate(replicas):
        taken = [counts[stage, number] for number in range(count)]
        assert taken == [len(range(number, 13, count)) for number in range(count)]
    with InferencePipeline(model, plan) as pipeline:  # on one device they have nothing to gain
        assert [len(each) for each in pipeline.stages] == [1, 1]
        torch.testing.assert_close(pipeline.submit(batches[0]).result(), model(batches[0]))
    with pytest.raises(InvalidInput, match=f"or {sum(replicas)}, one per replica"):
        InferencePipeline(model, plan, devices=["cpu", "cpu", "cpu", "cpu", "cpu", "cpu"])


def test_autocast_is_the_models(model, four_stages):
    batch = torch.randn(4, WIDTH)
    with InferencePipeline(model, four_stages, autocast=torch.bfloat16) as pipeline:
        output = pipeline.submit(batch).result(DEADLINE_S)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(output, model(batch))
    assert output.dtype == torch.bfloat16


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0])
def test_room_is_a_number(model, four_stages, wrong):
    with pytest.raises(InvalidInput, match="max_in_flight is"):
        InferencePipeline(model, four_stages, max_in_flight=wrong)


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_plans_for_forwards_run(model, objective):
    found = plan(
        for_inference(profile(model, torch.randn(4, WIDTH))),
        "2xcpu",
        PlanOptions(objective=objective, schedule="gpipe", num_stages=2),
    )
    assert found.num_stages == 2
    with InferencePipeline(model, found) as pipeline:
        batches = [torch.randn(4, WIDTH) for _ in range(5)]
        for batch, output in zip(batches, pipeline.map(batches), strict=True):
            torch.testing.assert_close(output, model(batch))


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [["cuda:0"] * 2, ["cpu", "cuda:0"], ["cuda:0", "cpu"]])
def test_on_a_gpu_the_outputs_are_the_models(devices):
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
    plan = plan_with_every_cut(model, torch.randn(64, 1024))
    devices = [devices[0]] * 4 + [devices[1]] * 4
    whole = copy.deepcopy(model).to("cuda:0")
    batches = [torch.randn(64, 1024, device="cuda:0") for _ in range(40)]
    with InferencePipeline(model, plan, devices=devices) as pipeline:
        for batch, output in zip(batches, pipeline.map(batches), strict=True):
            torch.testing.assert_close(output.to("cuda:0"), whole(batch), rtol=1e-3, atol=1e-4)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.t = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 2.0

    def forward(self, x):
        return self.second(self.first(x) * self.t)


def test_a_model_changed_after_construction_is_refused():
    """Requests were answered with the numbers that had been traced."""
    model, x = Scaled(), torch.randn(4, WIDTH)
    with InferencePipeline(model, plan_with_every_cut(model, x)) as pipeline:
        pipeline.submit(x).result()
        model.t = 0.5
        with pytest.raises(PlanMismatch, match=r"'t' was 2\.0, now it is 0\.5"):
            pipeline.submit(x)
        with pytest.raises(PlanMismatch, match="changed after this pipeline was built"):
            next(pipeline.map([x]))
        model.t = 2.0
        model.second = nn.Linear(WIDTH, WIDTH)
        with pytest.raises(PlanMismatch, match="'second'"):
            pipeline.submit(x)
