"""What a person sees, on a terminal and elsewhere."""

import io
import logging

import pytest
from rich.console import Console

from jaxmoe.runtime.progress import Display


def shown(*, terminal: bool) -> str:
    stream = io.StringIO()
    with Display(Console(file=stream, force_terminal=terminal, width=100)) as display:
        display.start_steps(0, 10)
        display.step(3, 2.5, 1234.0)
        display.emit("[a line] of text")
        logging.getLogger("jaxmoe.data").info("tokenised")
        display.end_steps()
    return stream.getvalue()


def test_a_terminal_gets_a_bar_with_step_loss_and_speed():
    text = shown(terminal=True)
    for part in ("3/10", "loss 2.5000", "1,234 tokens/s", "[a line] of text", "tokenised"):
        assert part in text


def test_anything_else_gets_lines_alone():
    assert shown(terminal=False) == "[a line] of text\ntokenised\n"


def test_other_processes_show_warnings_only(capsys: pytest.CaptureFixture[str]):
    stream = io.StringIO()
    with Display(Console(file=stream)) as display:
        display.primary = False
        display.emit("hidden")
        logging.getLogger("jaxmoe").info("hidden too")
        logging.getLogger("jaxmoe").warning("disk full")
    assert stream.getvalue() == ""
    assert capsys.readouterr().err == "warning: disk full\n"


def test_a_warning_is_said_once_although_a_library_gave_the_root_logger_a_handler(capsys: pytest.CaptureFixture[str]):
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    try:
        with Display(Console(file=io.StringIO())):
            logging.getLogger("jaxmoe").warning("disk full")
    finally:
        logging.getLogger().removeHandler(handler)
    assert capsys.readouterr().err == "warning: disk full\n"
    assert logging.getLogger("jaxmoe").propagate
