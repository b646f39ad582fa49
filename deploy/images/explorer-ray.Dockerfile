# The explorer's GPU image with Ray, for several machines:
#   docker build -f deploy/images/explorer-ray.Dockerfile -t tuneloop-explorer-ray .
ARG EXPLORER=tuneloop-explorer:latest
# hadolint ignore=DL3006
FROM ${EXPLORER}

# hadolint ignore=DL3002
USER 0
RUN python3 -m pip install --no-cache-dir "ray[default]==2.60.0"

USER 10001
# KubeRay starts it by its own command line.
ENTRYPOINT []
CMD ["ray", "--version"]
