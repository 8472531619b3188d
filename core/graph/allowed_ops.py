"""The operators and modules that a rebuildable graph may contain, listed without torch.

An operator is listed if it computes its results from its arguments alone: it reads and writes no
file, looks nothing up by name, takes no Python object, and the shapes of its results follow from
those of its arguments. `capture` writes nothing else into a rebuildable graph, reading a graph
rejects anything else, and `profiler.graphs.graph_module` looks each name up in ``torch.ops``.
"""

# This list is a security boundary: the service runs graphs of untrusted senders. Do not add an
# operator that opens files, resolves names, or allocates more than its arguments' shapes imply.

from __future__ import annotations

_POINTWISE = """
    abs.default acos.default add.Scalar add.Tensor add_.Scalar add_.Tensor addcdiv.default
    addcmul.default asin.default atan.default atan2.default bitwise_and.Scalar bitwise_and.Tensor
    bitwise_not.default bitwise_or.Scalar bitwise_or.Tensor ceil.default celu.default clamp.Tensor
    clamp.default clamp_.default clamp_max.default clamp_min.default clamp_min_.default
    cos.default cosh.default div.Scalar div.Scalar_mode div.Tensor div.Tensor_mode div_.Scalar
    div_.Tensor elu.default elu_.default eq.Scalar eq.Tensor erf.default exp.default exp2.default
    expm1.default fill.Scalar fill_.Scalar fill_.Tensor floor.default floor_divide.Scalar
    floor_divide.default fmod.Scalar fmod.Tensor frac.default ge.Scalar ge.Tensor gelu.default
    glu.default gt.Scalar gt.Tensor hardsigmoid.default hardswish.default hardswish_.default
    hardtanh.default hardtanh_.default isfinite.default isinf.default isnan.default le.Scalar
    le.Tensor leaky_relu.default leaky_relu_.default lerp.Scalar lerp.Tensor log.default
    log10.default log1p.default log2.default log_sigmoid.default logical_and.default
    logical_not.default logical_or.default logical_xor.default lt.Scalar lt.Tensor
    masked_fill.Scalar masked_fill.Tensor masked_fill_.Scalar masked_fill_.Tensor maximum.default
    minimum.default mish.default mul.Scalar mul.Tensor mul_.Scalar mul_.Tensor nan_to_num.default
    ne.Scalar ne.Tensor neg.default neg_.default pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor
    prelu.default reciprocal.default relu.default relu6.default relu_.default remainder.Scalar
    remainder.Tensor round.default rsqrt.default rsub.Scalar rsub.Tensor selu.default
    sigmoid.default sigmoid_.default sign.default silu.default silu_.default sin.default
    sinh.default softplus.default softshrink.default sqrt.default square.default sub.Scalar
    sub.Tensor sub_.Scalar sub_.Tensor tan.default tanh.default tanh_.default threshold.default
    true_divide.Tensor trunc.default where.Scalar where.ScalarOther where.ScalarSelf where.self
    __and__.Scalar __and__.Tensor __or__.Scalar __or__.Tensor __xor__.Tensor
    min.other max.other copy_.default zero_.default
"""

_REDUCTIONS = """
    all.default all.dim amax.default amin.default any.default any.dim argmax.default
    argmin.default cumprod.default cumsum.default diff.default histc.default
    linalg_vector_norm.default log_softmax.int logcumsumexp.default logsumexp.default max.default
    max.dim mean.default mean.dim min.default min.dim norm.Scalar norm.ScalarOpt_dim
    prod.default prod.dim_int softmax.int sort.default argsort.default std.correction std.dim
    sum.default sum.dim_IntList topk.default var.correction var.dim var_mean.correction
"""

_PRODUCTS = """
    _grouped_mm.default addbmm.default addmm.default addmv.default baddbmm.default
    bilinear.default bmm.default cdist.default conv1d.default conv1d.padding conv2d.default
    conv2d.padding conv3d.default conv3d.padding conv_transpose1d.default conv_transpose2d.input
    conv_transpose3d.input convolution.default dot.default einsum.default linear.default
    matmul.default mm.default mv.default outer.default scaled_dot_product_attention.default
"""

_LAYERS = """
    _weight_norm.default adaptive_avg_pool1d.default adaptive_avg_pool2d.default
    adaptive_avg_pool3d.default adaptive_max_pool2d.default alpha_dropout.default
    avg_pool1d.default avg_pool2d.default avg_pool3d.default batch_norm.default
    binary_cross_entropy.default binary_cross_entropy_with_logits.default
    cosine_similarity.default cross_entropy_loss.default dropout.default dropout_.default
    embedding.default feature_dropout.default group_norm.default gru.input huber_loss.default
    instance_norm.default kl_div.default l1_loss.default layer_norm.default lstm.input
    max_pool1d.default max_pool2d.default max_pool3d.default mse_loss.default
    nll_loss_nd.default pixel_shuffle.default pixel_unshuffle.default rms_norm.default
    rnn_relu.input rnn_tanh.input smooth_l1_loss.default upsample_bicubic2d.vec
    upsample_bilinear2d.vec upsample_linear1d.vec upsample_nearest1d.vec upsample_nearest2d.vec
    upsample_trilinear3d.vec grid_sampler.default unfold.default im2col.default
"""

