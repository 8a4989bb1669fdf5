"""Statements that every lease runs, put together once and then given to the driver as they are.

SQLAlchemy takes some 50 microseconds of Python's lock for a statement that SQLite answers in
five; a hub that starts a server runs a dozen of them beside its event loop. So the few hot ones
are written as Core expressions like all others, compiled once for each dialect by SQLAlchemy
itself, and executed on the cursor of the connection's own driver, in the connection's own
transaction. Values are converted by the columns' types both ways, and what the driver says
becomes SQLAlchemy's errors, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DBAPIError

Convert = Callable[[Any], Any]
"""A value from Python to the driver, or back."""


class Prepared:
    """One statement. Immutable but for what it remembers; thread-safe."""

    def __init__(self, statement: Any, columns: Sequence[str] | None = None) -> None:
        """``columns`` are those that an INSERT or UPDATE sets; each is a parameter of its name."""
        # Without inline() an INSERT would ask for the new row's id, which nobody reads.
        self.statement = statement.inline() if isinstance(statement, sa.Insert) else statement
        self.columns = columns
        self._plans: dict[type[Dialect], _Plan] = {}

    def rows(self, connection: sa.Connection, **values: Any) -> list[tuple[Any, ...]]:
        """What a SELECT finds, or what others return, all of it."""
        plan = self._plans.get(connection.dialect.__class__) or self._plan(connection)
        parameters = plan.parameters(values) if plan.changes else plan.pick(values)
        cursor = None
        try:
            cursor = plan.execute(connection.connection.dbapi_connection, plan.text, parameters)
            found: list[tuple[Any, ...]] = cursor.fetchall()
            convert = plan.conversions(cursor.description)
        except plan.error as error:
            raise said(error, connection, plan.text) from error
        finally:
            if cursor is not None:
                cursor.close()
        return [_converted(row, convert) for row in found] if convert else found

    def run(self, connection: sa.Connection, **values: Any) -> int:
        """The number of rows that an INSERT, UPDATE or DELETE wrote."""
        plan = self._plans.get(connection.dialect.__class__) or self._plan(connection)
        parameters = plan.parameters(values) if plan.changes else plan.pick(values)
        driver = connection.connection.dbapi_connection
        try:
            count: int = plan.execute(driver, plan.text, parameters).rowcount
            return count
        except plan.error as error:
            raise said(error, connection, plan.text) from error

    def run_each(self, connection: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        """The statement once for each of the rows."""
        plan = self._plans.get(connection.dialect.__class__) or self._plan(connection)
        parameters = [plan.parameters(row) for row in rows]
        cursor = connection.connection.cursor()
        try:
            cursor.executemany(plan.text, parameters)
        except plan.error as error:
            raise said(error, connection, plan.text) from error
        finally:
            cursor.close()

    def _plan(self, connection: sa.Connection) -> _Plan:
        dialect = connection.dialect
        plan = self._plans.get(type(dialect))
        if plan is None:
            plan = self._plans[type(dialect)] = _compile(self.statement, self.columns, dialect)
        return plan


@dataclass(slots=True)
class _Plan:
    """A statement as one driver wants it."""

    text: str
    execute: Callable[..., Any]
    """Runs a text with its parameters on the driver's connection; the cursor."""
    changes: bool
    """Whether parameters are more than what is picked: converted, or set by the statement."""
    pick: Callable[[Mapping[str, Any]], Any]
    """From values by name the parameters as the driver wants them: in their order, or by name."""
    copy: type
    """What of those can be written to."""
    converts: Sequence[tuple[Any, Convert]]
    """Where among them something is converted, and how."""
    constants: dict[str, Any]
    """Parameters that the statement itself sets, as the driver takes them."""
    error: type[Exception]
    """What the driver raises."""
    from_driver: Callable[[Any], list[tuple[int, Convert]]]
    """From a cursor's description, the columns that are converted and how."""
    known: list[tuple[int, Convert]] | None = None
    """The answer of ``from_driver``, which is the same for every row."""

    def parameters(self, values: Mapping[str, Any]) -> Any:
        """Raises KeyError when one is missing."""
        given = self.pick({**self.constants, **values} if self.constants else values)
        if self.converts:
            given = self.copy(given)
            for at, convert in self.converts:
                given[at] = convert(given[at])
        return given

    def conversions(self, description: Any) -> list[tuple[int, Convert]]:
        if self.known is None:
            self.known = self.from_driver(description)
        return self.known


