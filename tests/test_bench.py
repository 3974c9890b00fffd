"""The benchmark measures what it names, and a peer that fails costs a row, not the run."""

import argparse
import dataclasses
import io
import itertools
import json
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from jaxcap.bench import command, progress, report, turns
from jaxcap.bench.cases import CASES, Case
from jaxcap.bench.implementations import Implementation, available
from jaxcap.bench.measure import PASSES, Row, measure, turn
from jaxcap.bench.turns import Work, by_turns

TINY = Case("tiny", 1, 16, 16, 2, 1, 8, True, dtype="float32")


def run(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


def test_pairs_by_counting():
    for case in (TINY, Case("w", 1, 20, 12, 1, 1, 8, True, 3), Case("f", 1, 5, 9, 1, 1, 8, False)):
        count = 0
        for i in range(case.query_length):
            for j in range(case.key_length):
                inside = not case.causal or j <= i
                count += inside and (case.window_left is None or i - j <= case.window_left)
        assert case.pairs == count
    assert CASES["d128_full_8k"].flops(False) == 4.0 * 2 * 32 * 128 * 8192**2
    assert CASES["d64_causal_8k"].flops(True) == 3.5 * CASES["d64_causal_8k"].flops(False)


def test_rows_of_a_peer_that_fails_or_has_no_backward():
    def broken(case, capped):
        raise RuntimeError("no kernel\nfor this")

    def works(case, capped):
        return lambda q, k, v: q * case.softcap if capped else q

    implementations = [
        Implementation("broken+cap", "jax", True, broken),
        Implementation("works+cap", "jax", True, works),
        Implementation("forward plain", "jax", False, works, backward=False),
    ]
    rows = list(measure(TINY, implementations, PASSES, rounds=2, burst_s=0.0))
    by_name = {(row.implementation, row.passes): row for row in rows}
    assert len(rows) == 6
    assert by_name["broken+cap", "forward"].error == "RuntimeError: no kernel"
    assert by_name["broken+cap", "forward"].tflops is None
    assert by_name["forward plain", "forward+backward"].error == "has no backward"
    works_row = by_name["works+cap", "forward"]
    assert works_row.ms is not None
    assert works_row.tflops == pytest.approx(TINY.flops(False) / works_row.ms / 1e9)
    table = report.table(rows, "forward")
    assert table.splitlines()[0] == "| forward, TFLOP/s | works+cap | forward plain |"
    assert table.splitlines()[2].startswith("| tiny | ")
    assert "–" not in table
    wider = [dataclasses.replace(x, case="other") for x in rows if "plain" in x.implementation]
    assert "| other | – | " in report.table([*rows, *wider], "forward")
    assert report.refusals(rows).splitlines() == [
        "broken+cap: RuntimeError: no kernel",
        "forward plain: has no backward (tiny forward+backward)",
    ]
    # what was not named, but could have run here, is one line
    others = [dataclasses.replace(x, implementation="no+cap") for x in rows if "broken" in str(x)]
    assert report.refusals([*rows, *others], named=False).splitlines() == [
        "forward plain: has no backward (tiny forward+backward)",
        "did not run: broken, no; why: name them, --implementations",
    ]
    assert report.refusals(others, named=False) == "no+cap: RuntimeError: no kernel"


def test_a_result_that_is_not_finite_is_an_error():
    def nan(case, capped):
        return lambda q, k, v: q * jnp.nan

    (row,) = measure(TINY, [Implementation("nan+cap", "jax", True, nan)], ["forward"])
    assert row.error is not None
    assert row.error.startswith("AssertionError")


def test_caps_are_measured_as_caps(monkeypatch):
    """What is called capped gets the cap, what is called plain does not."""
    import jaxcap

    seen = []
    monkeypatch.setattr(jaxcap, "dot_product_attention", lambda *a, **k: seen.append(k))
    known = available()
    known["jaxcap+cap"].make(CASES["d128_window4k_8k"], True)(1, 2, 3)
    known["jaxcap plain"].make(CASES["d128_causal_8k"], False)(1, 2, 3)
    assert [s["softcap"] for s in seen] == [50.0, None]
    assert [s["local_window_size"] for s in seen] == [(4095, 0), None]
    assert "jaxcap-cudnn plain" in known
    assert "jaxcap-cudnn+cap" not in known


def test_logits_have_their_size():
    from jaxcap.bench.measure import _jax_inputs

    case = dataclasses.replace(TINY, query_length=64, key_length=64, head_size=64)
    for size in (1.0, 12.5):
        q, _, k, _ = _jax_inputs(dataclasses.replace(case, logits=size))
        k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
        logits = jnp.einsum("btnd,bsnd->bnts", q, k) / 8
        assert abs(float(logits.std()) / size - 1) < 0.1


def test_command(tmp_path, capsys):
    out, picture = tmp_path / "deep" / "rows.json", tmp_path / "bars.png"
    words = ["--q", "1,16,2,8", "--kv-heads", "1", "--causal", "--dtype", "float32"]
    words += ["--logits", "1,12.5"]
    words += ["--implementations", "jaxcap-xla", "--rounds", "1", "--burst", "0"]
    words += ["--sustain", "0.001"]
    assert run(*words, "--json", str(out), "--picture", str(picture)) == 0
    printed, told = capsys.readouterr()
    assert re.search(
        r"^0:0\d case 2 of 2, 1x16x2x8_logits12.5 forward: compiling jaxcap-xla plain, 2 of 2$",
        told,
        re.M,
    )
    assert re.search(r"1x16x2x8 forward\+backward: timing 2 implementations, 1 rounds\n", told)
    assert "compiling" not in printed
    assert "| forward, TFLOP/s, first calls / sustained |" in printed
    assert "| 1x16x2x8 |" in printed
    assert "| 1x16x2x8_logits12.5 |" in printed
    document = json.loads(out.read_text())
    assert {row["passes"] for row in document["rows"]} == set(PASSES)
    assert {row["implementation"] for row in document["rows"]} == {
        "jaxcap-xla+cap",
        "jaxcap-xla plain",
    }
    assert all(row["tflops"] > 0 and row["burst_tflops"] > 0 for row in document["rows"])
    assert document["versions"]["jax"]
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize("terminal", [False, True])
def test_progress(monkeypatch, terminal):
    """A terminal's line changes; elsewhere what is told often is told every ten seconds."""
    now = itertools.count(100, 4)
    monkeypatch.setattr(progress, "time", argparse.Namespace(perf_counter=lambda: next(now)))
    monkeypatch.setenv("COLUMNS", "20")
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    tell = progress.Progress(stream)
    tell.where = "case 1 of 2, "
    tell("compiling")
    for number in range(15):
        tell(f"round {number}", often=True)
    tell.end()
    told = stream.getvalue()
    if terminal:
        clear = "\r\033[K"
        assert told.startswith(f"{clear}0:04 case 1 of 2, c{clear}0:08 case 1 of 2, r")
        assert told.endswith(f"{clear}1:04 case 1 of 2, r{clear}") and "\n" not in told
    else:
        assert told.splitlines()[0] == "0:04 case 1 of 2, compiling"
        assert [line.split()[-1] for line in told.splitlines()[1:]] == ["2", "5", "8", "11", "14"]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the default cases are for a GPU")
def test_without_a_gpu_it_asks_for_a_shape(capsys):
    assert run() == 2
    assert "give a shape" in capsys.readouterr().err


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="on Hopper it runs")
def test_nothing_that_ran_is_no_success(capsys):
    words = ("--q", "1,64,2,8", "--implementations", "jaxcap-pallas", "--passes", "forward")
    assert run(*words) == 2
    assert "nothing ran" in capsys.readouterr().err


