"""The worlds of the examples: tasks that have answers, teachers that are right, and models that can be taught."""

import io
import random
import re
import sys
from contextlib import suppress
from itertools import islice

import pytest

from benchmarks.learning.play import Player
from examples.email_search import world as mails
from examples.json_format import world as capitals
from examples.math_agent import world as sums
from examples.math_agent.pretrain import size_of
from examples.tasks.dialogue import Task, Verdict, forever
from examples.tasks.warmup import prompt_ids
from examples.werewolf import world as wolves
from examples.worlds import model as models
from examples.worlds import warmup
from examples.worlds.schooling import Schooling
from examples.worlds.warmup import lessons, teach
from tuneloop.runner import ToolCall

WORLDS = [sums.Problems(), mails.Mailbox(), wolves.Wolves(), wolves.Village(), capitals.Capitals()]


def verdicts(world: Task, runs: int, *, slips: bool) -> list[Verdict]:
    chance, found = random.Random(3), []
    for question in islice(forever(world, 1), runs):
        dialogue = world.dialogue(question)
        next(dialogue)
        for reply in world.replies(question, chance if slips else None):
            try:
                dialogue.send(reply)
            except StopIteration as end:
                found.append(end.value)
                break
    return found


def mean(found: list[Verdict], metric: str) -> float:
    return sum(each.metrics[metric] for each in found) / len(found)


def test_the_teachers_are_right_and_with_slips_they_are_where_the_start_models_shall_be() -> None:
    right = {world.name: verdicts(world, 300, slips=False) for world in WORLDS}
    slipping = {world.name: verdicts(world, 600, slips=True) for world in WORLDS}
    assert mean(right["math_agent"], "accuracy") == mean(right["math_agent"], "format") == 1.0
    assert mean(right["email_search"], "tools") == mean(right["email_search"], "arguments") == 1.0
    assert mean(right["email_search"], "recall") == 1.0
    assert mean(right["werewolf"], "wins") > 0.8
    assert mean(right["json_format"], "format") == 1.0
    assert 0.25 < mean(slipping["json_format"], "format") < 0.35
    assert 0.4 < mean(slipping["math_agent"], "accuracy") < 0.65
    assert mean(right["math_agent"], "steps") < 0.8 * mean(slipping["math_agent"], "steps")
    assert 0.5 < mean(slipping["email_search"], "tools") < 0.65
    assert 0.4 < mean(slipping["email_search"], "arguments") < 0.5
    assert 0.42 < mean(slipping["werewolf"], "wins") < 0.6
    assert mean(right["village"], "wins") > mean(slipping["village"], "wins") > 0.3


def test_both_sides_are_asked_and_whoever_names_a_wolf_more_often_wins_more_games() -> None:
    def villagers_win(name_a_wolf: bool) -> float:
        won = []
        for task in wolves.games(5, 200):
            game = wolves.Game(task, scripted=False)
            turns = game.play()
            asked = set()
            try:
                player, messages = next(turns)
                while True:
                    asked.add(player)
                    assert messages[0]["content"].startswith(f"You are {player}, a ")
                    assert (" a wolf with " in messages[0]["content"]) is (player in game.wolves)
                    others = [each for each in game.alive if each != player and each not in game.wolves]
                    wolf = next(each for each in game.wolves if each in game.alive)
                    accuses_a_wolf = name_a_wolf and player not in game.wolves
                    player, messages = turns.send(wolf if accuses_a_wolf else others[0])
            except StopIteration:
                assert asked & {*game.wolves}
                assert asked - {*game.wolves}
                villagers = wolves.judge_villagers(game)
                assert villagers.right is not wolves.judge(game).right
                won.append(villagers.metrics["villagers_win"])
        return sum(won) / len(won)

    assert villagers_win(True) == 1.0
    assert villagers_win(False) == 0.0


def test_problems_have_two_operations_or_more_and_the_answer_that_they_lead_to() -> None:
    for problem in sums.problems(7, 200, most=4):
        assert 2 <= len(problem["expressions"]) <= 4
        assert sums.calculate(problem["expressions"][-1]) == str(sums.number_of(problem["answer"]))
    assert sums.problems(7, 3) == sums.problems(7, 3) != sums.problems(8, 3)


@pytest.mark.parametrize("expression", ["2+3*4", "1/0", "__import__('os')", "", None, "9" * 99 + "*2"])
def test_the_calculator_refuses_all_else(expression: object) -> None:
    assert sums.calculate(expression).startswith("error")


def test_no_question_about_mails_is_both_learnt_from_and_held_out() -> None:
    learnt, held_out = ({each["question"] for each in mails.questions(held_out=which)} for which in (False, True))
    assert len(held_out) > 25
    assert not learnt & held_out


