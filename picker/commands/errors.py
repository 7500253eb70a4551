"""What commands say no with, and their exit codes."""

from __future__ import annotations

import click


class BadConfig(click.ClickException):
    """A configuration that cannot be used."""

    exit_code = 2


class CheckFailed(click.ClickException):
    """What --check says no with."""

    exit_code = 3
