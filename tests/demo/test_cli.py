import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kvpp_connect import __version__
from kvpp_connect.cli import main as cli
from kvpp_connect.demo import multi, pd, pool
from kvpp_connect.errors import ConfigError


@pytest.fixture
def demo_calls(monkeypatch):
    """Options that run_demo() was called with; it answers 0."""
    calls = []

    def record(options):
        calls.append(options)
        return 0

    monkeypatch.setattr(pd, "run_demo", record)
    return calls


def test_version_prints_the_version():
    result = CliRunner().invoke(cli.app, ["version"])
    assert result.exit_code == 0
    assert result.output == f"{__version__}\n"


def test_demo_runs_pd_with_the_defaults(demo_calls):
    for arguments in (["demo"], ["demo", "pd"]):
        assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    assert demo_calls == [pd.DemoOptions()] * 2


@pytest.mark.parametrize(
    ("scenario", "module", "run"),
    [("pool", pool, "run_pool_demo"), ("multi", multi, "run_multi_demo")],
)
def test_each_scenario_runs_with_the_defaults(monkeypatch, demo_calls, scenario, module, run):
    calls = []
    monkeypatch.setattr(module, run, lambda options: calls.append(options) or 3)
    assert CliRunner().invoke(cli.app, ["demo", scenario, "--layers", "4"]).exit_code == 3
    assert calls == [pd.DemoOptions(layers=4)]
    assert demo_calls == []


def test_every_option_of_the_demo_reaches_it(demo_calls, tmp_path):
    arguments = ["demo", "--json", "--layers", "8", "--kv-cache-bytes", "1000", "--timeout", "9"]
    arguments += ["--base-port", "4000", "--log-dir", str(tmp_path), "--keep-logs"]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    assert demo_calls == [
        pd.DemoOptions(
            layers=8,
            kv_cache_bytes=1000,
            timeout_s=9,
            base_port=4000,
            log_dir=tmp_path,
            keep_logs=True,
            as_json=True,
        )
    ]


@pytest.mark.parametrize("code", [0, 1, 130])
def test_the_exit_code_of_the_demo_is_that_of_the_command(monkeypatch, code):
    monkeypatch.setattr(pd, "run_demo", lambda _: code)
    monkeypatch.setattr(sys, "argv", ["kvpp", "demo"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == code


def test_an_unknown_scenario_is_refused_with_the_choices(demo_calls):
    result = CliRunner().invoke(cli.app, ["demo", "tiers"])
    assert result.exit_code == 2
    assert "'pd'" in result.output
    assert "'pool'" in result.output
    assert demo_calls == []


def test_our_errors_become_one_line_on_stderr(monkeypatch, capsys):
    def fail(_):
        raise ConfigError("layers is 0:\n  expected 1 or more")

    monkeypatch.setattr(pd, "run_demo", fail)
    monkeypatch.setattr(sys, "argv", ["kvpp", "demo"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert capsys.readouterr().err == "kvpp: layers is 0: expected 1 or more\n"


@pytest.mark.distributed
@pytest.mark.timeout(60)
def test_help_and_version_load_nothing_heavy():
    code = (
        "import sys; from kvpp_connect.cli.main import main\n"
        "sys.argv = ['kvpp', sys.argv[1]]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'vllm', 'mooncake', 'transformers', 'kvpp_connect.demo'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    for argument in ("--help", "version"):
        result = subprocess.run(
            [sys.executable, "-c", code, argument],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        assert result.stderr == "[]\n"
