"""Counts experiences by triggers, since counting rows takes time in proportion to the rows.

A PostgreSQL transaction inserts its differences, so that no transaction waits for another; `FOLD` sums them. SQLite has
one writer, and updates the counts in place.
"""

from sqlalchemy import Connection, text

#: What the numbers are of, and what a row `r` of `experiences` adds to each: a reward 1e100 at most, so that no sum is
#: infinite.
_KEY = {"tenant": "r.tenant", "version": "r.version_min", "state": "r.state", "corrects": "(r.correction > 0)"}
_KEYS = ", ".join(_KEY)
_ADDED = {
    "rows": "1",
    "rewarded": "(CASE WHEN r.rewarded_at IS NULL THEN 0 ELSE 1 END)",
    "reward_sum": "least(greatest(coalesce(r.reward, r.edit_similarity, 0.0), -1e100), 1e100)",
}
_COLUMNS = f"{_KEYS}, {', '.join(_ADDED)}"
_SUMS = ", ".join(f"sum({name})" for name in _ADDED)
_SOME = "sum(rows) <> 0 OR sum(rewarded) <> 0"

#: Sums the differences of the keys that have many.
FOLD = text(
    f"WITH many AS (SELECT {_KEYS} FROM experience_counts GROUP BY {_KEYS} HAVING count(*) > 8),"
    f" gone AS (DELETE FROM experience_counts WHERE ({_KEYS}) IN (SELECT {_KEYS} FROM many) RETURNING {_COLUMNS})"
    f" INSERT INTO experience_counts ({_COLUMNS}) SELECT {_KEYS}, {_SUMS} FROM gone GROUP BY {_KEYS} HAVING {_SOME}"
)


def keep_counts(connection: Connection) -> None:
    """Count the existing rows, and create the triggers that count changes."""
    is_sqlite = connection.dialect.name == "sqlite"
    for statement in _sqlite_triggers() if is_sqlite else _postgresql_triggers():
        connection.exec_driver_sql(statement)
    counted = f"INSERT INTO experience_counts ({_COLUMNS}) {_sum_of([_select('experiences', '+')])}"
    connection.exec_driver_sql(_for_sqlite(counted) if is_sqlite else counted)


def _for_sqlite(words: str) -> str:
    return words.replace("least(", "min(").replace("greatest(", "max(")


def _select(rows: str, sign: str) -> str:
    columns = [f"{each} AS {name}" for name, each in _KEY.items()]
    columns += [f"{sign}{each} AS {name}" for name, each in _ADDED.items()]
    return f"SELECT {', '.join(columns)} FROM {rows} r"


def _sum_of(parts: list[str]) -> str:
    some = f"{_SOME} OR sum(reward_sum) <> 0"
    return f"SELECT {_KEYS}, {_SUMS} FROM ({' UNION ALL '.join(parts)}) AS changes GROUP BY {_KEYS} HAVING {some}"


def _sqlite_triggers() -> list[str]:
    def add(row: str, sign: str) -> str:
        changes = ", ".join(f"{name} = {name} {sign} {each}" for name, each in _ADDED.items())
        same = " AND ".join(f"{name} = {each}" for name, each in _KEY.items())
        values = ", ".join([*_KEY.values(), *_ADDED.values()])
        new = f" INSERT INTO experience_counts ({_COLUMNS}) SELECT {values} WHERE changes() = 0;" if sign == "+" else ""
        return _for_sqlite(f"UPDATE experience_counts SET {changes} WHERE {same};{new}").replace("r.", f"{row}.")

    counted = "tenant, version_min, state, correction, reward, edit_similarity, rewarded_at"
    bodies = {
        "INSERT": add("NEW", "+"),
        "DELETE": add("OLD", "-"),
        f"UPDATE OF {counted}": f"{add('OLD', '-')} {add('NEW', '+')}",
    }
    return [
        f"CREATE TRIGGER count_{when[:6].lower()} AFTER {when} ON experiences BEGIN {body} END"
        for when, body in bodies.items()
    ]


def _postgresql_triggers() -> list[str]:
    new, old = _select("new_rows", "+"), _select("old_rows", "-")
    changes = {"INSERT": [new], "DELETE": [old], "UPDATE": [new, old]}
    cases = " ".join(
        f"IF TG_OP = '{when}' THEN INSERT INTO experience_counts ({_COLUMNS}) {_sum_of(parts)}; END IF;"
        for when, parts in changes.items()
    )
    seen = {new: "NEW TABLE AS new_rows", old: "OLD TABLE AS old_rows"}
    return [
        "CREATE OR REPLACE FUNCTION count_experiences() RETURNS trigger LANGUAGE plpgsql"
        f" AS $$ BEGIN {cases} RETURN NULL; END $$",
        *(
            f"CREATE TRIGGER count_{when.lower()} AFTER {when} ON experiences"
            f" REFERENCING {' '.join(seen[part] for part in parts)}"
            " FOR EACH STATEMENT EXECUTE FUNCTION count_experiences()"
            for when, parts in changes.items()
        ),
    ]
