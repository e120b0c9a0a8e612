# Trains on NVIDIA GPUs (torch's own wheels bring the CUDA libraries) and on CPUs.
#
#   docker build -t titan .
#   docker run --gpus all --shm-size=8g -v "$PWD:/work" titan \
#       torchrun --nproc-per-node 8 -m torchtitan.train --job.config_file job.toml
FROM python:3.12-slim
# torch.compile compiles C++ and CUDA launchers when it runs.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY torchtitan /src/torchtitan
RUN pip install --no-cache-dir -c /src/constraints.txt /src && rm -r /src
WORKDIR /work
CMD ["python", "-m", "torchtitan.train", "--help"]
