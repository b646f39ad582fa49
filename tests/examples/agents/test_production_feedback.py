"""The app whose users give thumbs: against a teacher behind an endpoint that takes feedback."""

import asyncio
from pathlib import Path

import httpx
import yaml
from oracle import Oracle, serving

from examples.email_search.world import Mailbox, questions
from examples.production_feedback.main import COMMIT_EVERY, make_app, use
from tuneloop.shared.settings.settings import Settings

ROOT = Path(__file__).parent.parent.parent.parent


def thumbs_of(oracle: Oracle) -> list[tuple[str, object]]:
    bodies = [body for path, body in oracle.asked if path == "/feedback"]
    return [(entry["task_id"], entry["value"]) for body in bodies for entry in body.get("feedback", [body])]


def test_each_answer_gets_the_thumb_of_its_user_and_thumbs_are_committed(tmp_path: Path) -> None:
    asked = questions(held_out=False)
    oracle = Oracle(Mailbox(), asked)
    with serving(oracle) as url:
        app = make_app(url, tmp_path)
        assert asyncio.run(use(app, (asked * 2)[:COMMIT_EVERY], train=True)) == 1.0
    thumbs = thumbs_of(oracle)
    assert len({name for name, _ in thumbs}) == len(thumbs) == COMMIT_EVERY
    assert {value for _, value in thumbs} == {True}
    assert [path for path, _ in oracle.asked].count("/commit") == 1


def test_a_thumb_is_taken_while_the_service_is_away(tmp_path: Path) -> None:
    app = make_app("http://127.0.0.1:9", tmp_path)

    async def give() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client:
            return await client.post("/thumb", json={"answer": "a1", "up": True})

    assert asyncio.run(give()).json() == {"status": "thank you"}
    assert any(b"a1" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_its_settings_are_settings_of_the_services() -> None:
    settings = yaml.safe_load((ROOT / "examples" / "production_feedback" / "tuneloop.yaml").read_text())
    assert Settings.model_validate(settings | {"checkpoint_root_dir": "/there"}).buffer.group_by == "run"
