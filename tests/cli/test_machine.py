"""What probes ask this machine."""

from kvpp_connect.cli.machine import run_command, versions_of


def test_commands_that_cannot_be_run_or_fail_print_nothing():
    assert run_command("kvpp-no-such-command --at-all") == ""
    assert run_command("false") == ""
    assert run_command("echo 8 NPUs") == "8 NPUs\n"


def test_only_installed_packages_have_versions():
    assert versions_of(("pytest", "kvpp-no-such-package")).keys() == {"pytest"}
