"""Werewolf for six: at night the wolves kill, by day each player accuses another, then all vote one player out.

The wolves, two of six, are played by the model; the villagers follow a script: each of them suspects somebody, a wolf
more often than chance would have it, says so, and votes for whom most have accused. Or a model says whom a villager
accuses. The wolves win as soon as they are no fewer than the villagers; the villagers win when no wolf is left.
"""

import random
import re
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from examples.tasks.dialogue import Dialogue, Message, Reply, Tool, Verdict
from tuneloop.runner import Reply as Judged
from tuneloop.runner.rewards.components import game_reward

PLAYERS = ("Ana", "Ben", "Cora", "Dan", "Eva", "Finn")
WOLVES = 2
#: How often a villager suspects a wolf, instead of anybody.
HUNCH = 0.41
REWARD = game_reward()
#: How often the start model's teacher slips, and how often a slip betrays the other wolf instead of naming anybody.
_SLIPS, _BETRAYALS = 0.6, 0.7

#: (the player who is asked, its conversation so far) -> whom it names.
Turn = tuple[str, list[Message]]


class Game:
    """One game; `task` has its seed and its wolves. With `scripted=False` villagers are asked whom they accuse, too."""

    def __init__(self, task: Mapping[str, Any], *, scripted: bool = True) -> None:
        self.wolves: list[str] = list(task["wolves"])
        self.alive = list(PLAYERS)
        self.villagers_out: set[str] = set()
        self._chance = random.Random(task["seed"])
        self._hunches: dict[str, str] = {}
        asked = self.wolves if scripted else PLAYERS
        self._news = {each: [f"You are {each}, {self._role(each)}. Players: {', '.join(PLAYERS)}."] for each in asked}
        self._messages: dict[str, list[Message]] = {each: [] for each in asked}
        self._blamed: set[str] = set()
        self.accused: dict[str, str] = {}
        self.slips = 0

    def play(self) -> Generator[Turn, str, None]:
        """Yields the player to move with its messages; receives the reply."""
        self._tell("Evening. " + self._accusations(self._villagers))
        while not self._over:
            victim = yield from self._ask(self._wolves[0], "Whom do you kill?", self._villagers)
            if victim:
                self._remove(victim, "was killed")
            else:
                self._tell("Nobody was killed.")
            if self._over:
                return
            yield from self._day()

    @property
    def won(self) -> bool:
        """Whether the wolves have won."""
        return bool(self._wolves)

    def facts(self) -> dict[str, float]:
        """What `game_reward` reads."""
        return {
            "team_win": float(self.won),
            "individual_survive": len(self._wolves) / WOLVES,
            "successfully_blame": float(bool(self._blamed & self.villagers_out)),
            "exposed_penalty": 1 - len(self._wolves) / WOLVES,
        }

    def hunch(self, villager: str) -> str:
        """The player that a villager suspects, constant while that player lives."""
        if self._hunches.get(villager) not in self.alive:
            others = [each for each in self.alive if each != villager]
            guided = self._chance.random() < HUNCH
            self._hunches[villager] = self._chance.choice(self._wolves if guided else others)
        return self._hunches[villager]

    def best(self, wolf: str) -> str:
        """A villager who accuses a wolf, to be killed; by day, who is accused most but is no wolf."""
        hunches = {villager: self.hunch(villager) for villager in self._villagers}
        if not self.accused:
            return next((each for each, named in hunches.items() if named in self.wolves), self._villagers[0])
        counts = Counter(each for each in self.accused.values() if each not in self.wolves)
        return counts.most_common(1)[0][0] if counts else self._villagers[0]

    def _day(self) -> Generator[Turn, str, None]:
        accused = self.accused = {}
        for villager in self._villagers:
            accused[villager] = yield from self._accuse(villager)
        self._tell("Day. " + " ".join(f"{each} accuses {named}." for each, named in accused.items()))
        for wolf in self._wolves:
            others = [each for each in self.alive if each != wolf]
            if named := (yield from self._ask(wolf, "Whom do you accuse?", others)):
                accused[wolf] = named
                self._blamed.add(named)
                self._tell(f"{wolf} accuses {named}.")
        votes = {villager: self._vote(villager, accused) for villager in self._villagers}
        for wolf in self._wolves:
            others = [each for each in self.alive if each != wolf]
            if named := (yield from self._ask(wolf, "Whom do you vote out?", others)):
                votes[wolf] = named
        counts = Counter(votes.values())
        most = max(counts.values())
        out = self._chance.choice(sorted(each for each, count in counts.items() if count == most))
        if out not in self.wolves:
            self.villagers_out.add(out)
        self.accused = {}
        self._remove(out, "was voted out")

    def _accuse(self, villager: str) -> Generator[Turn, str, str]:
        """The player that a villager accuses: by the script, or by the model if it names a player."""
        named = None
        if villager in self._news:
            others = [each for each in self.alive if each != villager]
            named = yield from self._ask(villager, "Whom do you accuse?", others)
        return named or self.hunch(villager)

    def _vote(self, villager: str, accused: Mapping[str, str]) -> str:
        counts = Counter(each for each in accused.values() if each != villager)
        most = max(counts.values())
        first = [each for each, count in counts.items() if count == most]
        return accused[villager] if accused[villager] in first else self._chance.choice(sorted(first))

    def _ask(self, player: str, question: str, allowed: Sequence[str]) -> Generator[Turn, str, str | None]:
        """The player that is named; None if not one of `allowed`."""
        told = " ".join([*self._news[player], question])
        self._news[player] = []
        self._messages[player].append({"role": "user", "content": told})
        reply = yield player, list(self._messages[player])
        self._messages[player].append({"role": "assistant", "content": reply})
        found = re.findall("[A-Z][a-z]+", reply)
        named = found[0] if found and found[0] in allowed else None
        self.slips += named is None
        return named

    def _remove(self, player: str, how: str) -> None:
        self.alive.remove(player)
        self._tell(f"{player} {how}.")

    def _tell(self, what: str) -> None:
        for player in self._news.keys() & {*self.alive}:
            self._news[player].append(what)

    def _accusations(self, villagers: Sequence[str]) -> str:
        return " ".join(f"{each} accuses {self.hunch(each)}." for each in villagers)

    def _role(self, player: str) -> str:
        return f"a wolf with {self.mate(player)}" if player in self.wolves else "a villager"

    def mate(self, wolf: str) -> str:
        """The other wolf."""
        return next(each for each in self.wolves if each != wolf)

    @property
    def _wolves(self) -> list[str]:
        return [each for each in self.wolves if each in self.alive]

    @property
    def _villagers(self) -> list[str]:
        return [each for each in self.alive if each not in self.wolves]

    @property
    def _over(self) -> bool:
        return not self._wolves or len(self._wolves) >= len(self._villagers)


