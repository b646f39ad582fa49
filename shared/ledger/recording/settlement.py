"""Feedback becomes rewards under a rule, within the transaction of the verb that recorded it."""

from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

from sqlalchemy import Connection, bindparam, func, select, update

from tuneloop.shared import steady_time
from tuneloop.shared.experience import State
from tuneloop.shared.ledger.recording.outcomes import too_late_for
from tuneloop.shared.ledger.recording.reward_rule import definition, rule_of
from tuneloop.shared.ledger.recording.rewards import Plan, plan, write
from tuneloop.shared.ledger.storage.schema import experiences, reward_rules
from tuneloop.shared.ledger.storage.transactions import ignoring, portions
from tuneloop.shared.settings.feedback import RewardRule, TrustedRaters


class Settlement:
    """The reward rule of a ledger, and whose words settle a metric.

    `compensate_late` repeats trained rows whose reward changes afterwards.
    """

    def __init__(
        self,
        rule: RewardRule | None = None,
        *,
        trusted_raters: TrustedRaters | None = None,
        compensate_late: bool = False,
        clock: Callable[[], float] = steady_time.now,
    ) -> None:
        self.rule = rule or RewardRule()
        self.trusted_raters = trusted_raters or TrustedRaters()
        self.compensate_late = compensate_late
        self._clock = clock

    def settle(self, connection: Connection, msg_ids: Collection[str]) -> Plan:
        """Let the feedback about these replies make their rewards, whichever of the two came first."""
        decided = self.plan(connection, msg_ids)
        if any(decided):
            write(connection, decided, self.rule_id(connection), repeat=self.compensate_late)
        return decided

    def settle_corrected(self, connection: Connection, msg_ids: Collection[str]) -> None:
        """Let those of the replies that were corrected while they were leased take their rewards now.

        Each under the rule that made its reward: a trainer's settings need not name it.
        """
        for rule_id, (rule, replies) in rules_of(connection, too_late_for(connection, msg_ids)).items():
            decided = self.plan(connection, replies, rule)
            if any(decided):
                write(connection, decided, rule_id, repeat=self.compensate_late)

    def recompute(self, connection: Connection, msg_ids: Collection[str]) -> Plan:
        """Recompute the rewards of these replies, without repeating what was trained on."""
        decided = self.plan(connection, msg_ids)
        write(connection, decided._replace(repeats=[]), self.rule_id(connection), repeat=False)
        return decided

    def plan(self, connection: Connection, msg_ids: Collection[str], rule: RewardRule | None = None) -> Plan:
        """The changes to these replies by all the feedback about them, under the rule given or else the present one."""
        return plan(connection, msg_ids, rule or self.rule, trusted=self.trusted_raters, now=self._clock())

    def rule_id(self, connection: Connection) -> int:
        """The id of the rule in the ledger, which is put there if need be."""
        return id_of_rule(connection, definition(self.rule), now=self._clock())

    def release(self, connection: Connection, which: Any) -> None:
        """End leases. What was corrected meanwhile takes its reward now."""
        leased = select(experiences.c.id, experiences.c.msg_id).where(experiences.c.state == State.LEASED, which)
        rows = connection.execute(leased.order_by(experiences.c.id).with_for_update()).all()
        back = {"state": State.COMMITTED, "lease_epoch": None, "lease_until": None}
        for portion in portions([row.id for row in rows]):
            connection.execute(update(experiences).where(experiences.c.id.in_(portion)).values(back))
        self.settle_corrected(connection, {row.msg_id for row in rows})


#: The rule of a call without feedback of its own: it has the reward of its run's last one.
OF_ITS_RESULT = '{"of":"the last call of its run"}'

_RULE_OF = select(reward_rules.c.id).where(reward_rules.c.definition == bindparam("its_definition"))


def id_of_rule(connection: Connection, definition: str, *, now: float) -> int:
    """The number of the rule, which is stored if it is new."""
    same = {"its_definition": definition}
    if (found := connection.execute(_RULE_OF, same).scalar()) is None:
        connection.execute(ignoring(connection, reward_rules), {"definition": definition, "created_at": now})
        found = connection.execute(_RULE_OF, same).scalar_one()
    return int(found)


def rules_of(connection: Connection, msg_ids: Collection[str]) -> dict[int, tuple[RewardRule, list[str]]]:
    """The rewarded ones of the replies by the rule that made their rewards.

    Those that have the reward of their run's result come under the newest rule: they have feedback since.
    """
    by_rule: defaultdict[int, list[str]] = defaultdict(list)
    for portion in portions(msg_ids):
        query = select(experiences.c.msg_id, func.max(experiences.c.reward_rule)).group_by(experiences.c.msg_id)
        of_these = query.where(experiences.c.msg_id.in_(portion), experiences.c.reward_rule.is_not(None))
        for msg_id, rule in connection.execute(of_these):
            by_rule[rule].append(msg_id)
    if not by_rule:
        return {}
    definitions = {row.id: row.definition for row in connection.execute(select(reward_rules))}
    newest = max((number for number, definition in definitions.items() if definition != OF_ITS_RESULT), default=None)
    found: dict[int, tuple[RewardRule, list[str]]] = {}
    for number, replies in by_rule.items():
        chosen = newest if definitions[number] == OF_ITS_RESULT else number
        if chosen is not None:
            found.setdefault(chosen, (rule_of(definitions[chosen]), []))[1].extend(replies)
    return found
