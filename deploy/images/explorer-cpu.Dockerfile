# The explorer with vLLM for CPUs:  docker build -f deploy/images/explorer-cpu.Dockerfile -t tuneloop-explorer:cpu .
FROM python:3.12-slim-bookworm

ARG TORCH=2.13.0
# The release: there is no history here to read it from.
ARG VERSION=0.1.0
WORKDIR /src
COPY . .
# vLLM for CPUs compiles with the system's compiler, and is pinned to cores with libnuma.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && python -m pip install --no-cache-dir setuptools==78.1.1 \
    && python -m pip install --no-cache-dir --no-deps "torch==${TORCH}+cpu" --index-url https://download.pytorch.org/whl/cpu \
    && SETUPTOOLS_SCM_PRETEND_VERSION=${VERSION} python -m pip install --no-cache-dir -c requirements/lock.txt -r requirements/engine-cpu.txt ./runner . \
    && python -m pip install --no-cache-dir --no-deps -r requirements/engine-cpu-nodeps.txt \
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