def games(seed: int, number: int) -> list[dict[str, Any]]:
    """So many games to be played."""
    chance = random.Random(f"games {seed}")
    return [{"seed": chance.randrange(10**9), "wolves": sorted(chance.sample(PLAYERS, WOLVES))} for _ in range(number)]


def judge(game: Game) -> Verdict:
    """The wolves' reward."""
    facts = game.facts()
    score = REWARD(Judged(text="", facts=facts))
    return Verdict(score.total, game.won, {"wins": facts["team_win"], "survival": facts["individual_survive"]})


def judge_villagers(game: Game) -> Verdict:
    """The villagers' reward."""
    left = len(game.alive) - len({*game.alive} & {*game.wolves})
    facts = {
        "team_win": float(not game.won),
        "individual_survive": left / (len(PLAYERS) - WOLVES),
        "successfully_blame": float(not {*game.wolves} <= {*game.alive}),
    }
    return Verdict(REWARD(Judged(text="", facts=facts)).total, not game.won, {"villagers_win": facts["team_win"]})


class Wolves:
    """The games as a task for a model in this process."""

    name = "werewolf"
    scripted = True
    tools: Sequence[Tool] = ()
    max_tokens = 6
    reward_range = (-5.0, 17.0)

    def questions(self) -> Sequence[dict[str, Any]]:
        """The questions for training."""
        return games(0, 4096)

    def dialogue(self, question: Mapping[str, Any]) -> Dialogue:
        """Both wolves are asked, each in a conversation of its own."""
        game = Game(question, scripted=self.scripted)
        turns = game.play()
        try:
            _, messages = next(turns)
            while True:
                reply = yield messages
                _, messages = turns.send(reply.text)
        except StopIteration:
            return judge(game)

    def replies(self, question: Mapping[str, Any], slip: random.Random | None) -> Iterator[Reply]:
        """What a good player would say, turn by turn; a slip names the other wolf, or anybody."""
        game = Game(question, scripted=self.scripted)
        turns = game.play()
        player, _ = next(turns)
        while True:
            wolf = player in game.wolves
            name = game.best(player) if wolf else game.hunch(player)
            if slip and slip.random() < _SLIPS:
                anybody = slip.choice([each for each in PLAYERS if each != player])
                name = game.mate(player) if slip.random() < _BETRAYALS and wolf else anybody
            yield Reply(name)
            try:
                player, _ = turns.send(name)
            except StopIteration:
                return


class Village(Wolves):
    """Games whose villagers are models too, for models that play either side."""

    name = "village"
    scripted = False
