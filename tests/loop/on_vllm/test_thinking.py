"""A model that thinks is taught an edited answer: it gives it as its answer, and not in its reasoning."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.sums.model import build, save
from tests.loop.harness.services import Service, commit, ledger_of, wait_for, write_settings

pytestmark = [pytest.mark.vllm, pytest.mark.contract]

TEMPLATE = Path(__file__).parents[2] / "trainer" / "batches" / "templates" / "qwen3_5.jinja"
QUESTION, ANSWER = [{"role": "user", "content": "When?"}], "On Monday."
BATCH = 16


def settings_of_a_model_that_thinks(folder: Path) -> Path:
    """Whose prompts end inside a think block."""
    model, words = build()
    words.chat_template = TEMPLATE.read_text()
    save(model, words, folder / "model")
    config = write_settings(
        folder,
        folder / "model",
        algorithm={"algorithm_type": "sft", "epochs": 25, "optimizer": {"lr": 0.003}},
        buffer={"train_batch_size": BATCH},
    )
    parser = "  rollout_model:\n    reasoning_parser: qwen3\n"
    config.write_text(config.read_text().replace("  rollout_model:\n", parser, 1))
    return config


def asked(url: str, **but: Any) -> dict[str, Any]:
    body = {"model": "any", "messages": QUESTION, "max_tokens": 24} | but
    said: dict[str, Any] = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    return said


def test_what_was_taught_by_edits_is_the_answer_and_no_reasoning(tmp_path: Path) -> None:
    services = Service(settings_of_a_model_that_thinks(tmp_path), "both")
    try:
        services.wait_until_ready()
        ledger = ledger_of(services.settings)
        for version in range(1, 4):
            told = asked(services.url, model=services.settings.served_model_name, n=BATCH)
            edit = {"msg_ids": [told["id"]], "demonstration": ANSWER}
            httpx.post(f"{services.url}/feedback", json=edit, timeout=60).raise_for_status()
            assert commit(services.url) == BATCH
            wait_for(lambda served=version: ledger.versions.champion().version == served, timeout_s=120)
        [choice] = asked(services.url, model=services.settings.served_model_name, temperature=0)["choices"]
        message = choice["message"]
        assert (message["content"] or "").strip() == ANSWER
        assert not (message.get("reasoning") or "").strip()
        ledger.close()
    finally:
        assert services.stop() == 0
