# An image with every strategy, for NVIDIA GPUs and for CPUs; docs/CLUSTER.md has the commands.
#
# The base image is Debian's official one, https://hub.docker.com/_/debian. It has no CUDA: torch's
# build on PyPI contains the CUDA libraries, and the NVIDIA Container Toolkit adds the host's driver.
# For ops that need nvcc, build with NVIDIA's image (https://hub.docker.com/r/nvidia/cuda):
# --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
ARG BASE=debian:12.11-slim
FROM ${BASE}

# hadolint ignore=DL3008 # Debian removes the old release of a package when it has a newer one
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        build-essential libaio-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 trainer

ENV PATH=/opt/venv/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /project

# The packages are a layer of their own, which a change of the code does not rebuild.
COPY requirements.txt constraints.txt ./
COPY requirements ./requirements
RUN python3 -m venv /opt/venv \
    && pip install --no-cache-dir -r requirements.txt -r requirements/lora.txt \
        -r requirements/report.txt -c constraints.txt

COPY . .
# The code stays root's. The user writes results, comparisons, and what a volume keeps in .cache:
# downloads and DeepSpeed's ops, which are compiled at their first use, for the container's CPU.
RUN pip install --no-cache-dir --no-deps -e . \
    && install -d -o 10001 -g 10001 runs /home/trainer/.cache \
    && chown 10001:10001 .

USER 10001
CMD ["distributed-training", "--help"]
