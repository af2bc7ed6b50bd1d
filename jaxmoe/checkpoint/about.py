"""What a checkpoint says about itself, and whether a run may continue from it. Does not import JAX."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from jaxmoe.config.errors import UserError, show_value
from jaxmoe.config.load import config_to_dict
from jaxmoe.config.schema import Config, Model

FORMAT_VERSION = 1
_ABSENT = "(absent)"
#: Of `attention.dsa`: the indexers are trained first, then the whole model goes on from their checkpoint.
_STAGE_FIELDS = ("stage", "indexer_loss", "indexer_loss_coeff")


#: Fingerprint of a state that has read no batch yet, such as one made from another program's weights.
NO_DATA = ""


@dataclass(frozen=True)
class DataState:
    """Where the run stands in its data: batches are a function of these."""

    version: int
    step: int
    """Number of the next batch."""
    seed: int
    fingerprint: str
    """`Dataset.fingerprint`: texts, tokenizer, packing, rows, row length, seed."""


@dataclass(frozen=True)
class About:
    """Written into every checkpoint beside its arrays."""

    format: int
    model: dict[str, Any]
    """The resolved `model` section."""
    optimizer: str
    """`optimizer.kind`: it decides which arrays the optimiser's state has."""
    data: DataState
    mesh: dict[str, int]
    """For the reader only: a checkpoint loads under any mesh."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any], place: str) -> "About":
        """Raises: UserError when it was written by a version that this one cannot read."""
        if tree.get("format") != FORMAT_VERSION:
            raise UserError(
                f"{place}: has format {tree.get('format')}, this version of jaxmoe reads format {FORMAT_VERSION}; "
                "use the version that wrote it (run.json of the run names it)"
            )
        return cls(**{**tree, "data": DataState(**tree["data"])})


def about(config: Config, mesh: Mapping[str, int], step: int, fingerprint: str) -> About:
    """The description of a checkpoint that is saved after `step` steps."""
    return About(
        format=FORMAT_VERSION,
        model=config_to_dict(config)["model"],
        optimizer=config.optimizer.kind,
        data=DataState(version=1, step=step, seed=config.run.seed, fingerprint=fingerprint),
        mesh=dict(mesh),
    )


def differences(saved: Any, asked: Any, path: str) -> Iterator[str]:
    """Every field in which two sections differ, as `path: saved ..., asked ...`."""
    if isinstance(saved, Mapping) and isinstance(asked, Mapping):
        for key in [*saved, *(key for key in asked if key not in saved)]:
            yield from differences(saved.get(key, _ABSENT), asked.get(key, _ABSENT), f"{path}.{key}")
    elif saved != asked:
        yield f"{path}: saved {_show(saved)}, asked {_show(asked)}"


def _show(value: Any) -> str:
    return _ABSENT if value == _ABSENT else show_value(value)


def _untrained(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section without what a stage of training may change between two runs of one model."""
    attention = dict(model.get("attention") or {})
    if isinstance(attention.get("dsa"), Mapping):
        attention["dsa"] = {name: value for name, value in attention["dsa"].items() if name not in _STAGE_FIELDS}
    return {**model, "attention": attention}


def _with_defaults(saved_model: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section with the fields that its version of jaxmoe did not have yet: their defaults change nothing."""
    try:
        return Model.model_validate(saved_model).model_dump(mode="json")
    except ValidationError:
        return saved_model  # of a newer version, or of another schema: compared as it stands


def check_model(saved_model: Mapping[str, Any], saved_optimizer: str, config: Config, place: str) -> None:
    """Raises: UserError naming every field in which the model (or the kind of optimiser) is another one."""
    asked = config_to_dict(config)["model"]
    found = list(differences(_untrained(_with_defaults(saved_model)), _untrained(asked), "model"))
    found += differences(saved_optimizer, config.optimizer.kind, "optimizer.kind")
    if found:
        lines = "\n".join(f"  {line}" for line in found)
        raise UserError(
            f"{place}: holds another model; its fields must be those of the config\n{lines}\n"
            "  set them as they were saved, or choose another run.dir for a new run"
        )


def check_data(saved: DataState, config: Config, fingerprint: str, place: str) -> None:
    """Raises: UserError when the batches of the config are not those that the saved run has been reading."""
    if saved.fingerprint in (fingerprint, NO_DATA):
        return
    seed = "" if saved.seed == config.run.seed else f" (run.seed: saved {saved.seed}, asked {config.run.seed})"
    raise UserError(
        f"{place}: was trained on other batches{seed}: data fingerprint {saved.fingerprint[:12]}, the config's is "
        f"{fingerprint[:12]}; texts, tokenizer, packing, seed, batch.global_batch_size and batch.seq_len must be as "
        "they were; restore them, or add --accept-other-data to go on with the new batches from this step"
    )
