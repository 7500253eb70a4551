"""What commands say no with, and their exit codes."""

from __future__ import annotations

import click


class BadConfig(click.ClickException):
    """A configuration that cannot be used."""

    exit_code = 2


class CheckFailed(click.ClickException):
    """What --check says no with."""

    exit_code = 3


class NotFound(click.ClickException):
    """What was named is not there."""

    exit_code = 3


class Conflicting(click.ClickException):
    """Somebody else has changed it meanwhile."""

    exit_code = 4


class Unreachable(click.ClickException):
    """The store, or who asks it for us, does not answer."""

    exit_code = 5
