"""config.json of a Hugging Face folder -> a checked config."""

import os
from collections.abc import Sequence

from jaxmoe.config.hf.config import CONFIG_FILE, config_tree
from jaxmoe.config.load import config_from_dict
from jaxmoe.config.schema import Config


def load_hf_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """The config of a Hugging Face folder, both spellings (of released files, and of transformers 5).

    The sections beside `model` have the least that a config needs: set `run`, `batch` and `data` by overrides, or use
    `model.from_hf` in a config file of your own.

    Raises: ConfigError naming every field that would change the numbers and is not understood; UserError where there
        is no config.json.
    """
    return config_from_dict(config_tree(path), overrides, source=f"{os.fspath(path)}/{CONFIG_FILE}")
