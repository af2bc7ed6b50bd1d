"""A run's numbers for Weights & Biases."""

import importlib
import secrets
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.config import Config, UserError, config_to_dict
from jaxmoe.config.whole_file import write_whole
from jaxmoe.runtime.metrics_file import Kind
from jaxmoe.runtime.sink import PerLayer, Scalars, flat_values


def require_wandb(config: Config) -> None:
    """Fail at start, before any work, when the run asks for W&B and the package is missing.

    Raises:
        UserError: `logging.wandb` is set and `wandb` cannot be imported.
    """
    if config.logging.wandb:
        import_wandb()


def import_wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise UserError(
            f"logging.wandb=true: needs the package wandb, which cannot be imported ({error}); "
            "pip install 'jaxmoe[wandb]', or set logging.wandb=false"
        ) from error


class WandbSink:
    """One W&B run per run folder; a resumed run goes on in it."""

    name = "wandb"

    def __init__(self, config: Config, run_dir: Path) -> None:
        wandb = import_wandb()
        self.errors: tuple[type[Exception], ...] = (OSError, wandb.Error)
        id_file = run_dir / "wandb_id"
        run_id = id_file.read_text().strip() if id_file.exists() else secrets.token_hex(8)
        try:
            self._run = wandb.init(
                project=config.logging.wandb_project,
                name=run_dir.resolve().name,
                id=run_id,
                resume="allow",
                dir=str(run_dir),
                config=config_to_dict(config),
            )
        except wandb.UsageError as error:
            raise UserError(
                f"logging.wandb=true: W&B refuses to start: {error}; run `wandb login`, or set WANDB_MODE=offline, "
                "or set logging.wandb=false"
            ) from error
        write_whole(id_file, run_id + "\n")
        # Steps as a metric of ours: W&B's own counter cannot go back when a run resumes from an older checkpoint.
        self._run.define_metric("*", step_metric="step")

    def write(
        self, step: int, scalars: Scalars, per_layer: PerLayer, counts: np.ndarray | None = None, kind: Kind = "train"
    ) -> None:
        self._run.log({"step": step, **flat_values(scalars, per_layer, kind)})

    def close(self) -> None:
        self._run.finish()