_SHAPES = """
    alias.default broadcast_to.default cat.default chunk.default clone.default concat.default
    constant_pad_nd.default contiguous.default detach.default detach_.default diag.default
    diagonal.default expand.default expand_as.default flatten.using_ints flip.default
    lift_fresh_copy.default meshgrid.default meshgrid.indexing movedim.int movedim.intlist
    narrow.default numpy_T.default pad.default permute.default ravel.default repeat.default
    repeat_interleave.self_int reshape.default reshape_as.default roll.default select.int
    slice.Tensor split.Tensor split.sizes split_with_sizes.default squeeze.default squeeze.dim
    squeeze.dims stack.default swapaxes.default t.default tile.default to.device to.dtype
    to.dtype_layout to.other transpose.int transpose_.default tril.default triu.default
    type_as.default unbind.int unflatten.int unsqueeze.default unsqueeze_.default view.default
    view.dtype view_as.default view_as_complex.default view_as_real.default complex.default
    polar.default real.default imag.default conj.default _to_copy.default mH.default mT.default
"""

_INDEXING = """
    gather.default index.Tensor index_add.default index_add_.default index_copy.default
    index_copy_.default index_put.default index_put_.default index_select.default
    one_hot.default scatter.src scatter.value scatter_.src scatter_.value scatter_add.default
    scatter_add_.default scatter_reduce.two searchsorted.Tensor bucketize.Tensor
    take_along_dim.default
"""

_FACTORIES = """
    arange.default arange.start arange.start_step bernoulli.default bernoulli.p
    bernoulli_.float empty.memory_format empty_like.default eye.default eye.m full.default
    full_like.default linspace.default new_empty.default new_full.default new_ones.default
    new_zeros.default ones.default ones_like.default rand.default rand_like.default
    randint.default randint.low randn.default randn_like.default scalar_tensor.default
    uniform_.default normal_.default zeros.default zeros_like.default
"""

OPERATORS: frozenset[str] = frozenset(
    f"aten.{name}"
    for family in (
        _POINTWISE, _REDUCTIONS, _PRODUCTS, _LAYERS, _SHAPES, _INDEXING, _FACTORIES,
    )
    for name in family.split()
) | {"transformers.grouped_mm_fallback.default"}  # fmt: skip
"""Operators by full name. The one that is not torch's comes with ``transformers``: it multiplies
the experts of a mixture on devices that have no kernel for it."""

GETITEM = "getitem"
"""Operation that selects one result, by index, of an operation that returns several."""

_CONV = "in_channels out_channels kernel_size stride padding dilation groups bias padding_mode"
_NORM = "num_features eps momentum affine track_running_stats bias"
_POOL = "kernel_size stride padding ceil_mode"
_RECURRENT = "input_size hidden_size num_layers bias batch_first dropout bidirectional proj_size"

_MODULE_SETTINGS = {
    "ReLU ReLU6 SELU SiLU Mish Hardswish Hardsigmoid": "inplace",
    "Sigmoid Tanh LogSigmoid Softsign Tanhshrink Identity Softmax2d": "",
    "ELU CELU": "alpha inplace",
    "GELU": "approximate",
    "GLU Softmax Softmin LogSoftmax": "dim",
    "Hardtanh": "min_val max_val inplace",
    "Hardshrink Softshrink": "lambd",
    "LeakyReLU": "negative_slope inplace",
    "PReLU": "num_parameters",
    "RReLU": "lower upper inplace",
    "Softplus": "beta threshold",
    "Threshold": "threshold value inplace",
    "Linear": "in_features out_features bias",
    "Conv1d Conv2d Conv3d": _CONV,
    "ConvTranspose1d ConvTranspose2d ConvTranspose3d": f"{_CONV} output_padding",
    "BatchNorm1d BatchNorm2d BatchNorm3d InstanceNorm1d InstanceNorm2d InstanceNorm3d": _NORM,
    "LayerNorm": "normalized_shape eps elementwise_affine bias",
    "RMSNorm": "normalized_shape eps elementwise_affine",
    "GroupNorm": "num_groups num_channels eps affine bias",
    "LocalResponseNorm": "size alpha beta k",
    "Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout": "p inplace",
    "Embedding": "num_embeddings embedding_dim padding_idx scale_grad_by_freq sparse",
    "Flatten": "start_dim end_dim",
    "Unflatten": "dim unflattened_size",
    "ChannelShuffle": "groups",
    "PixelShuffle": "upscale_factor",
    "PixelUnshuffle": "downscale_factor",
    "MaxPool1d MaxPool2d MaxPool3d": f"{_POOL} dilation",
    "AvgPool1d": f"{_POOL} count_include_pad",
    "AvgPool2d AvgPool3d": f"{_POOL} count_include_pad divisor_override",
    "LPPool1d LPPool2d": "norm_type kernel_size stride ceil_mode",
    "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d": "output_size",
    "AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d": "output_size",
    "ZeroPad1d ZeroPad2d ZeroPad3d CircularPad1d CircularPad2d CircularPad3d": "padding",
    "ReflectionPad1d ReflectionPad2d ReflectionPad3d": "padding",
    "ReplicationPad1d ReplicationPad2d ReplicationPad3d": "padding",
    "ConstantPad1d ConstantPad2d ConstantPad3d": "padding value",
    "Upsample": "size scale_factor mode align_corners recompute_scale_factor",
    "UpsamplingNearest2d UpsamplingBilinear2d": "size scale_factor",
    "LSTM GRU": _RECURRENT,
    "RNN": f"{_RECURRENT} nonlinearity",
    "AttentionDropout": "dropout_p is_causal scale gqa",
}

MODULES: dict[str, frozenset[str]] = {
    name: frozenset(settings.split())
    for names, settings in _MODULE_SETTINGS.items()
    for name in names.split()
}
"""Leaf modules by class name, with the constructor arguments that may be given.

All are from ``torch.nn`` except ``AttentionDropout``: scaled dot-product attention whose dropout
follows training mode (see `capture.program.mode_dependent`).
"""