def test_small_speeds_have_digits():
    rows = [Row("c", "x", "forward", 1.0, 1.0, x) for x in (0.0123, 45.6)]
    assert "0.012" in report.table(rows[:1], "forward")
    assert "| 46 |" in report.table(rows[1:], "forward")
    assert "| 50 / 46 |" in report.table([dataclasses.replace(rows[1], burst_tflops=50)], "forward")


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--cases", "d999"], "--cases: no d999"),
        (["--q", "1,8,2,8", "--logits", "1,0"], "--logits must be positive numbers"),
        (["--q", "1,8,2,8", "--logits", "big"], "got 'big'"),
        (["--q", "1,2"], "--q must be B,T,N,H"),
        (["--q", "1,8,2,8", "--cases", "d64_causal_8k"], "--cases and --q are two ways"),
        (["--softcap", "30"], "--softcap goes with --q"),
        (["--cases", "d64_causal_8k", "--window-left", "7"], "--window-left goes with --q"),
        (["--cases", "d64_causal_8k", "--causal"], "--causal goes with --q"),
        (["--q", "1,8,2,8", "--implementations", "nothing"], "none begins with nothing"),
        (["--q", "1,8,2,8", "--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--q", "1,8,2,8", "--sustain", "-1"], "--sustain must be seconds, 0 or more, got -1"),
        (["--q", "1,8,2,8", "--burst", "nan"], "--burst must be seconds, 0 or more, got nan"),
        (["--passes", "sideways", "--cases", "d64_causal_8k"], "--passes: no sideways"),
    ],
)
def test_bad_words(words, match, capsys):
    assert run(*words) == 2
    assert match in capsys.readouterr().err


