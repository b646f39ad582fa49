# What apps import, and nothing else:  docker build -f deploy/images/runner.Dockerfile -t tuneloop-runner .
# Build your own image on it: FROM tuneloop-runner.
FROM python:3.12-slim-bookworm

WORKDIR /src
COPY runner runner
RUN python -m pip install --no-cache-dir "./runner[openai,yaml]" \
    && rm -rf /src/* \
    && useradd --uid 10001 --create-home app

WORKDIR /home/app
USER 10001
ENV PYTHONUNBUFFERED=1
ENTRYPOINT ["python"]
CMD ["-m", "tuneloop.runner", "--help"]
