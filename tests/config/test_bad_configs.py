"""Every way to write a bad config that the project knows: what is said, and that its advice works."""

from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from jaxmoe.config import ConfigError, config_from_dict, load_config
from jaxmoe.config.check import LAYOUT_RULES, MODEL_RULES, RUN_RULES
from jaxmoe.config.load import apply_overrides, read_tree
from jaxmoe.config.schema import Config

MINIMAL = Path(__file__).parent / "minimal.yaml"


class Bad(NamedTuple):
    change: list[str]
    path: str
    says: list[str]
    mend: list[str]


def rows(*groups: str) -> list[Bad]:
    table = yaml.safe_load(MINIMAL.with_name("bad_configs.yaml").read_text())
    return [
        Bad(row["change"].split(), row["path"], row["says"], row.get("mend", "").split())
        for group in groups
        for row in table[group]
    ]


BAD_BETWEEN_FIELDS = rows("models", "layouts", "runs")
BAD = [*rows("fields"), *BAD_BETWEEN_FIELDS]
IDS = [" ".join(row.change)[:100] for row in BAD]


def problems_of(overrides: list[str]) -> list:
    with pytest.raises(ConfigError) as caught:
        load_config(MINIMAL, overrides)
    return list(caught.value.problems)


def test_the_table_is_long_enough_and_the_unchanged_config_is_fine():
    assert len(BAD) >= 45
    load_config(MINIMAL)


@pytest.mark.parametrize("row", BAD, ids=IDS)
def test_a_bad_config_gets_path_value_rule_and_fix_and_nothing_else(row: Bad):
    problems = problems_of(row.change)
    assert [problem.path for problem in problems] == [row.path]
    message = str(problems[0])
    assert [part for part in row.says if part not in message] == [], message
    assert "\n" not in message


@pytest.mark.parametrize("row", [row for row in BAD if row.mend], ids=lambda row: " ".join(row.mend)[:100])
def test_following_the_fix_makes_the_config_load(row: Bad):
    keys = {override.partition("=")[0] for override in row.mend}
    kept = [override for override in row.change if override.partition("=")[0] not in keys]
    load_config(MINIMAL, [*kept, *row.mend])


def test_every_rule_between_fields_is_broken_by_some_row():
    broken = set()
    for row in BAD_BETWEEN_FIELDS:
        tree, _ = apply_overrides(read_tree(MINIMAL), row.change)
        try:
            config = Config.model_validate(tree)
        except ValueError:
            continue  # a row about a single field
        broken |= {rule.__name__ for rule in (*MODEL_RULES, *LAYOUT_RULES, *RUN_RULES) if list(rule(config))}
    assert broken == {rule.__name__ for rule in (*MODEL_RULES, *LAYOUT_RULES, *RUN_RULES)}


def test_problems_of_fields_and_between_fields_are_reported_together():
    overrides = ["run..x=1", "run.steps=abc", "model.moe.num_exprts=3", "batch.seq_len=129", "parallel.tp=2", "lr=1"]
    assert {problem.path for problem in problems_of([*overrides, "model.attention.num_kv_heads=3"])} == {
        "run..x=1",
        "run.steps",
        "model.moe.num_exprts",
        "batch.seq_len",
        "lr",
        "model.attention.num_kv_heads",
    }


def test_a_rule_that_needs_a_bad_field_is_not_judged():
    # Seen as absent, the misspelt mlp would also be "needed"; steps 'x' cannot be compared with the warm-up.
    overrides = ["model.mlp=null", "model.mpl.hidden_dim=128", "run.steps=x", "optimizer.schedule.warmup_steps=50"]
    paths = [problem.path for problem in problems_of(overrides)]
    assert paths == ["run.steps", "model.mpl"]


def test_a_missing_section_is_named_with_its_keys():
    tree = read_tree(MINIMAL)
    del tree["data"], tree["batch"]["seq_len"]
    with pytest.raises(ConfigError) as caught:
        config_from_dict(tree)
    assert [str(problem) for problem in caught.value.problems] == [
        "batch.seq_len: required key is missing; add `seq_len:` with a whole number >= 1",
        "data: required section is missing; add `data:` with train",
    ]
