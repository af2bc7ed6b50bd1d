"""What a checkpoint says about itself, and when a run may not continue from it."""

from dataclasses import replace
from pathlib import Path

import pytest

from jaxmoe.checkpoint.about import About, about, check_data, check_model
from jaxmoe.checkpoint.folder import saved_steps
from jaxmoe.config import Config, UserError, load_config

MINIMAL = Path(__file__).parents[1] / "config" / "minimal.yaml"


def config(*overrides: str) -> Config:
    return load_config(MINIMAL, overrides)


def test_it_survives_json():
    said = about(config(), {"dp": 4}, 7, "f" * 64)
    assert About.from_json(said.to_json(), "here") == said
    assert said.data.step == 7


def test_an_unknown_format_is_refused():
    tree = about(config(), {}, 7, "f").to_json() | {"format": 99}
    with pytest.raises(UserError, match="here: has format 99"):
        About.from_json(tree, "here")


def test_every_different_field_is_named():
    saved = about(config(), {}, 1, "f")
    other = config("model.d_model=128", "model.moe.router.aux_loss_coeff=0.5", "optimizer.kind=sgd")
    with pytest.raises(UserError) as error:
        check_model(saved.model, saved.optimizer, other, "here")
    for text in (
        "model.d_model: saved 64, asked 128",
        "router.aux_loss_coeff: saved 0.0, asked 0.5",
        "saved 'adamw'",
    ):
        assert text in str(error.value)


def test_a_section_that_only_one_has_is_named():
    saved = about(config(), {}, 1, "f")
    other = config("model.attention.rope.scaling={type: linear, factor: 2.0, original_seq_len: 64}")
    with pytest.raises(UserError, match=r"model\.attention\.rope\.scaling: saved null, asked"):
        check_model(saved.model, saved.optimizer, other, "here")


def test_a_field_that_the_saved_version_did_not_have_counts_as_its_default():
    saved = about(config(), {}, 1, "f")
    old = {key: value for key, value in saved.model.items() if key != "norm_eps"}
    check_model(old, "adamw", config(), "here")
    with pytest.raises(UserError, match=r"model\.norm_eps"):
        check_model(old, "adamw", config("model.norm_eps=1e-5"), "here")


def test_what_is_not_the_model_may_change():
    saved = about(config(), {}, 1, "f")
    check_model(
        saved.model, saved.optimizer, config("run.steps=50", "optimizer.learning_rate=1e-5", "parallel.tp=2"), "here"
    )


def test_other_data_is_refused_with_the_way_out():
    saved = about(config(), {}, 1, "a" * 64).data
    check_data(saved, config(), "a" * 64, "here")
    with pytest.raises(UserError, match="--accept-other-data"):
        check_data(saved, config(), "b" * 64, "here")
    with pytest.raises(UserError, match=r"run\.seed: saved 3, asked 0"):
        check_data(replace(saved, seed=3), config(), "b" * 64, "here")


def test_only_complete_checkpoints_count(tmp_path: Path):
    for name in ("20", "100", "120.orbax-checkpoint-tmp", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "130").write_text("a file")
    assert saved_steps(tmp_path) == [20, 100]
    assert saved_steps(tmp_path / "absent") == []
