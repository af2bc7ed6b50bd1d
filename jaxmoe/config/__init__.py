"""The configuration: schema, loading, rules. Does not import jax."""

from jaxmoe.config.errors import ConfigError, Problem, UserError, fail_on_user_error
from jaxmoe.config.load import check_once, config_from_dict, config_to_dict, load_config, save_config
from jaxmoe.config.schema import Config

__all__ = [
    "Config",
    "ConfigError",
    "Problem",
    "UserError",
    "check_once",
    "config_from_dict",
    "config_to_dict",
    "fail_on_user_error",
    "load_config",
    "save_config",
]