def test_no_question_about_capitals_is_both_learnt_from_and_held_out() -> None:
    learnt, held_out = ({each["question"] for each in capitals.questions(held_out=which)} for which in (False, True))
    assert (len(learnt), len(held_out)) == (72, 24)
    assert not learnt & held_out


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ('{"country": "Peru", "capital": "Lima"}', 1.0),
        ('{"capital": "Rome", "country": "Peru"}', 1.0),
        ('{"country": "Peru", "capital": "Lima", "more": 1}', 0.0),
        ('Here it is: {"country": "Peru", "capital": "Lima"}', 0.0),
        ('["Lima"]', 0.0),
        ("Lima", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_is_json_as_it_was_asked_for_or_worth_nothing(text: str, reward: float) -> None:
    assert capitals.judge(text).reward == reward


def test_mails_are_found_by_one_column_and_nothing_else_is_searched() -> None:
    assert mails.search("search_sender", {"sender": "Ana"}).replace(" ", "").isdigit()
    for arguments in (None, {}, {"sender": 3}, {"topic": "budget"}, {"sender": "' OR 1=1 --"}):
        assert mails.search("search_sender", arguments).startswith("error")
    assert mails.search("delete_all", {}).startswith("error")


def test_an_answer_without_a_call_is_worth_no_more_than_a_tool_that_there_is_not() -> None:
    task = mails.questions(held_out=True)[0]
    right = mails.judge(task, "", [ToolCall(task["tool"], task["arguments"])])
    assert right.reward == 2.5
    assert mails.judge(task, "Mails 1.", []).reward == mails.judge(task, "", [ToolCall("find", {})]).reward == -2.0


def test_wolves_win_by_numbers_and_a_name_that_is_nobodys_counts_for_nothing() -> None:
    for task in wolves.games(5, 50):
        game = wolves.Game(task)
        turns = game.play()
        _, messages = next(turns)
        assert messages[-1]["role"] == "user"
        for _ in range(20):
            with suppress(StopIteration):
                turns.send("nobody")
        living = [each for each in game.alive if each in game.wolves]
        assert game.won == bool(living)
        assert game.slips > 0


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_what_is_taught_is_what_the_engine_shows_and_the_model_says(world: Task) -> None:
    words = models.tokenizer(world)
    question = world.questions()[0]
    rows = lessons(world, words, question, None)
    dialogue = world.dialogue(question)
    prompt = prompt_ids(world, words, next(dialogue))
    assert rows[0].ids[: len(prompt)].tolist() == prompt
    assert all(int((row.labels != -100).sum()) for row in rows)
    assert max(len(row.ids) for row in rows) < 400
    text = words.decode(rows[0].ids)
    assert words(text).input_ids == rows[0].ids.tolist()  # A run is one sequence: each prompt begins with the last.


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_a_model_can_be_taught_and_played(world: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "_MEASURED_RUNS", 4)
    words = models.tokenizer(world)
    model = models.build(words, hidden=32, layers=1, seed=1)
    before = [each.clone() for each in model.parameters()]
    assert 0.0 <= teach(world, model, words, Schooling(early_steps=2, late_steps=1, batch=2), seed=0) <= 1.0
    assert any(bool((a != b).any()) for a, b in zip(before, model.parameters(), strict=True))
    played = Player(world, model, words, seed=0).play(world.questions()[:2])
    assert all(run.replies for run in played)


def test_sizes_come_near_what_was_asked_for() -> None:
    words = models.tokenizer(WORLDS[0])
    for asked in ("1M", "5M"):
        model = models.build(words, **size_of(asked))
        assert 1.0 < models.parameters(model) / (float(asked[:-1]) * 1e6) < 1.9


def test_late_lessons_end_as_soon_as_the_model_is_no_better_than_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    words = models.tokenizer(WORLDS[2])
    model = models.build(words, hidden=32, layers=1)
    rates: list[float] = []
    monkeypatch.setattr(warmup, "learn", lambda *given: rates.append(given[-1]))
    monkeypatch.setattr(warmup, "share_right", lambda *_: 0.9 - len(rates) / 100)
    schooling = Schooling(early_steps=10, late_steps=200, batch=1, goal=0.4, rising_steps=2)
    assert teach(WORLDS[2], model, words, schooling, seed=0) == pytest.approx(0.4)
    assert len(rates) == 50
    assert rates[0] < rates[1] == max(rates)
    assert set(rates[10:]) == {schooling.late_rate} == {min(rates[1:])}


def test_teaching_shows_its_steps_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    words = models.tokenizer(WORLDS[0])
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(warmup, "learn", lambda *given: None)
    monkeypatch.setattr(warmup, "share_right", lambda *_: 0.5)
    teach(WORLDS[0], models.build(words, hidden=32, layers=1), words, Schooling(early_steps=3, late_steps=2), seed=0)
    shown = terminal.getvalue()
    assert re.search(rf"teaching {WORLDS[0].name}, slips 30% .*3/3", shown)
    assert re.search(rf"teaching {WORLDS[0].name}, slips 100% .*2/2", shown)
