"""The exception tree: `UserError` is the user's to mend (exit code 2), the rest is exit code 1."""

from __future__ import annotations


class OffbeatError(Exception):
    """Base of everything that Offbeat raises on purpose."""


class UserError(OffbeatError):
    """Bad input: one sentence that names the file, line or setting, and the mend. Exit code 2."""


class RunFailed(OffbeatError):
    """The run cannot go on: says what failed and the last good step. Exit code 1."""


class RoleDied(RunFailed):
    """A role's process has ended, or does not answer; it can be started again within a budget."""

    def __init__(self, role: str, said: str) -> None:
        super().__init__(said)
        self.role = role

    def __reduce__(self) -> tuple[type[RoleDied], tuple[str, str]]:
        return RoleDied, (self.role, str(self))


class RewardsDown(RunFailed):
    """A reward source was down or failing for longer than its patience. Exit code 1."""


class RequestRefused(OffbeatError):
    """An engine refuses one request (too long for its context); all others go on."""


class DeadlinePassed(OffbeatError):
    """A wait passed its deadline; the message says whom it waited for."""


def first_of(error: BaseException) -> BaseException:
    """The first exception of a possibly nested group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
