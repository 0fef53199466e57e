"""The virtual clock of `offbeat.testing`, under the name that tests know."""

from offbeat.testing.clock import run

__all__ = ["run"]
