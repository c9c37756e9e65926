"""The link lab: links as text, what a command sees, exit codes, and that nothing is left behind."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchweft as weft
from torchweft import lab
from torchweft.errors import MachineError, WeftError
from torchweft_tools.cli import app as cli
from torchweft_tools.cli import doctor
from torchweft_tools.lab import command as command_file
from torchweft_tools.lab.link import MAX_BITS_PER_S, MIN_BITS_PER_S

REASON = lab.check() or lab.check("1gbit full")
limited = pytest.mark.skipif(bool(REASON), reason=f"links cannot be limited here: {REASON}")
LINKS = [pytest.param("100mbit", marks=limited), "none"]
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
TELL = "import json, os; print(json.dumps(dict(os.environ)), flush=True)"
Capture = pytest.CaptureFixture[str]
Monkey = pytest.MonkeyPatch

# Sends and counts bytes between two ranks until rank 0 has received for a while; prints how many.
FLOW = """
import os, socket, time
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    with socket.create_server(address) as server:
        talk, _ = server.accept()
    got, latest = 0, time.monotonic() + 1
    while time.monotonic() < latest:
        got += len(talk.recv(1 << 20))
    print(got)
else:
    while True:
        try:
            talk = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    try:
        while True:
            talk.sendall(bytes(1 << 16))
    except (BrokenPipeError, ConnectionResetError):
        pass
