# The program, and the packages of one platform. EXTRA: serve for CPUs, serve,cuda for NVIDIA GPUs, serve,tpu for TPUs:
#     docker build --build-arg EXTRA=serve,cuda --tag llama-jax .
FROM python:3.13-slim

ARG EXTRA=serve
RUN useradd --create-home --uid 1000 llama && install --directory --owner=llama /models /programs
WORKDIR /llama-jax
# The packages are installed before the code is copied: a change of the code keeps this layer.
COPY pyproject.toml LICENSE ./
RUN pip install --no-cache-dir -e ".[$EXTRA]"
COPY . .

USER 1000
# What is downloaded from the hub, and compiled programs, outlive the container.
ENV HF_HOME=/models/hub JAX_COMPILATION_CACHE_DIR=/programs
VOLUME ["/models", "/programs"]
EXPOSE 8000
# Of a server; Kubernetes has its own probes.
HEALTHCHECK --interval=30s --start-period=15m \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
# Python is process 1, and gets SIGTERM itself: a server then finishes its open requests.
ENTRYPOINT ["python3", "main.py"]
