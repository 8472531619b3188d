"""Names of the runtimes in `runtimes.registry`, for help texts; imports no pydantic."""

TARGET_NAMES = (
    "torch",
    "torchtitan",
    "megatron",
    "deepspeed",
    "accelerate",
    "vllm",
    "sglang",
    "tensorrt-llm",
    "colossalai",
    "maxtext",
    "llama.cpp",
    "torchgpipe",
    "pipedream",
)
