"""The worlds of the examples: tasks that have answers, teachers that are right, and models that can be taught."""

import random
from itertools import islice

from examples.email_search import world as mails
from examples.json_format import world as capitals
from examples.math_agent import world as sums
from examples.tasks.dialogue import Task, Verdict, forever
from examples.werewolf import world as wolves

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


def test_no_question_about_mails_is_both_learnt_from_and_held_out() -> None:
    learnt, held_out = ({each["question"] for each in mails.questions(held_out=which)} for which in (False, True))
    assert len(held_out) > 25
    assert not learnt & held_out


def test_no_question_about_capitals_is_both_learnt_from_and_held_out() -> None:
    learnt, held_out = ({each["question"] for each in capitals.questions(held_out=which)} for which in (False, True))
    assert (len(learnt), len(held_out)) == (72, 24)
    assert not learnt & held_out
