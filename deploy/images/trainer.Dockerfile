# The trainer, on GPUs or without:  docker build -f deploy/images/trainer.Dockerfile -t tuneloop-trainer .
# For a machine without GPUs, --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu saves several GB.
FROM python:3.12-slim-bookworm

ARG TORCH=2.13.0
ARG TORCH_INDEX=https://pypi.org/simple
# The release: there is no history here to read it from.
ARG VERSION=0.1.0
WORKDIR /src
COPY . .
RUN python -m pip install --no-cache-dir "torch==${TORCH}" --index-url "${TORCH_INDEX}" --extra-index-url https://pypi.org/simple \
    && SETUPTOOLS_SCM_PRETEND_VERSION=${VERSION} python -m pip install --no-cache-dir -c requirements/lock.txt ./runner ".[trainer]" \
    && rm -rf /src/* \
    && useradd --uid 10001 --create-home tuneloop \
    && install -d -o tuneloop -g tuneloop /var/lib/tuneloop /var/spool/tuneloop

WORKDIR /var/lib/tuneloop
USER 10001
ENV HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TUNELOOP_LOG_JSON=1
ENTRYPOINT ["tuneloop"]
CMD ["train", "/etc/tuneloop/tuneloop.yaml"]
