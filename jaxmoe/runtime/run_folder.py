"""The folder of a run. Looked at before JAX starts, so that a wrong one is refused at once.

config.yaml     the resolved configuration
run.json        {"starts": [...]}: versions, commit, devices, mesh, seeds, data of every start of the run
tokenizer/      the tokenizer, unless it is that of raw bytes; a run that was converted and not trained has none
metrics.jsonl, tensorboard/     what the sinks write
checkpoints/    see jaxmoe/checkpoint
"""

import datetime
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxmoe.checkpoint.about import check_model
from jaxmoe.checkpoint.folder import FOLDER, saved_steps
from jaxmoe.config import Config, UserError, save_config
from jaxmoe.config.load import read_tree
from jaxmoe.config.whole_file import write_whole
from jaxmoe.interop.save import check_new_folder
from jaxmoe.runtime.metrics_file import METRICS_FILE, Record, iterate_metrics

CONFIG_FILE = "config.yaml"
RUN_FILE = "run.json"
_LOCK_FILE = ".lock"


class RunFolder:
    """The run folder of a config; made when first written to."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @property
    def checkpoints(self) -> Path:
        return self.path / FOLDER

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return saved_steps(self.checkpoints)

    @property
    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint; None for a new run."""
        return max(self.steps, default=None)

    def check(self, config: Config) -> None:
        """Refuses a folder that holds the checkpoints of another model.

        Raises: UserError naming every field that differs.
        """
        if self.latest_step is None:
            return
        file = self.path / CONFIG_FILE
        if not file.exists():
            raise UserError(
                f"run.dir={self.path}: holds checkpoints but no {CONFIG_FILE}, so nobody knows of which model; "
                "choose another run.dir, or put the file back"
            )
        saved = read_tree(file)
        optimizer = saved.get("optimizer", {}).get("kind", config.optimizer.kind)
        check_model(saved.get("model", {}), optimizer, config, f"run.dir={self.path}")

    def check_new(self, apart_from: Sequence[Path] = ()) -> None:
        """Refuses a folder that holds anything, lies in one of `apart_from`, or cannot be made.

        Raises: UserError saying which.
        """
        check_new_folder("run", self.path, apart_from=apart_from, ignored=(_LOCK_FILE,))

    def last_validation(self, step: int) -> Record | None:
        """The validation that was written after `step`; None when there is none."""
        file = self.path / METRICS_FILE
        if not file.exists():
            return None
        records = [found for found in iterate_metrics(file) if isinstance(found, Record)]
        return next((found for found in reversed(records) if found.kind == "eval" and found.step == step), None)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder for this process. A new one in which nothing came to be written is removed again.

        Raises: UserError when another one trains in it, or it cannot be written.
        """
        is_new = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / _LOCK_FILE).open("w")
        except OSError as error:
            raise UserError(
                f"run.dir={self.path}: cannot be written ({error.strerror}); choose another folder"
            ) from error
        with lock:
            for part in (self.checkpoints, self.tokenizer):
                if part.exists() and not os.access(part, os.W_OK):
                    raise UserError(
                        f"run.dir={self.path}: {part} cannot be written; get access to it, or choose another folder"
                    )
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"run.dir={self.path}: another process is training in it; wait for it or choose another run.dir"
                ) from None
            try:
                yield
            finally:
                if is_new and self.path.is_dir() and self._is_empty():
                    shutil.rmtree(self.path)

    def _is_empty(self) -> bool:
        found = {item.name for item in self.path.iterdir()}
        return found <= {_LOCK_FILE, FOLDER} and not any(self.checkpoints.glob("*"))

    def write_start(self, config: Config, facts: dict[str, Any]) -> None:
        """Writes the resolved config, and adds this start to run.json."""
        save_config(config, self.path / CONFIG_FILE)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        starts = [*self._starts(), {"time": now, **facts}]
        write_whole(self.path / RUN_FILE, json.dumps({"starts": starts}, indent=1) + "\n")

    def _starts(self) -> list[dict[str, Any]]:
        file = self.path / RUN_FILE
        if not file.exists() or self.latest_step is None:
            return []
        try:
            return list(json.loads(file.read_text(encoding="utf-8"))["starts"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{file}: not readable ({error}); remove it to go on without the record of earlier starts"
            ) from error
