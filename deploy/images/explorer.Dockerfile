# The explorer with vLLM for NVIDIA GPUs:  docker build -f deploy/images/explorer.Dockerfile -t tuneloop-explorer .
# VLLM is a release that pyproject.toml allows.
ARG VLLM=v0.32.0
FROM vllm/vllm-openai:${VLLM}

# The release, since the image has no git history.
ARG VERSION=0.1.0
WORKDIR /src
COPY . .
# As scripts/install does: installed packages, above all vLLM's torch, remain unchanged.
RUN SETUPTOOLS_SCM_PRETEND_VERSION=${VERSION} python3 -m pip install --no-cache-dir ./runner . \
    && rm -rf /src/* \
    && useradd --uid 10001 --create-home tuneloop \
    && install -d -o tuneloop -g tuneloop /var/lib/tuneloop /var/spool/tuneloop /run/metrics-key

WORKDIR /var/lib/tuneloop
USER 10001
ENV HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TUNELOOP_LOG_JSON=1
EXPOSE 8010
# Engines take a minute or two to start; a broken model is seen by the container's end.
HEALTHCHECK --start-period=10m --interval=10s --timeout=5s \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8010/health/ready', timeout=4)"]
ENTRYPOINT ["tuneloop"]
CMD ["serve", "/etc/tuneloop/tuneloop.yaml"]
