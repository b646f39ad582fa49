"""Which exchanges become tasks: filters, each a function of an exchange, that compose. Pure."""

import re
from collections.abc import Callable

from tuneloop.runner.logs.exchange import LoggedExchange
from tuneloop.runner.rewards.reply import text_of

#: Whether an exchange is kept.
ExchangeFilter = Callable[[LoggedExchange], bool]


def all_of(*filters: ExchangeFilter) -> ExchangeFilter:
    """Those that every filter keeps."""
    return lambda exchange: all(each(exchange) for each in filters)


def any_of(*filters: ExchangeFilter) -> ExchangeFilter:
    """Those that some filter keeps."""
    return lambda exchange: any(each(exchange) for each in filters)


def none_of(*filters: ExchangeFilter) -> ExchangeFilter:
    """Those that no filter keeps."""
    return lambda exchange: not any(each(exchange) for each in filters)


def with_reward(least: float = float("-inf"), most: float = float("inf")) -> ExchangeFilter:
    """Those with a reward, from `least` to `most`."""
    return lambda exchange: exchange.reward is not None and least <= exchange.reward <= most


def between(since: float = float("-inf"), until: float = float("inf")) -> ExchangeFilter:
    """Those of that time, in seconds since 1970; `until` is no part of it. One without a time is of none."""
    return lambda exchange: exchange.at is not None and since <= exchange.at < until


def by_model(*names: str) -> ExchangeFilter:
    """Those that asked one of these models, of whatever version: `tiny` is also `tiny@3`."""
    return lambda exchange: exchange.model is not None and exchange.model.partition("@")[0] in names


def by_user(*names: str) -> ExchangeFilter:
    """Those of one of these users."""
    return lambda exchange: exchange.user in names


def asks(pattern: str) -> ExchangeFilter:
    """Those in whose last question the regular expression is found."""
    compiled = re.compile(pattern, re.IGNORECASE)
    return lambda exchange: compiled.search(_question(exchange)) is not None


def question_length(least: int = 1, most: int = 100_000) -> ExchangeFilter:
    """Those whose last question has so many characters."""
    return lambda exchange: least <= len(_question(exchange)) <= most


def turns(most: int) -> ExchangeFilter:
    """Those in which a user has said something so many times at most: 1 is how a conversation begins."""
    return lambda exchange: sum(each["role"] == "user" for each in exchange.messages) <= most


def offers_tools(*names: str) -> ExchangeFilter:
    """Those that were offered tools, or these tools."""

    def keeps(exchange: LoggedExchange) -> bool:
        offered = {str((each.get("function") or each).get("name")) for each in exchange.tools}
        return bool(offered) and offered.issuperset(names)

    return keeps


def _question(exchange: LoggedExchange) -> str:
    questions = [text_of(each["content"]) for each in exchange.messages if each["role"] == "user"]
    return questions[-1].strip() if questions else ""
