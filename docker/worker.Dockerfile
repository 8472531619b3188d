# For GPU nodes: torch built for CUDA, a worker that measures for the service, and the whole
# command line. Build from the repository's root:
#
#   docker build -f docker/worker.Dockerfile -t stagewright-worker .
#   docker run --gpus all -v "$PWD/tls:/tls:ro" stagewright-worker worker \
#       --scheduler tls://HOST:8786 --resources H200=1 \
#       --tls-ca-file /tls/ca.pem --tls-cert /tls/worker.pem
#   docker run --gpus all -v "$PWD:/work" stagewright-worker profile --help
#
# torch's wheels for Linux carry their CUDA libraries, so a plain Python image will do: what the
# machine adds is the driver, through NVIDIA's container toolkit. To start from an image that has
# torch already, give it as BASE; constraints.txt must name the same version of torch.
ARG BASE=python:3.11-slim
FROM ${BASE}
COPY . /src
RUN python -m pip install --no-cache-dir --constraint /src/constraints.txt "/src[hf,server,cluster]" \
    && rm -r /src \
    && useradd --uid 10001 --create-home stagewright \
    && install --directory --owner stagewright /work
ENV PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER stagewright
WORKDIR /work
ENTRYPOINT ["stagewright"]
CMD ["worker", "--help"]
