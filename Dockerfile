# Trains on NVIDIA GPUs (torch's own wheels bring the CUDA libraries) and on CPUs.
#
#   docker build -t titan .
#   docker build -t titan:cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#   docker build -t titan:vllm --build-arg CONSTRAINTS= --build-arg PACKAGES=vllm==0.32.0 .   # with servers for RL
#   docker run --gpus all --shm-size=8g -v "$PWD:/work" titan torchtitan train job.toml --nproc 8
#
# `torchtitan launch jobset --image titan ...` prints a job on several machines for it: docs/scale.md.
FROM python:3.12-slim
# torch.compile compiles C++ and CUDA launchers when it runs.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX="" CONSTRAINTS=/src/constraints.txt PACKAGES=""
COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY torchtitan /src/torchtitan
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} ${CONSTRAINTS:+-c "$CONSTRAINTS"} \
    /src $PACKAGES && rm -r /src
WORKDIR /work
CMD ["torchtitan", "--help"]
