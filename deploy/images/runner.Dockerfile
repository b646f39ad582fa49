# What apps import, and nothing else:  docker build -f deploy/images/runner.Dockerfile -t tuneloop-runner .
# Build your own image on it: FROM tuneloop-runner.
FROM python:3.12-slim-bookworm

# The release: there is no history here to read it from.
ARG VERSION=0.1.0
WORKDIR /src
COPY runner runner
RUN SETUPTOOLS_SCM_PRETEND_VERSION=${VERSION} python -m pip install --no-cache-dir "./runner[openai,yaml]" \
    && rm -rf /src/* \
    && useradd --uid 10001 --create-home app

WORKDIR /home/app
USER 10001
ENV PYTHONUNBUFFERED=1
ENTRYPOINT ["python"]
CMD ["-m", "tuneloop.runner", "--help"]