def _compile(statement: Any, columns: Sequence[str] | None, dialect: Dialect) -> _Plan:
    compiled = statement.compile(
        dialect=dialect, column_keys=columns, compile_kwargs={"render_postcompile": True}
    )
    # Columns that are not set have their default from Python, and not from the database.
    defaults = {column.key: column for column in compiled.insert_prefetch}
    plain = all(column.default.is_scalar for column in defaults.values())
    if compiled.update_prefetch or not plain:
        raise TypeError(f"this depends on the values of each row: {statement}")
    converts: dict[str, Convert | None] = {}
    constants: dict[str, Any] = {}
    for name, bind in compiled.binds.items():
        convert = bind.type.dialect_impl(dialect).bind_processor(dialect)
        if name in defaults or not bind.required:
            value = defaults[name].default.arg if name in defaults else bind.value
            constants[name] = convert(value) if convert else value
        converts[name] = None if name in constants else convert

    def from_driver(description: Any) -> list[tuple[int, Convert]]:
        types = [column.type.dialect_impl(dialect) for column in statement.exported_columns]
        found = [
            (at, type_.result_processor(dialect, described[1]))
            for at, (type_, described) in enumerate(zip(types, description, strict=True))
        ]
        return [(at, convert) for at, convert in found if convert]

    names = compiled.positiontup if compiled.positional else list(compiled.binds)
    places = enumerate(names) if compiled.positional else zip(names, names, strict=True)
    driver: Any = dialect.dbapi
    return _Plan(
        text=str(compiled),
        execute=_execute_sqlite if dialect.name == "sqlite" else _execute,
        changes=bool(constants) or any(converts.values()),
        pick=_in_order(names) if compiled.positional else _by_name,
        copy=list if compiled.positional else dict,
        converts=[(at, to) for at, name in places if (to := converts[name])],
        constants=constants,
        error=driver.Error,
        from_driver=from_driver,
    )


def _in_order(names: Sequence[str]) -> Callable[[Mapping[str, Any]], Any]:
    if len(names) > 1:
        return itemgetter(*names)
    if names:  # of one, itemgetter gives the value itself
        (only,) = names
        return lambda values: (values[only],)
    return lambda values: ()


def _by_name(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return values


def _execute_sqlite(driver: Any, text: str, parameters: Any) -> Any:
    return driver.execute(text, parameters)  # makes the cursor in the same call


def _execute(driver: Any, text: str, parameters: Any) -> Any:
    cursor = driver.cursor()
    cursor.execute(text, parameters)
    return cursor


def write_plain(connection: sa.Connection, text: str, values: Sequence[Any]) -> int:
    """The number of rows that a statement wrote, on SQLite, with nothing in between: its own
    text, and the values as its driver has them. For what is written all the time."""
    driver: Any = connection.connection.dbapi_connection
    try:
        count: int = driver.execute(text, values).rowcount
        return count
    except driver.Error as error:
        raise said(error, connection, text) from error


def commit(connection: sa.Connection) -> None:
    """Commit what was done on the connection, through SQLAlchemy or beside it.

    Raises DBAPIError, also when the connection was lost on the way.
    """
    if connection.in_transaction():
        try:
            connection.commit()
        except BaseException:
            connection.invalidate()  # SQLAlchemy would not roll back what it took for ended
            raise
        return
    driver: Any = connection.connection.dbapi_connection
    try:
        driver.commit()
    except driver.Error as error:
        raise said(error, connection, "COMMIT") from error


def said(error: Any, connection: sa.Connection, text: str) -> DBAPIError:
    """What the driver said, as SQLAlchemy says it."""
    driver: Any = connection.dialect.dbapi
    gone = connection.dialect.is_disconnect(error, connection.connection, None)
    if gone:
        connection.invalidate(error)
        connection.close()  # else it would go on with another one, outside of any transaction
    found: Any = DBAPIError.instance(
        text,
        None,
        error,
        driver.Error,
        connection_invalidated=gone,
        dialect=connection.dialect,
    )
    return found


def _converted(row: tuple[Any, ...], conversions: list[tuple[int, Convert]]) -> tuple[Any, ...]:
    changed = list(row)
    for at, convert in conversions:
        changed[at] = convert(changed[at])
    return tuple(changed)
