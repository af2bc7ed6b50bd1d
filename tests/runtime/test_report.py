"""The report command on finished, running and broken runs, and on what is no run."""

import base64
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from jaxmoe import report
from jaxmoe.config import UserError, load_config, save_config
from jaxmoe.runtime.metrics_file import METRICS_FILE, encode_record
from jaxmoe.runtime.report_plots import layer_lines, load_heat_maps, member_lines, thinned
from jaxmoe.runtime.report_read import CONFIG_FILE, Series, config_differences, read_runs

ROOT = Path(__file__).parents[2]


def line(step, kind: Any = "train", **scalars: float):
    """Few numbers: every picture takes a third of a second to draw."""
    if kind == "eval":
        return encode_record(step, kind, {"loss": 2.5, "bits_per_byte": 1.1}, {}, None)
    return encode_record(step, kind, {"loss": 3.0 / step, "skipped": 0.0, **scalars}, {}, None)


def full_line(step):
    values = {
        "loss": 3.0 / step,
        "learning_rate": 1e-3,
        "load_balancing_loss": 1.1,
        "mtp_loss_1": 4.0,
        "indexer_loss": 0.2,
        "something_new": 7.0,
    }
    per_layer = {"load_balancing_loss": np.array([0, 1.0, 1.2]), "router_bias_range": np.array([0, 0.1, 0.2]) * step}
    return encode_record(step, "train", values, per_layer, np.array([[0] * 4, [10] * 4, [40 - step, step, 0, 0]]))


def make_run(folder, lines, *overrides):
    folder.mkdir(parents=True)
    settings = load_config(ROOT / "tests" / "config" / "minimal.yaml", ["run.steps=20", *overrides])
    save_config(settings, folder / CONFIG_FILE)
    (folder / METRICS_FILE).write_text("".join(lines))
    return str(folder)


def finished(folder, *overrides):
    return make_run(folder, [*map(line, range(1, 21)), line(20, "eval")], *overrides)


@pytest.fixture(scope="module")
def full_page(tmp_path_factory):
    """The report of a finished run with every kind of number."""
    folder = tmp_path_factory.mktemp("full") / "first"
    return report.write_report([make_run(folder, [*map(full_line, range(1, 21)), line(20, "eval")])])


def test_a_finished_run_gives_a_page_without_network_and_pngs(full_page):
    assert full_page.parts[-3:] == ("first", "report", "report.html")
    text = full_page.read_text()
    assert "finished" in text
    for section in (
        "Learning",
        "Balance of experts",
        "Multi-token prediction",
        "Sparse-attention indexer",
        "Router bias",
        "Other numbers",
        "Last log lines",
    ):
        assert f"<h2>{section}</h2>" in text
    assert "step 20/20  validation  loss 2.5000  bits_per_byte 1.1000" in text
    outside = re.sub(r"data:image/svg\+xml;base64,[A-Za-z0-9+/=]+", "", text)
    assert not re.search(r"https?:|src=|<script|<link|url\(|@import", outside.replace('src=""', ""))
    keys = re.findall(r'<figure id="([^"]+)">', text)
    assert {"loss", "expert_load_run1", "busiest_run1", "load_balancing_loss_per_layer_run1"} <= set(keys)
    assert sorted(path.stem for path in full_page.parent.glob("*.png")) == sorted(keys)
    for path in full_page.parent.glob("*.png"):
        with Image.open(path) as picture:
            assert picture.size[0] > 600


def test_pictures_in_the_page_are_svg_files_that_refer_to_nothing_outside(full_page):
    data = re.findall(r"base64,([A-Za-z0-9+/=]+)", full_page.read_text())
    pictures = [base64.b64decode(picture).decode() for picture in data]
    assert len(pictures) > 8
    for picture in pictures:
        assert picture.startswith("<?xml")
        for target in re.findall(r'(?:xlink:)?href="([^"]*)"', picture):
            assert target.startswith(("#", "data:image/png"))


def test_two_runs_are_compared_and_their_settings_diffed(tmp_path):
    first = finished(tmp_path / "a" / "run")
    second = finished(tmp_path / "b" / "run", "optimizer.learning_rate=0.002", "model.num_layers=5")
    text = report.write_report([first, second], tmp_path / "out").read_text()
    assert "a/run" in text
    assert "b/run" in text
    assert '<tr><th>model.num_layers</th><td data-run="a/run">4</td><td data-run="b/run">5</td></tr>' in text
    table = config_differences(read_runs([first, second]))
    assert table == {"model.num_layers": ["4", "5"], "optimizer.learning_rate": ["0.0003", "0.002"]}


def test_equal_settings_are_said_to_be_equal(tmp_path):
    paths = [finished(tmp_path / name) for name in "ab"]
    assert "No setting differs" in report.write_report(paths, tmp_path / "out").read_text()