class Device:
    """A clock, and a device that does what the host launches, one call after the other.

    It runs slower the longer it has been at work: 1 ms a call, after 50 ms of it 2 ms. It notes when it was
    idle, and each call's work, begin and end.
    """

    def __init__(self, launch_s):
        self.now, self.launch_s = 0.0, launch_s
        self.busy_since, self.calls = 0.0, []

    def perf_counter(self):
        return self.now

    def work(self, name):
        def launch():
            self.now += self.launch_s
            begin = self.calls[-1][2] if self.calls else 0.0
            if begin < self.now:  # idle: it cools down
                begin = self.busy_since = self.now
            end = begin + (0.001 if begin < self.busy_since + 0.05 else 0.002)
            self.calls.append((name, begin, end))
            return end

        def wait(end):
            self.now = max(self.now, end)

        return Work(launch, wait)


def test_what_counts_is_sustained_without_a_pause(monkeypatch):
    device = Device(launch_s=0.0005)
    monkeypatch.setattr(turns, "time", device)
    (turn,) = by_turns({"a": device.work("a")}, 1, 0.1, sustain_s=0.3)["a"]
    assert turn.first == pytest.approx(0.0015, rel=0.15)  # 50 ms at 1 ms, 50 ms at 2 ms
    assert turn.seconds == pytest.approx(0.002, rel=1e-9)
    assert turn.ahead == 1.0
    gaps = [b[1] - a[2] for a, b in itertools.pairwise(device.calls[2:])]
    assert max(gaps) < 1e-12
    assert 0.4 < device.now < 0.42
    (turn,) = by_turns({"a": device.work("a")}, 1, 0.1)["a"]
    assert turn.first == turn.seconds == pytest.approx(0.0013, rel=0.1)  # right after the pause


def test_a_host_that_is_too_slow_is_seen(monkeypatch):
    device = Device(launch_s=0.003)
    monkeypatch.setattr(turns, "time", device)
    (turn,) = by_turns({"a": device.work("a")}, 1, 0.1, sustain_s=0.1)["a"]
    assert turn.ahead == 0.0
    assert turn.seconds == pytest.approx(0.003, rel=1e-9)
    row = Row("c", "a", "forward", 1.0, 1.0, 5.0)
    rows = [dataclasses.replace(row, ahead=x) for x in (None, 1.0, 0.0)]
    assert report.idle(rows) == "a, c forward: the GPU waited for the host"