"""


@pytest.fixture
def patience() -> Iterator[None]:
    """Ends a test that would hang: what it waits for is not coming."""

    def late(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def python(code: str, *words: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code, *words]


# Links as text


@pytest.mark.parametrize(
    ("text", "bits", "label"),
    [
        ("1gbit", 10**9, "1gbit half duplex"),
        ("2.5Gbit", 25 * 10**8, "2.5gbit half duplex"),
        (" 500mbit ", 5 * 10**8, "500mbit half duplex"),
        ("1000mbit full", 10**9, "1gbit full duplex"),
        ("none", 0, "loopback (unlimited)"),
        ("loopback", 0, "loopback (unlimited)"),
    ],
)
def test_link_is_read_from_text(text: str, bits: int, label: str) -> None:
    link = lab.LabLink.parse(text)
    assert (link.bits_per_s, link.label) == (bits, label)


@given(st.integers(MIN_BITS_PER_S, MAX_BITS_PER_S), st.sampled_from(["half", "full"]))
def test_label_of_a_link_reads_back(bits: int, duplex: str) -> None:
    link = lab.LabLink(bits, duplex)
    assert lab.LabLink.parse(link.label) == link


@pytest.mark.parametrize(
    "text",
    ["", "1", "gbit", "0gbit", "0.0mbit", "-1gbit", "1tbit", "1 gbit", "nan", "infgbit", "1e3mbit",
     "101gbit", "9" * 400 + "gbit", "1kbit", "1gbit half full", "1gbit; reboot", "٣gbit"],
)  # fmt: skip
def test_bad_rate_lists_what_is_allowed(text: str) -> None:
    with pytest.raises(MachineError, match="Allowed: 1mbit to 100gbit") as caught:
        lab.LabLink.parse(text)
    assert caught.value.rule == "link"
    assert len(str(caught.value)) < 250


def test_bad_duplex_lists_the_choices() -> None:
    with pytest.raises(MachineError, match="Did you mean 'full'"):
        lab.LabLink.parse("1gbit", "ful")
    with pytest.raises(MachineError, match="is not half duplex"):
        lab.LabLink.parse("1gbit full", "half")


def test_the_lab_is_reached_lazily_and_without_torch() -> None:
    assert weft.lab is lab
    code = "import sys, torchweft; assert 'torchweft_tools' not in sys.modules"
    code += "; torchweft.lab.LabLink()"
    code += "; assert not {'torch', 'typer'} & set(sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@limited
@pytest.mark.parametrize("duplex", ["half", "full"])
def test_rate_is_changed_from_inside(duplex: str, patience: None) -> None:
    """Ten times the rate brings more bytes; the factor that counts is far below ten."""
    change = "from torchweft import lab; assert lab.is_limited(); lab.set_rate('100mbit %s')"
    got = []
    for code in (FLOW, change % duplex + FLOW):
        words = [sys.executable, "-c", code]
        with lab.spawn_ranks(words, link=f"10mbit {duplex}", require=True) as ranks:
            got.append(int(ranks.stdout.read()))
            ranks.wait()
    assert got[1] > 3 * got[0]


def test_rate_cannot_be_changed_outside_or_to_another_duplex(monkeypatch: Monkey) -> None:
    monkeypatch.delenv("WEFT_LINK", raising=False)
    assert not lab.is_limited()
    with pytest.raises(MachineError, match="is not limited"):
        lab.set_rate("1gbit")
    monkeypatch.setenv("WEFT_LINK", "1gbit half duplex")
    with pytest.raises(MachineError, match="cannot become 1gbit full duplex"):
        lab.set_rate("1gbit full")


# What the command sees


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("words", [["exit", "3"], ["kill", "-9", "$$"], ["kill", "-TERM", "$$"]])
def test_exit_code_is_that_of_the_command(link: str, words: list[str]) -> None:
    code = {"3": 3, "-9": 137, "-TERM": 143}[words[1]]
    assert lab.run(["sh", "-c", " ".join(words)], link=link) == code


@pytest.mark.parametrize("link", LINKS)
def test_streams_pass_through(link: str) -> None:
    code = "from torchweft_tools.cli.app import main; main()"
    words = ["lab", "run", "--link", link, "--", "sh", "-c", "cat; echo wrong >&2; exit 5"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        input="hello", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (5, "hello", "wrong\n")


@limited
def test_command_sees_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    code = "import socket; print([name for _, name in socket.if_nameindex()])"
    for env, name in (({}, "lo"), ({"GLOO_SOCKET_IFNAME": "mine"}, "mine")):
        words = python(f"{TELL}; {code}")
        with lab.start(words, link="100mbit", env=env, stdout=subprocess.PIPE) as command:
            told, interfaces = command.stdout.read().splitlines()
            assert command.wait() == 0
        assert json.loads(told)["WEFT_LINK"] == command.label == "100mbit half duplex"
        assert json.loads(told)["GLOO_SOCKET_IFNAME"] == name
        assert "lo" in interfaces
        assert "eth" not in interfaces


@limited
def test_processes_inside_have_numbers_that_fit_their_proc() -> None:
    code = "import os; assert os.readlink('/proc/self') == str(os.getpid())"
    assert lab.run(python(code), link="100mbit") == 0


@limited
def test_full_duplex_runs_two_nodes_that_reach_each_other() -> None:
    names = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "NODE_RANK", "GLOO_SOCKET_IFNAME")
    flow = FLOW.replace('"RANK"', '"NODE_RANK"').replace("print(got)", "print(got > 0)")
    code = f"{TELL}\n{flow}"
    with lab.start(python(code), link="100mbit full", stdout=subprocess.PIPE) as command:
        lines = command.stdout.read().splitlines()
        assert command.wait() == 0
    told = [json.loads(line) for line in lines if line.startswith("{")]
    assert "True" in lines
    assert sorted(tuple(env[name] for name in names) for env in told) == [
        ("2", "0", "10.77.0.1", "0", "weft0"),
        ("2", "1", "10.77.0.1", "1", "weft0"),
    ]
    assert command.label == told[0]["WEFT_LINK"] == "100mbit full duplex"


@limited
def test_link_is_really_limited() -> None:
    got = {}
    for link in ("20mbit", "20mbit full", "none"):
        with lab.spawn_ranks(python(FLOW), link=link) as ranks:
            got[link] = int(ranks.stdout.read())
            assert ranks.wait() == 0
    assert got["none"] > 5 * got["20mbit"]
    assert got["none"] > 5 * got["20mbit full"]


# Ranks


@pytest.mark.parametrize("link", [*LINKS, pytest.param("100mbit full", marks=limited)])
def test_ranks_know_who_they_are(link: str, capfd: Capture) -> None:
    with lab.spawn_ranks(python(TELL), link=link, env={"MORE": "1"}) as ranks:
        first = [json.loads(line) for line in ranks.stdout]
        assert ranks.wait() == 0
    out, err = capfd.readouterr()
    second = [json.loads(line) for line in err.splitlines()]
    assert out == ""
    assert [len(first), len(second)] == [1, 1]
    assert [env["RANK"] for env in (*first, *second)] == ["0", "1"]
    assert [env["LOCAL_RANK"] for env in (*first, *second)] == ["0", "0" if "full" in link else "1"]
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WEFT_LINK", "MORE"):
        assert first[0][name] == second[0][name]
    assert first[0]["WEFT_LINK"] == ranks.label


@linux
@pytest.mark.parametrize("link", LINKS)
def test_when_one_rank_fails_the_others_are_ended(
    link: str, monkeypatch: pytest.MonkeyPatch, patience: None
) -> None:
    monkeypatch.setattr(command_file, "GRACE_S", 0.2)
    deaf = "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code = deaf + "if os.environ['RANK'] == '1': sys.exit(9)\ntime.sleep(1000)"
    with lab.spawn_ranks(python(code), link=link) as ranks:
        assert ranks.stdout.read() == ""
        assert ranks.wait() == 9


def test_ranks_that_cannot_be_are_refused() -> None:
    with pytest.raises(WeftError, match="num_ranks must be 1 or more"):
        lab.spawn_ranks(["true"], link="none", num_ranks=0)


# Nothing is left


marks = itertools.count()


def lasting(mark: str) -> list[str]:
    """A command of several processes, one of them in a session of its own and one an orphan."""
    wait = "import time; time.sleep(1000)"
    last = f"{sys.executable} -I -S -c '{wait}' {mark}"
    return ["sh", "-c", f"setsid {last} & ({last} &); {last} & echo ready; wait; wait"]


def with_mark(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().endswith(f"\0{mark}\0".encode()):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def until(reached: Callable[[], bool]) -> None:
    """Wait for it, as long as there is patience."""
    while not reached():
        time.sleep(0.01)


def run_in_lab(link: str, words: list[str]) -> subprocess.Popen[str]:
    """A lab in a process of its own, with signals as Python has them, even under nohup."""
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    code += "from torchweft import lab; sys.exit(lab.run(sys.argv[2:], link=sys.argv[1]))"
    words = [sys.executable, "-c", code, link, *words]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


@linux
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(link: str, number: int, patience: None) -> None:
    mark = f"weft-{os.getpid()}-{next(marks)}"
    with run_in_lab(link, lasting(mark)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        until(lambda: len(with_mark(mark)) == 3)
        process.send_signal(number)
        process.stdout.read()
        process.wait()
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    until(lambda: not with_mark(mark))


@linux
@pytest.mark.parametrize("link", LINKS)
def test_nothing_is_left_when_the_command_ends_before_its_children(link: str) -> None:
    mark = f"weft-{os.getpid()}-{next(marks)}"
    words = lasting(mark)
    words[2] = words[2].replace("wait; wait", "exit 4")
    assert lab.run(words, link=link) == 4
    assert with_mark(mark) == []


@linux
@pytest.mark.parametrize("link", LINKS)
def test_leaving_the_with_ends_the_ranks(link: str) -> None:
    mark = f"weft-{os.getpid()}-{next(marks)}"
    with pytest.raises(ZeroDivisionError), lab.spawn_ranks(lasting(mark), link=link) as ranks:
        assert ranks.stdout.readline() == "ready\n"
        raise ZeroDivisionError
    assert with_mark(mark) == []
    assert ranks.poll() == 137


@linux
@pytest.mark.parametrize("link", LINKS)
def test_command_may_answer_a_signal_itself(link: str, patience: None) -> None:
    with run_in_lab(
        link, ["sh", "-c", "trap 'exit 8' TERM; echo ready; sleep 1000 & wait"]
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait() == 8


# Where links cannot be limited


@pytest.fixture
def no_tc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH with everything that the tests need, but without tc."""
    for name in ("sh", "unshare", "ip", "true"):
        if found := shutil.which(name):
            (tmp_path / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(command_file, "SBIN", ())
    monkeypatch.setattr(command_file, "TOOLS", ("tc",))


@linux
@pytest.mark.usefixtures("no_tc")
def test_without_tc_the_command_runs_over_loopback_and_one_line_says_so(
    capfd: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    assert cli.run(["lab", "run", "--", "sh", "-c", 'echo "$WEFT_LINK"; exit 6']) == 6
    line = "lab: no link limit: tc is not installed; runs over plain loopback"
    assert caplog.messages == [line]
    assert capfd.readouterr().out == "loopback (unlimited)\n"


@linux
@pytest.mark.usefixtures("no_tc")
def test_require_makes_it_an_error(capfd: Capture) -> None:
    assert cli.run(["lab", "run", "--require", "--", "sh", "-c", "echo never"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "MachineError: lab: no link limit: tc is not installed.\n"


@linux
@pytest.mark.usefixtures("no_tc")
def test_full_duplex_over_loopback_is_still_two_nodes(patience: None) -> None:
    with lab.start(python(TELL), link="1gbit full", stdout=subprocess.PIPE) as command:
        told = [json.loads(line) for line in command.stdout]
    assert sorted(env["PET_NODE_RANK"] for env in told) == ["0", "1"]
    assert {env["PET_MASTER_ADDR"] for env in told} == {"127.0.0.1"}
    assert told[0]["PET_MASTER_PORT"] == told[1]["PET_MASTER_PORT"]
    assert command.label == "loopback (unlimited)"


@linux
@pytest.mark.usefixtures("no_tc")
def test_the_doctor_says_what_the_lab_says() -> None:
    found = doctor._namespaces()
    assert (found.state, found.found) == ("warning", "tc is not installed")


@limited
@pytest.mark.parametrize(
    ("kind", "label"),
    [("net", "loopback (unlimited)"), ("pid", "1gbit half duplex"), ("user", "1gbit half duplex")],
)
def test_kernel_that_forbids_namespaces(kind: str, label: str) -> None:
    """In a user namespace the kernel's own limits can be set; as root, another way is found."""
    code = "import sys; from torchweft_tools.cli.app import main; main()"
    words = [sys.executable, "-c", code, "lab", "run", "--", "sh", "-c", 'echo "$WEFT_LINK"']
    script = f'echo 0 > /proc/sys/user/max_{kind}_namespaces && exec "$@"'
    done = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", script, "sh", *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"{label}\n"), done.stderr
    assert len(done.stderr.splitlines()) == (kind == "net")
    assert ("the kernel refuses namespaces" in done.stderr) == (kind == "net")


# Mistakes


@pytest.mark.parametrize("words", [["lab", "run"], ["lab", "run", "--"], ["lab", "run", "--", ""]])
def test_no_command_is_an_error_of_ours(words: list[str], capsys: Capture) -> None:
    assert cli.run(words) == 1
    assert "lab: there is no command" in capsys.readouterr().err


@pytest.mark.parametrize("link", LINKS)
def test_command_that_cannot_be_run(link: str, tmp_path: Path, capfd: Capture) -> None:
    assert cli.run(["lab", "run", "--link", link, "no-such-command", "--json"]) == 127
    assert capfd.readouterr().err == "lab: 'no-such-command': command not found\n"
    assert cli.run(["lab", "run", "--link", link, str(tmp_path)]) == 126
    assert "Permission denied" in capfd.readouterr().err


def test_bad_link_on_the_command_line(capsys: Capture) -> None:
    assert cli.run(["lab", "run", "--link", "1tbit", "--", "true"]) == 1
    assert "Allowed: 1mbit" in capsys.readouterr().err
