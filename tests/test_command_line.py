"""What all commands of `zorro-verl` have in common: help at once, errors of a line, tracebacks for faults alone."""

import os
import re
import subprocess
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

from zorro_verl.cli import app
from zorro_verl.commands.terminal import errors_in_one_line, make_table, print_json

COMMANDS = ("doctor", "plan", "analyze", "show", "verify", "bench")


def test_help_lists_the_commands():
    output = CliRunner().invoke(app, ["--help"]).output
    assert tuple(re.findall(r"^  (\w+)  ", output, re.MULTILINE)) == COMMANDS


def test_help_is_there_without_what_commands_need():
    """In one process: each of these is imported once."""
    code = (
        "import sys\n"
        "absent = ('torch', 'transformers', 'verl', 'ray', 'numpy', 'matplotlib', 'pyarrow')\n"
        "sys.modules.update(dict.fromkeys(absent))\n"
        "from typer.testing import CliRunner\n"
        "from zorro_verl.cli import app\n"
        "for words in (['--version'], *([name, '--help'] for name in sys.argv[1:])):\n"
        "    result = CliRunner().invoke(app, words)\n"
        "    assert result.exit_code == 0, (words, result.output, result.exception)\n"
    )
    finished = subprocess.run([sys.executable, "-c", code, *COMMANDS], capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_80_columns_and_explains_every_option(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    output = CliRunner().invoke(app, [name, "--help"]).output
    assert all(len(line) <= 80 for line in output.splitlines())
    for parameter in typer.main.get_command(app).commands[name].params:
        assert len((parameter.help or "").split()) >= 2, parameter.name
    assert "--json" in output


def run(error: BaseException):
    single = typer.Typer(pretty_exceptions_enable=False)

    @single.command()
    def command() -> None:
        with errors_in_one_line("try"):
            raise error

    return CliRunner().invoke(single)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("rows: expected 1,\n  got 0"), 2, "zorro-verl try: rows: expected 1, got 0\n"),
        (FileNotFoundError(2, "No such file", "x.jsonl"), 2, "zorro-verl try: [Errno 2] No such file: 'x.jsonl'\n"),
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            2,
            "zorro-verl try: it could not be done here (OutOfMemoryError: CUDA out of memory)\n",
        ),
        (MemoryError("no room"), 2, "zorro-verl try: it could not be done here (MemoryError: no room)\n"),
        (
            NotImplementedError("no kernel"),
            2,
            "zorro-verl try: it could not be done here (NotImplementedError: no kernel)\n",
        ),
        (KeyboardInterrupt(), 130, "zorro-verl try: interrupted\n"),
    ],
)
def test_what_a_user_can_mend_is_one_line(error, code, line):
    result = run(error)
    assert (result.exit_code, result.stderr) == (code, line)


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), TypeError("no"), KeyError("x")]
)
def test_a_fault_keeps_its_traceback(error):
    result = run(error)
    assert (result.exit_code, result.exception) == (1, error)


def test_a_closed_pipe_is_the_business_of_the_command_line():
    assert isinstance(run(BrokenPipeError(32, "Broken pipe")).exception, SystemExit)
    with pytest.raises(BrokenPipeError), errors_in_one_line("try"):
        raise BrokenPipeError(32, "Broken pipe")


def test_what_the_terminal_cannot_show_is_escaped():
    code = "from zorro_verl.commands.terminal import make_console; make_console().print('caf\\xe9 \\u2588')"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, env=environment)
    assert finished.stdout == b"caf\\xe9 \\u2588\n", finished.stderr


def test_json_is_json(capsys):
    print_json({"a": [1, None]})
    assert capsys.readouterr().out == '{\n  "a": [\n    1,\n    null\n  ]\n}\n'
    with pytest.raises(ValueError, match="JSON compliant"):
        print_json({"a": float("nan")})


def test_numbers_of_a_table_stand_on_the_right():
    assert [column.justify for column in make_table("name", ">seconds").columns] == ["left", "right"]