def test_rounds_have_different_orders(monkeypatch):
    """Who comes after a slow one finds a cooler card: nobody may do so in every round."""
    device = Device(launch_s=0.0005)
    monkeypatch.setattr(turns, "time", device)
    said = []
    by_turns({name: device.work(name) for name in "abcd"}, 6, 0.01, 0.01, said.append)
    order = "".join(text[-1] for text in said)
    rounds = [order[i : i + 4] for i in range(0, len(order), 4)]
    assert all(sorted(x) == list("abcd") for x in rounds)
    assert len(rounds) == 6
    assert len({x[x.index("a") - 1] for x in rounds if x[0] != "a"}) > 1
    ran = "".join(name for name, _ in itertools.groupby(call[0] for call in device.calls[8:]))
    assert ran == "".join(name for name, _ in itertools.groupby(order))


def test_processes_take_turns(tmp_path):
    """All prepare side by side; one that times waits for them, and others wait for it."""
    lock = tmp_path / "lock"
    script = (
        "import pathlib, sys, time\n"
        "from jaxcap.bench.measure import turn\n"
        "with turn(pathlib.Path(sys.argv[1])):\n"
        "    begin = time.time(); time.sleep(0.3); print(begin, time.time())\n"
    )
    command = [sys.executable, "-c", script, str(lock)]
    with turn(lock, alone=False):
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        time.sleep(1.0)
        prepared = time.time()
    spans = sorted(tuple(map(float, p.communicate()[0].split())) for p in running)
    assert prepared <= spans[0][0]
    assert spans[0][1] <= spans[1][0] + 0.01


def test_merge(tmp_path, capsys):
    files = []
    for name in ("a", "b"):
        row = Row(name, "jaxcap+cap", "forward", 1.0, 1.0, 5.0)
        files.append(tmp_path / f"{name}.json")
        ran = report.Run("2020-01-02", f"measure {name}", {"device": "some GPU"})
        report.write([row], ran, files[-1])
    both = tmp_path / "both.json"
    assert run("--merge", *map(str, files), "--json", str(both)) == 0
    rows, ran = report.read([both])
    assert [row.case for row in rows] == ["a", "b"]
    # of the machine that measured, not of the one that puts together
    assert ran == report.Run("2020-01-02", "measure a; measure b", {"device": "some GPU"})
    shown = capsys.readouterr().out
    assert "| a | 5 |" in shown and "device some GPU" in shown

    assert run("--merge", str(tmp_path / "none.json")) == 2
    other = tmp_path / "c.json"
    report.write(rows, report.Run.now("here"), other)
    assert run("--merge", str(both), str(other)) == 2
    assert "one machine" in capsys.readouterr().err
    assert run("--merge", str(both), str(both)) == 2
    assert "a, jaxcap+cap, forward once more" in capsys.readouterr().err
    report.write([Row("c", "x", "forward", 1.0, 1.0, 5.0, burst_tflops=6.0)], ran, other)
    assert run("--merge", str(both), str(other)) == 2
    assert "--sustain 0" in capsys.readouterr().err
    drawn = tmp_path / "drawn.png"
    assert run("--merge", str(both), "--passes", "forward+backward", "--picture", str(drawn)) == 2
    assert "nothing ran" in capsys.readouterr().err and not drawn.exists()
    good = both.read_text()
    for text in (
        "[]",
        "{}",
        '{"rows": [{"case": 1}]}',
        "no JSON",
        good.replace('"some GPU"', "3"),
        good.replace('"measure a; measure b"', "null"),
        good.replace("5.0", '"fast"'),
        good.replace('"a"', '["a"]'),
        "[" * 100_000,
    ):
        other.write_text(text)
        assert run("--merge", str(other)) == 2
        assert f"{other} is no file that --json wrote" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--q", "1,64,3,16", "--kv-heads", "2"), "3 heads must be a multiple of the 2 heads"),
        (("--q", "1,64,2,16", "--dtype", "fp8"), "'fp8'"),
        (("--merge", "a.json", "--q", "1,2,3,4"), "leave out --q"),
        (("--merge", "a.json", "--cases", "d64_causal_8k"), "leave out --q and --cases"),
    ],
)
def test_a_call_that_cannot_be_is_one_line_before_anything_runs(arguments, said, capsys):
    assert run(*arguments) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1 and not shown.out
