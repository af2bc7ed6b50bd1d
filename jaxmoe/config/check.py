"""Rules between fields. Every rule only looks and returns problems; nothing is changed. Does not import jax."""

from jaxmoe.config.errors import Problem
from jaxmoe.config.schema import Config


def check(config: Config) -> list[Problem]:
    return []


def check_files(config: Config) -> list[Problem]:
    return []
