"""A model of 30 000 weights, settings for it, and a ledger."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.constants import settings_of
from tests.databases import put_file
from tests.doubles.teacher import TeacherDouble, teaching
from tests.doubles.warm.process import TRAINING, WarmProcess
from tests.trainer.fine_tuning import LORA
from tuneloop.shared.ledger.ledger import Ledger
from tuneloop.shared.ledger.storage import database
from tuneloop.shared.settings.settings import Settings

VOCABULARY = 300


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen3 with random weights and a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(7)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            eos_token_id=257,
            pad_token_id=256,
        )
    ).save_pretrained(folder)
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def opinionated(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher with opinions: another model's logits, scaled up."""
    folder = tmp_path_factory.mktemp("teacher")
    for file in base.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(11)
    teacher = AutoModelForCausalLM.from_pretrained(base)
    for parameter in teacher.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    teacher.model.norm.weight.data.mul_(6)
    teacher.save_pretrained(folder)
    return folder


@pytest.fixture
def settings(base: Path, tmp_path: Path) -> Callable[..., Settings]:
    """Makes settings with sections changed, constants too: settings(trainer={"save_interval": 2})."""

    def make(**but: dict[str, object]) -> Settings:
        tree: dict[str, dict[str, object]] = {
            "algorithm": {
                "optimizer": {"lr": 1e-3},
                "critic_optimizer": {"lr": 1e-3},
                "kl_coef": 0.01,
                "mini_batches": 2,
            },
            "model": {"model_path": base},
            "trainer": {"device": "cpu", "poll_interval": 0.02, "micro_batch_tokens": 64},
            "buffer": {"train_batch_size": 4, "max_backlog": None},
        }
        for section, values in but.items():
            tree[section] = tree.get(section, {}) | values
        return settings_of({"mode": "train", "checkpoint_root_dir": tmp_path} | tree)

    return make


@pytest.fixture
def adapted(settings: Callable[..., Settings], base: Path) -> Callable[..., Settings]:
    """Makes settings of an adapter."""
    return lambda **but: settings(**{"model": {"model_path": base, "lora": LORA}} | but)


@pytest.fixture
def ledger(settings: Callable[..., Settings]) -> Iterator[Ledger]:
    url = settings().database_url
    put_file(url, "migrated")
    ledger = Ledger(database.connect(url))
    yield ledger
    ledger.close()


@pytest.fixture
def start(settings: Callable[..., Settings], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts a trainer as a process; ended with the test."""
    started = []

    def begin(*, stderr: int = subprocess.PIPE, **but: dict[str, object]) -> Any:
        config = tmp_path / "trainer.yaml"
        config.write_text(yaml.safe_dump(settings(**but).model_dump(mode="json", exclude_unset=True)))
        command = [sys.executable, "-m", "tuneloop.trainer", "--config", str(config)]
        process = WarmProcess(command, modules=TRAINING, stderr=stderr, text=True)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.terminate()
        process.communicate(timeout=60)


@pytest.fixture
def double(base: Path) -> Iterator[TeacherDouble]:
    with teaching(base) as teacher:
        yield teacher
