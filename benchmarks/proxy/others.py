"""The gateways of others, each run as its documentation says, in an environment of its own below the work folder."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import yaml
from sqlalchemy import make_url

from benchmarks.proxy.load import running, wait_for_file
from benchmarks.proxy.migrations import migrate
from benchmarks.proxy.systems import MODEL, Kind, Place, System, rows, start_processes

LITELLM = "1.106.2"
TENSORZERO = "2026.6.0"
TRINITY = "0.6.0"
VLLM_ROUTER = "0.1.17"

_PEER = (f"trinity-rft=={TRINITY}", "aiosqlite", "asyncpg", "greenlet", "omegaconf", "antlr4-python3-runtime==4.9.3")


def environment(work: Path, requirement: str) -> Path:
    """The programs of a virtual environment with what is required, made at its first use."""
    folder = work / requirement.replace("[", "-").replace("]", "")
    if not (folder / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "-q", requirement], check=True)
        (folder / "installed").touch()
    return folder / "bin"


@contextmanager
def litellm(kind: Kind, place: Place) -> Iterator[System]:
    """One worker, no callbacks, no log of spending."""
    programs = environment(place.work, f"litellm[proxy]=={LITELLM}")
    engine = {"model": f"openai/{MODEL}", "api_base": f"{place.upstream}/v1", "api_key": "none"}
    settings = {
        "model_list": [{"model_name": MODEL, "litellm_params": engine}],
        "general_settings": {"disable_spend_logs": True},
        "litellm_settings": {"callbacks": [], "success_callback": [], "failure_callback": []},
    }
    config = place.folder / "litellm.yaml"
    config.write_text(yaml.safe_dump(settings))
    env = {
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
    }
    command = (programs / "litellm", "--config", config, "--host", "127.0.0.1", "--port", str(place.port))
    with start_processes((*command, "--telemetry", "False"), place, "/health/liveliness", env=env) as pid:
        yield System(name=kind.name, port=place.port, pids=(pid,), slow=True)


@contextmanager
def vllm_router(kind: Kind, place: Place) -> Iterator[System]:
    """vLLM's own router, which records nothing."""
    program = environment(place.work, f"vllm-router=={VLLM_ROUTER}") / "vllm-router"
    command: list[str | Path] = [
        program,
        "--worker-urls",
        place.upstream,
        "--host",
        "127.0.0.1",
        "--port",
        str(place.port),
    ]
    command += ["--policy", "round_robin", "--log-level", "warning", "--prometheus-port", str(place.port + 500)]
    with start_processes(command, place, "/health") as pid:
        yield System(name=kind.name, port=place.port, pids=(pid,))


@contextmanager
def tensorzero(kind: Kind, place: Place) -> Iterator[System]:
    """Its gateway as the wheel carries it, with its own recording on PostgreSQL or with none."""
    programs = environment(place.work, f"tensorzero=={TENSORZERO}")
    recording = f"enabled = {'true' if place.database else 'false'}"
    if kind.options.get("batches"):
        # The wheel refuses it otherwise: a program that ends would lose its last batch.
        recording += "\nasync_writes = false\n[gateway.observability.batch_writes]\nenabled = true"
        recording += "\n__force_allow_embedded_batch_writes = true"
    config, address = place.folder / "tensorzero.toml", place.folder / "address"
    config.write_text(f"""
[gateway.observability]
{recording}
[models.{MODEL}]
routing = ["vllm"]
[models.{MODEL}.providers.vllm]
type = "vllm"
api_base = "{place.upstream}/v1/"
model_name = "{MODEL}"
api_key_location = "none"
""")
    command: list[str | Path] = [programs / "python", Path(__file__).parent / "tensorzero_gateway.py", config, address]
    if place.database:
        migrate(place.database, next(programs.parent.glob("lib/*/site-packages/tensorzero/*.so")))
        # Its driver finds the folder of the socket only in the URL of a host.
        command.append(make_url(place.database).set(host="localhost").render_as_string(False))
    log = place.folder / "log"
    with running(command, log) as pid:
        url = urlsplit(wait_for_file(address, pid, log))
        yield System(
            name=kind.name,
            port=url.port or 0,
            pids=(pid,),
            path=f"{url.path}/chat/completions",
            model=f"tensorzero::model_name::{MODEL}",
            recorded=rows(place.database, "tensorzero.chat_inferences") if place.database else None,
        )


@contextmanager
def trinity(kind: Kind, place: Place) -> Iterator[System]:
    """The peer's proxy with its recorder."""
    packages = place.work / f"trinity-rft=={TRINITY}"
    if not (packages / "installed").exists():
        command: list[str | Path] = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            packages,
            *_PEER,
        ]
        subprocess.run(command, check=True)
        (packages / "installed").touch()
    database = place.database or f"sqlite:///{place.folder}/history.db"
    program = (sys.executable, "-m", "benchmarks.proxy.trinity")
    root = Path(__file__).parents[2]
    with start_processes(
        (*program, packages, place.upstream, str(place.port), database), place, "/health", cwd=root
    ) as pid:
        recorded = rows(database, "proxy_history")
        yield System(name=kind.name, port=place.port, pids=(pid,), recorded=recorded, slow=True)
