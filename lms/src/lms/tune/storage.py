"""The database of a study: which kinds serve, how it is opened, and patience while it is away."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from inspect import isfunction
from itertools import count
from typing import Any

import optuna
import sqlalchemy
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial
from sqlalchemy.exc import DBAPIError, InterfaceError, InternalError, OperationalError, PendingRollbackError

from lms.console import say
from lms.errors import LMSError, UsageError
from lms.stats import format_seconds

# Errors that waiting does not help against. Drivers have no code for a connection that was refused, so we read what
# SQLite, PostgreSQL and MySQL say.
_FINAL = re.compile(
    r"authentication failed|no password supplied|access denied|no pg_hba\.conf entry|permission denied|"
    r"no such (?:table|column)|does not exist|doesn't exist|unknown database|readonly|read-only",
    re.IGNORECASE,
)
_WANTED = "expected a database, such as sqlite:///search.db or postgresql+psycopg://user@host/base"
_PAUSE = 1.0  # seconds between tries
_NEWS = 60.0  # seconds between two words about a database that is away
_NO_FILE = "unable to open database file"  # if SQLite says so at once, the folder is not there
_SILENT = 5.0  # seconds before a word about a database that does not open: workers that create the tables collide


def check_url(url: str) -> None:
    """Refuse a database without heartbeats, or one that no other process sees. Raises UsageError."""
    scheme = url.partition("://")[0]
    if "journal" in scheme.lower() or scheme.startswith("redis"):
        raise UsageError(
            f"--storage={shown(url)!r}: Optuna's journal has no heartbeats, so a trial whose worker was killed would "
            f"stay RUNNING in it for ever; {_WANTED}"
        )
    if url in ("sqlite://", "sqlite:///") or ":memory:" in url:
        raise UsageError(f"--storage={url!r}: it would end with this process; {_WANTED}")


class Storage(RDBStorage):
    """Optuna's storage in a database. Whoever calls its methods waits while the database is away.

    They raise LMSError for an error of the database that waiting does not help against.
    """

    patient = True  # False: they raise LMSError instead of waiting

    def _get_stale_trial_ids(self, study_id: int) -> list[int]:
        """Trials without a heartbeat for long; none if the database was away now, as nobody could write one then."""
        began = time.monotonic()
        with suppress(StorageInternalError):
            found = super()._get_stale_trial_ids(study_id)
            if time.monotonic() - began < (self.grace_period or 0) / 2:
                return found
        return []


def _patiently(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def patiently(self: Storage, *args: Any, **keywords: Any) -> Any:
        began = said = 0.0
        while True:
            try:
                result = method(self, *args, **keywords)
            except StorageInternalError as error:
                cause = _cause(error)
                if not self.patient or not _passes(cause):
                    raise LMSError(
                        f"--storage={shown(self.url)!r}: {_reason(cause)}. The search cannot go on; when the "
                        "database is right, start the same command again: it goes on where it ended"
                    ) from None
                now = time.monotonic()
                began = began or now
                if not said or now - said > _NEWS:
                    said = now
                    say(f"the database does not answer ({_reason(cause)}); waiting for it")
                time.sleep(_PAUSE)
            else:
                if began:
                    say(f"the database answers again, after {format_seconds(time.monotonic() - began)}")
                return result

    return patiently


for _name, _method in vars(RDBStorage).items():
    if isfunction(_method) and not _name.startswith("__") and _name not in vars(Storage):
        setattr(Storage, _name, _patiently(_method))


def opened(
    url: str, heartbeat: int, grace: int, lost: Callable[[optuna.Study, FrozenTrial], None], *, patience: float
) -> Storage:
    """The database at `url`, with its tables. It may be away: we wait for `patience` seconds. The rest is RDBStorage's.

    Raises UsageError, LMSError.
    """
    check_url(url)
    sqlite = url.startswith("sqlite")
    settings: dict[str, Any] = {"connect_args": {"timeout": 5}} if sqlite else {"pool_pre_ping": True}
    begin, said = time.monotonic(), False
    for done in count(1):
        try:
            storage = Storage(
                url,
                settings,
                heartbeat_interval=heartbeat,
                grace_period=grace,
                heartbeat_stale_trial_callback=lost,
            )
            break
        except ImportError as error:
            driver = _reason(error.__cause__ or error)
            raise UsageError(
                f"--storage={shown(url)!r}: the database's driver cannot be loaded ({driver}); install it, or for "
                "PostgreSQL `pip install 'psycopg[binary]'` and give a URL that begins with postgresql+psycopg://"
            ) from None
        except (sqlalchemy.exc.ArgumentError, sqlalchemy.exc.NoSuchModuleError) as error:
            raise UsageError(f"--storage={shown(url)!r}: {_reason(error)}; {_WANTED}") from None
        except (StorageInternalError, DBAPIError) as error:
            cause = _cause(error)
            waited = time.monotonic() - begin
            missing = _NO_FILE in str(cause) and done == 1 and patience < math.inf
            if waited >= patience or _is_final(cause) or missing:
                raise LMSError(f"--storage={shown(url)!r}: it cannot be opened: {_reason(cause)}") from None
            if waited >= _SILENT and not said:
                said = True
                say(f"the database does not answer ({_reason(cause)}); waiting for it")
            time.sleep(_PAUSE)
    if sqlite:
        # Python's driver begins a transaction at its first write. Two workers would both read that a trial is free.
        sqlalchemy.event.listen(storage.engine, "connect", _no_implicit_begin)
        sqlalchemy.event.listen(storage.engine, "begin", _begin_immediate)
        storage.engine.dispose()
    return storage


def shown(url: str) -> str:
    """The URL for a person, without its password."""
    try:
        return sqlalchemy.engine.make_url(url).render_as_string()
    except sqlalchemy.exc.ArgumentError:
        scheme, colon, _ = url.partition("://")
        return f"{scheme}://..." if colon else url


def _no_implicit_begin(connection: Any, _: object) -> None:
    connection.isolation_level = None


def _begin_immediate(connection: Any) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _cause(error: Exception) -> BaseException:
    """The database error behind Optuna's `error`."""
    cause = error.__cause__ or error if isinstance(error, StorageInternalError) else error
    # If its query for all trials fails, Optuna assumes too many variables, and repeats it in the transaction that has
    # failed. The second error says no more than that.
    first = getattr(cause, "orig", cause).__context__
    if isinstance(cause, InternalError | PendingRollbackError) and isinstance(first, DBAPIError):
        return first
    return cause


def _passes(error: BaseException) -> bool:
    """Whether the database may be able to do later what it could not do now."""
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    return (lost or isinstance(error, OperationalError | InterfaceError)) and not _is_final(error)


def _is_final(error: BaseException) -> bool:
    return _FINAL.search(str(getattr(error, "orig", error))) is not None


def _reason(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