def test_a_running_run_with_a_broken_last_line_works_and_says_so(tmp_path):
    run = make_run(tmp_path / "run", [*map(line, range(1, 8)), line(8)[:-30]])
    text = report.write_report([run]).read_text()
    assert "running (last line 0 min ago)" in text
    assert "7 of 20" in text
    assert "left out what cannot be read" in text
    assert "metrics.jsonl:8" in text


@pytest.mark.parametrize("lines", [[], ["{"], ["\x00\xff\n"]])
def test_a_run_without_a_readable_step_works(tmp_path, lines):
    run = make_run(tmp_path / "run", lines)
    assert "no step has been logged yet" in report.write_report([run]).read_text()


def test_a_run_without_metrics_or_without_config_works(tmp_path):
    first, second = finished(tmp_path / "first"), finished(tmp_path / "second")
    (tmp_path / "first" / METRICS_FILE).unlink()
    (tmp_path / "second" / CONFIG_FILE).unlink()
    text = report.write_report([first, second]).read_text()
    assert "metrics.jsonl is not there yet" in text
    assert "config.yaml is missing" in text


def test_a_broken_config_is_a_note(tmp_path):
    run = finished(tmp_path / "run")
    (tmp_path / "run" / CONFIG_FILE).write_text("run: [")
    text = report.write_report([run]).read_text()
    assert 'class="note"' in text
    assert "config.yaml" in text


def test_numbers_that_are_not_finite_are_gaps_and_are_named(tmp_path):
    odd = [line(i, grad_norm=np.nan if i == 3 else 1.0, loss=np.inf if i == 5 else 2.0) for i in range(1, 8)]
    text = report.write_report([make_run(tmp_path / "run", odd)]).read_text()
    assert "grad_norm (step 3), loss (step 5)" in text


def test_a_run_that_is_only_nan_works(tmp_path):
    run = make_run(tmp_path / "run", [line(i, loss=np.nan, tokens_per_second=np.nan) for i in (1, 2)])
    assert 'id="loss"' not in report.write_report([run]).read_text()


def test_names_from_outside_are_escaped(tmp_path):
    run = make_run(tmp_path / "<b>run", [line(1, **{"<i>x": 1.0})], "data.cache_dir=<u>")
    text = report.write_report([run]).read_text()
    assert "<b>run" not in text
    assert "<i>x" not in text
    assert "<u>" not in text
    assert "&lt;b&gt;run" in text


def test_a_family_of_numbers_is_one_picture_of_each_run(tmp_path):
    values = {"grad_norm/router": 1.0, "grad_norm/experts": 100.0, "grad_norm": 2.0}
    runs = [make_run(tmp_path / name, [line(1, **values), line(2, **values)]) for name in "ab"]
    page = report.write_report(runs, tmp_path / "out")
    keys = re.findall(r'<figure id="([^"]+)">', page.read_text())
    assert [key for key in keys if "grad" in key] == ["grad_norm", "grad_norm_parts_run1", "grad_norm_parts_run2"]
    figure = member_lines(read_runs(runs[:1])[0], list(values)[:2], "x")
    assert figure is not None
    (axes,) = figure.axes
    assert axes.get_yscale() == "log"
    assert [one.get_label() for one in axes.get_lines()] == ["router", "experts"]


def test_lines_of_layers_are_named_and_apart(tmp_path):
    rows = {"mtp_loss": np.array([0.0, 0, 0, 3, 2]), "z_loss": np.array([0.0, 1, 2, 3, 4])}
    run = make_run(
        tmp_path / "run", [encode_record(s, "train", {}, rows, None) for s in (1, 2)], "model.mtp.num_depths=2"
    )
    names = {}
    for name in rows:
        figure = layer_lines(read_runs([run])[0], name, name)
        assert figure is not None
        lines = figure.axes[0].get_lines()
        names[name] = [one.get_label() for one in lines]
        colours = np.array([to_rgb(one.get_color()) for one in lines])
        apart = np.abs(colours[:, None] - colours).sum(axis=2) + 9 * np.eye(len(lines))
        assert apart.min() > 0.25
    assert names == {"mtp_loss": ["MTP 1", "MTP 2"], "z_loss": ["layer 1", "layer 2", "MTP 1", "MTP 2"]}


def test_any_name_of_a_metric_is_a_file_of_its_own_inside_the_folder(tmp_path):
    odd = ["a b", "a.b", "a-b", "A-b", "..", "x" * 300, "../../outside", "a_parts_run1", "a/b"]
    run = make_run(tmp_path / "run", [line(1, **dict.fromkeys(odd, 1.0))])
    page = report.write_report([run])
    keys = re.findall(r'<figure id="([^"]+)">', page.read_text())
    assert len(keys) == len({key.lower() for key in keys}) == len(odd) + 1  # and the loss
    assert sorted(path.name for path in page.parent.iterdir()) == sorted([*(f"{key}.png" for key in keys), page.name])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_without_matplotlib_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package matplotlib.*pip install 'jaxmoe\[demo\]'"):
        report.write_report([finished(tmp_path / "run")])


