# CPU and CUDA: docker build -t longseq . && docker run --rm --gpus all -v "$PWD:/data" longseq doctor
# A smaller image, for CPUs alone: docker build --build-arg TORCH="torch --index-url https://download.pytorch.org/whl/cpu" -t longseq .
ARG BASE=debian:bookworm-slim
FROM $BASE

# g++ and Python.h: for the kernels that are compiled at their first use, and for Triton
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/longseq/bin:$PATH NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

ARG TORCH=torch
RUN python3 -m venv /opt/longseq && pip install --no-cache-dir $TORCH
COPY pyproject.toml README.md LICENSE /src/
COPY longseq_bench /src/longseq_bench
RUN pip install --no-cache-dir /src && rm -rf /src

WORKDIR /data
ENTRYPOINT ["longseq"]
