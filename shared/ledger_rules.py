"""The rules that rewards were made by, as the ledger keeps them."""

from collections import defaultdict
from collections.abc import Collection

from sqlalchemy import Connection, func, select

from shared.config import RewardRule
from shared.ledger_transactions import ignoring, portions
from shared.reward import rule_of
from shared.schema import experiences, reward_rules

#: The rule of a call of which nothing was said itself: it has the reward of its run's last one.
OF_ITS_RESULT = '{"of":"the last call of its run"}'


def id_of_rule(connection: Connection, definition: str, *, now: float) -> int:
    """The number of the rule, which is written down if it is new."""
    same = select(reward_rules.c.id).where(reward_rules.c.definition == definition)
    if (found := connection.execute(same).scalar()) is None:
        connection.execute(ignoring(connection, reward_rules), {"definition": definition, "created_at": now})
        found = connection.execute(same).scalar_one()
    return int(found)


def rules_of(connection: Connection, msg_ids: Collection[str]) -> dict[int, tuple[RewardRule, list[str]]]:
    """The rewarded ones of the replies by the rule that made their rewards.

    Those that have the reward of their run's result come under the newest rule: something was said of them since.
    """
    by_rule: defaultdict[int, list[str]] = defaultdict(list)
    for portion in portions(msg_ids):
        query = select(experiences.c.msg_id, func.max(experiences.c.reward_rule)).group_by(experiences.c.msg_id)
        rewarded = query.where(experiences.c.msg_id.in_(portion), experiences.c.reward_rule.is_not(None))
        for msg_id, rule in connection.execute(rewarded):
            by_rule[rule].append(msg_id)
    if not by_rule:
        return {}
    known = {row.id: row.definition for row in connection.execute(select(reward_rules))}
    newest = max((number for number, words in known.items() if words != OF_ITS_RESULT), default=None)
    found: dict[int, tuple[RewardRule, list[str]]] = {}
    for number, replies in by_rule.items():
        chosen = newest if known[number] == OF_ITS_RESULT else number
        if chosen is not None:
            found.setdefault(chosen, (rule_of(known[chosen]), []))[1].extend(replies)
    return found
