"""The demo's folder, and the settings of both services."""

import fcntl
import os
import shutil
import socket
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import yaml

from tuneloop.shared.experience import Scope
from tuneloop.shared.ledger.keys import KeyGrant
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage.database import upgrade
from tuneloop.shared.settings.loader import load_settings
from tuneloop.shared.settings.settings import Settings

BATCH = 64
MODEL_NAME = "sums"
_MARK = ".tuneloop-demo"
_OURS = ("model", "logs", "checkpoints", "tuneloop.yaml", "summary.json", "key", "page_key")


class FolderRefused(Exception):
    """The folder must not be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Folder:
    """The demo's folder."""

    root: Path

    @property
    def model(self) -> Path:
        """The base model."""
        return self.root / "model"

    @property
    def settings(self) -> Path:
        """The settings file."""
        return self.root / "tuneloop.yaml"

    @property
    def summary(self) -> Path:
        """The result."""
        return self.root / "summary.json"

    @property
    def key(self) -> Path:
        """The key of the agent."""
        return self.root / "key"

    @property
    def page_key(self) -> Path:
        """The key with which a person logs in to the page."""
        return self.root / "page_key"

    def log(self, service: str) -> Path:
        """The log file of a service."""
        return self.root / "logs" / f"{service}.log"

    def start_afresh(self) -> TextIO:
        """Delete only an earlier demo's files. Keep the returned file open: it is the lock."""
        mark = self.root / _MARK
        if not mark.exists() and any((self.root / name).exists() for name in _OURS):
            raise FolderRefused(f"{self.root} holds something that is not this demo's: choose another --dir")
        self.root.mkdir(parents=True, exist_ok=True)
        lock = mark.open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise FolderRefused(f"another demo is running in {self.root}: wait, or choose another --dir") from None
        for name in _OURS:
            path = self.root / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        (self.root / "logs").mkdir()
        return lock

    def write_settings(self, *, seed: int, changes: Mapping[str, Any] | None = None) -> Settings:
        """Write the settings file, with a port that is free now, and read it as the services will.

        `changes` are laid over the demo's settings, section by section; lists and numbers replace.
        """
        settings = _over(_settings(self.root, seed=seed, port=_free_port()), changes or {})
        text = yaml.safe_dump(settings, sort_keys=False)
        self.settings.write_text(
            f"# Written by the demo; try: tuneloop run --config {os.path.relpath(self.settings)}\n{text}"
        )
        return load_settings(self.settings)

    def make_keys(self, settings: Settings) -> None:
        """Make keys for the agent and the page, as `tuneloop keys create` does, and keep them beside the settings."""
        upgrade(settings.database_url, schema=settings.buffer.trainer_input.experience_buffer.name)
        agent, person = (Scope.INFERENCE, Scope.FEEDBACK, Scope.COMMIT), (Scope.ADMIN,)
        with closing(Ledger.of(settings)) as ledger:
            for file, name, scopes in ((self.key, "agent", agent), (self.page_key, "page", person)):
                _, key = ledger.keys.create(KeyGrant(name=name, scopes=scopes), actor="demo")
                file.touch(0o600)
                file.write_text(key)


def way_to_page(url: str, config: Path) -> str:
    """Where the page of a demo is, and how to log in; `config` is the demo's settings file."""
    return f"{url}/ui   log in with the key in {config.with_name('page_key')}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _over(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    both = {name: _over(settings[name], each) for name, each in changes.items() if isinstance(settings.get(name), dict)}
    return {**settings, **changes, **both}


def _settings(root: Path, *, seed: int, port: int) -> dict[str, Any]:
    return {
        "mode": "both",
        "project": "tuneloop",
        "name": "sums",
        "checkpoint_root_dir": str(root / "checkpoints"),
        "model": {
            "model_path": str(root / "model"),
            "served_model_name": MODEL_NAME,
            "max_model_len": 128,
            "temperature": 1.0,
        },
        "algorithm": {
            "algorithm_type": "ppo",
            "optimizer": {"lr": 2e-4, "betas": [0.9, 0.99]},
            "critic_optimizer": {"lr": 1e-3, "betas": [0.9, 0.99]},
            "mini_batches": 2,
            "kl_coef": 0.0,
        },
        "cluster": {"node_num": 1, "gpu_per_node": 0},
        "explorer": {
            "listen_address": "127.0.0.1",
            "proxy_port": port,
            "service_status_check_interval": 0.2,
            "rollout_model": {
                "dtype": "float32",
                "seed": seed,
                "enforce_eager": True,
                "single_process": True,
                "kv_cache_memory_bytes": 64 << 20,
            },
        },
        "trainer": {
            "device": "cpu",
            "dtype": "float32",
            "seed": seed,
            "save_interval": 1,
            "max_checkpoints_to_keep": 5,
            "poll_interval": 0.1,
        },
        "buffer": {
            "train_batch_size": BATCH,
            "commit": "auto",
            "trainer_input": {"experience_buffer": {"name": "sums", "storage_type": "sql"}},
        },
    }