def test_of_two_lines_about_one_step_the_later_counts(tmp_path):
    run = make_run(tmp_path / "run", [line(1, loss=1.0), line(2, loss=2.0), line(1, loss=5.0)])
    series = read_runs([run])[0].series("train", "loss")
    assert series.steps.tolist() == [1, 2]
    assert series.values.tolist() == [5.0, 2.0]


def test_counts_of_a_long_run_arethinned_and_keep_first_and_last(tmp_path):
    counts = np.ones((2, 2), int)
    lines = [encode_record(step, "train", {}, {}, counts * step) for step in range(1, 1001)]
    kept = read_runs([make_run(tmp_path / "run", lines)])[0].counts
    assert 16 <= len(kept) <= 65
    assert kept[0][0] == 1
    assert kept[-1][0] == 1000
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    assert all(counts[0, 0] == step for step, counts in kept)


def test_long_series_arethinned_to_means_and_bounds():
    values = np.arange(10_000.0)
    values[5] = np.nan
    steps, means, low, high = thinned(Series(np.arange(10_000), values))
    assert len(steps) == 400
    assert steps[-1] == 9_999
    np.testing.assert_allclose(means[1], np.mean(values[25:50]))
    np.testing.assert_allclose(means[0], np.nanmean(values[:25]))
    assert (low[0], high[0]) == (0.0, 24.0)
    _, means, low, _ = thinned(Series(np.arange(1000), np.full(1000, np.inf)))
    assert np.isnan(means).all()
    assert np.isnan(low).all()


def test_heat_maps_show_load_over_mean(tmp_path):
    figure = load_heat_maps(read_runs([make_run(tmp_path / "run", map(full_line, range(1, 21)))])[0])
    assert figure is not None
    maps = [np.ma.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images]
    assert len(maps) == 4
    np.testing.assert_allclose(maps[0].data[1:], [[1, 1, 1, 1], [3.9, 0.1, 0, 0]])
    assert np.ma.getmaskarray(maps[0])[0].all()


def test_equal_inputs_give_equal_pictures(tmp_path):
    run = finished(tmp_path / "run")
    texts = [report.write_report([run], tmp_path / name).read_text() for name in "ab"]
    assert re.findall(r"base64,\S+", texts[0]) == re.findall(r"base64,\S+", texts[1])


# ---------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text(""), "is a file"),
        (lambda path: path.mkdir(), "holds neither metrics.jsonl nor config.yaml"),
        (lambda path: finished(path / "inner"), r"did you mean .*/what/inner\?"),
    ],
)
def test_what_is_no_run_folder_is_an_error(tmp_path, make, text):
    make(tmp_path / "what")
    with pytest.raises(UserError, match=text):
        report.write_report([str(tmp_path / "what")])


def test_all_wrong_folders_are_named_at_once_and_nothing_is_written(tmp_path):
    good = finished(tmp_path / "good")
    with pytest.raises(UserError, match=r"(?s)one: does not exist.*two: does not exist"):
        report.write_report([str(tmp_path / "one"), good, str(tmp_path / "two")])
    assert not (tmp_path / "good" / "report").exists()


def test_one_folder_given_twice_is_an_error(tmp_path):
    run = finished(tmp_path / "run")
    with pytest.raises(UserError, match="given twice"):
        report.write_report([run, run + "/."])


def test_an_output_that_cannot_be_written_is_an_error(tmp_path):
    run = finished(tmp_path / "run")
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match=r"--output .*out: cannot be written"):
        report.write_report([run], tmp_path / "out")


def test_the_command_prints_the_page_and_ends_with_2_on_a_wrong_folder(tmp_path):
    run = finished(tmp_path / "run")

    def command(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "jaxmoe.report", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )

    good = command(run)
    assert (good.returncode, good.stderr) == (0, "")
    assert Path(good.stdout.strip()).is_file()
    bad = command(str(tmp_path / "nothing"))
    assert bad.returncode == 2
    assert bad.stderr.startswith(f"error: {tmp_path}/nothing: does not exist")
    assert "Traceback" not in bad.stderr


def test_open_shows_the_page_in_a_browser(tmp_path, monkeypatch, capsys):
    shown = []
    monkeypatch.setattr("webbrowser.open", lambda address: shown.append(address) or False)
    report.main([finished(tmp_path / "run"), "--open"])
    assert shown == [(tmp_path / "run" / "report" / "report.html").as_uri()]
    assert "no browser found" in capsys.readouterr().err
