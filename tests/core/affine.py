"""Profiles whose times and bytes are known lines in the number of samples."""

from stagewright.core.graph.graph import Boundary, Edge, Layer, Parameter
from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.profile.profile import (
    LayerProfile,
    LossProfile,
    Profile,
    Provenance,
    Reconciliation,
    SavedStorage,
    Timing,
)

LAYERS = 4
CPU = Provenance(device="cpu", device_name="Fast CPU", torch_version="2.13.0", num_threads=2)


def affine_profile(samples, *, layers=LAYERS, scale=1.0, spread=0.0, repeats=5, **provenance):
    """Layer ``i`` takes 1 + i + 0.5 n ms forward and twice that backward; see the rest below."""

    def timing(intercept_s, per_sample_s):
        time_s = scale * (intercept_s + per_sample_s * samples)
        return Timing(median_s=time_s, spread_s=spread * time_s, repeats=repeats)

    hidden = TensorSpec(name="hidden", shape=(samples, 16), dtype="float32", requires_grad=True)
    found = tuple(
        LayerProfile(
            layer=Layer(name=f"body.{index}", module_type="Linear", parameter_bytes=1000),
            forward=timing((1 + index) / 1e3, 0.5e-3),
            backward=timing((2 + 2 * index) / 1e3, 1e-3),
            backward_input=timing((1 + index) / 1e3, 0.5e-3),
            saved_activation_bytes=100 + 64 * samples,
            output_bytes=hidden.size_bytes,
            workspace_bytes=7 * samples,
        )
        for index in range(layers)
    )
    total_s = sum(entry.forward.median_s + entry.backward.median_s for entry in found)
    return Profile(
        model="Affine",
        inputs=(TensorSpec(name="x", shape=(samples, 16), dtype="float32"),),
        input_structure="x",
        layers=found,
        boundaries=tuple(Boundary(after=index, tensors=(hidden,)) for index in range(layers - 1)),
        edges=tuple(
            Edge(source=index, target=index + 1, tensor=hidden) for index in range(layers - 1)
        ),
        parameters=tuple(
            Parameter(names=(f"body.{index}.weight",), size_bytes=1000, numel=250, layers=(index,))
            for index in range(layers)
        ),
        storages=tuple(
            SavedStorage(size_bytes=50 + 32 * samples, layers=kept)
            for index in range(layers - 1)
            for kept in ((index,), (index, index + 1))
        ),
        loss=LossProfile(forward=timing(1e-4, 1e-4), backward=timing(2e-4, 1e-4)),
        reconciliation=Reconciliation(
            whole_forward=Timing(median_s=total_s / 3),
            whole_backward=Timing(median_s=2 * total_s / 3),
            relative_error=0.0,
        ),
        provenance=CPU.model_copy(update=provenance),
    )
