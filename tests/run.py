#!/usr/bin/env python3
"""Runs the test binaries that cargo has built, several at a time: `cargo test` runs one after another, and those that
wait leave cores idle.

    cargo test --workspace --no-run --message-format=json-render-diagnostics >messages
    tests/run.py messages runner

Each runs once and as cargo runs it: by `runner`, in the directory of its package, with its own threads. What it prints
is shown whole when it has ended, also where it is stopped: at its time limit, or because SIGTERM or SIGINT ends this
script. The last lines name every binary with its time, every test that failed, and the time of all binaries together.

Binaries of `MEASURED` run one after another. Beside them the others run at a lower priority, so that they take what is
left of the cores. `MILLRACE_TEST_BINARIES` says how many run at a time (2 by default); with 1 each has the machine to
itself.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What may not be slowed by other tests, in the order in which it runs, and why. First what waits most.
MEASURED = {
    "tests/soak": "does as much as it can within a given time",
    "tests/cluster": "limits how long writes may pause after an event, and looks for leases that run out",
    "tests/durability": "counts dependent rounds by the times of requests, and writes for a given time",
    "tests/robust": "counts dependent rounds, limits times and memory, looks at the priorities of threads",
    "tests/compose": "limits how long sessions may fail after a frontend is lost",
    "rpc/tests/rpc": "has calls given up after 100 ms and processes doubted after 200 ms",
    "storage/tests/rounds": "counts dependent rounds by the times of requests",
    "storage/tests/write_faults": "has requests given up after 200 ms",
    "bench/tests/cluster": "runs measurements",
    "bench/tests/prefetch": "runs measurements, and compares some",
    "functions/tests/arguments": "limits how long a call may take",
    "tests/scale": "limits the memory of a server that has to keep up with its sources",
    "tests/crash": "passes a crash point as often as it can within a given time",
}
# Added to the nice value of the others (nice(1)). A server adds 5 more to those of its threads that may be busy for long.
LOWER_PRIORITY = 10
# Seconds after which the runner stops a binary of lower priority: what it takes depends on what runs beside it.
LOWER_PRIORITY_LIMIT = 2_400
# Seconds within which binaries end that were told to: after 10 the runner kills them.
STOP_LIMIT = 20
# How many of the slowest binaries the last line names.
SLOWEST = 5


@dataclass
class Binary:
    # Its source below the root: `storage/src` has the unit tests of `storage`, `tests/crash` is `--test crash`.
    name: str
    executable: str
    # The directory of its package.
    package: str


@dataclass
class Ended:
    binary: Binary
    status: int
    # Seconds: as a clock shows them, and of the cores, with those of its child processes.
    took: float
    cpu: float
    output: str


def name_of(source):
    path = Path(source).resolve().relative_to(ROOT).with_suffix("")
    return str(path.parent if path.name in ("main", "lib") else path)


def binaries(messages):
    """The test binaries that cargo's messages name."""
    found = []
    for message in map(json.loads, messages):
        if message["reason"] != "compiler-artifact":
            continue
        target, package = message["target"], Path(message["manifest_path"]).resolve().parent
        if ROOT not in (package, *package.parents):
            continue
        if target["doctest"]:
            sys.exit(f"{target['src_path']}: `doctest = false` is missing, doc-tests are not run")
        if message["profile"]["test"] and message["executable"]:
            name = name_of(target["src_path"])
            found.append(Binary(name, message["executable"], str(package)))
    return found


def in_turn(found):
    """Those of `MEASURED` in its order, and the others: unit tests first, which know no clock but their own."""
    order = list(MEASURED)
    measured = [b for b in found if b.name in MEASURED]
    others = [b for b in found if b.name not in MEASURED]
    measured.sort(key=lambda b: order.index(b.name))
    others.sort(key=lambda b: (Path(b.name).name != "src", b.name))
    return measured, others


class Run:
    """One run of all binaries, on some threads that have a binary each."""

    def __init__(self, runner, found, at_a_time):
        self.runner = runner
        self.found = found
        self.at_a_time = at_a_time
        measured, others = in_turn(found)
        self.measured, self.others = deque(measured), deque(others)
        self.lock = threading.Lock()
        # Ids.
        self.processes = set()
        self.is_stopped = False
        # One for each thread that has ended. A join that a signal interrupts may take its thread for ended.
        self.done = threading.Semaphore(0)
        self.ended = []

    def all(self):
        """Runs them; `ended` has how they ended."""
        threads = [threading.Thread(target=self.work, args=[self.measured], daemon=True)]
        for _ in range(1, self.at_a_time):
            threads.append(threading.Thread(target=self.work, args=[self.others], daemon=True))
        for thread in threads:
            thread.start()
        working = len(threads)
        try:
            while working > 0:
                self.done.acquire()
                working -= 1
        except BaseException:
            self.stop()
            # They show what their binaries have printed.
            deadline = time.monotonic() + STOP_LIMIT
            while working > 0 and self.done.acquire(timeout=max(0, deadline - time.monotonic())):
                working -= 1
            raise

    def stop(self):
        """Begins no other binary, and ends those that run: `timeout` passes the signal on to their child processes."""
        with self.lock:
            self.is_stopped = True
            self.measured.clear()
            self.others.clear()
            for process in self.processes:
                os.kill(process, signal.SIGTERM)

    def work(self, first):
        """Runs what is in a queue, then what is left of the others."""
        try:
            for queue in (first, self.others):
                while binary := self.next_of(queue):
                    self.run(binary)
        finally:
            self.done.release()

    def next_of(self, queue):
        with self.lock:
            return queue.popleft() if queue else None

    def run(self, binary):
        command, environment = [self.runner, binary.executable], dict(os.environ)
        environment["CARGO_MANIFEST_DIR"] = binary.package
        if binary.name not in MEASURED and self.at_a_time > 1:
            command[:0] = ["nice", "-n", str(LOWER_PRIORITY)]
            environment["TEST_BINARY_LIMIT"] = str(LOWER_PRIORITY_LIMIT)
        with tempfile.TemporaryFile() as output:
            began = time.monotonic()
            with self.lock:
                if self.is_stopped:
                    return
                process = subprocess.Popen(
                    command,
                    cwd=binary.package,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                self.processes.add(process.pid)
            # Until it is waited for its id is no other process's.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            with self.lock:
                self.processes.discard(process.pid)
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            took = time.monotonic() - began
            output.seek(0)
            text = output.read().decode(errors="replace")
        cpu = used.ru_utime + used.ru_stime
        ended = Ended(binary, process.returncode, took, cpu, text)
        with self.lock:
            self.ended.append(ended)
            how = "was stopped after" if self.is_stopped else "took"
            print(f"\n     Running {binary.name}, which {how} {took:.1f} s\n{text}", flush=True)


def report(found, ended, took):
    """Prints the times and what failed; `took`: seconds that all have taken together. Whether all is well."""
    print("Test binaries (seconds, and seconds of CPU):")
    for e in sorted(ended, key=lambda e: -e.took):
        print(f"{e.took:8.1f} {e.cpu:8.1f} {e.binary.name}")
    failed = [e for e in ended if e.status != 0]
    for e in failed:
        print(f"FAILED: {e.binary.name} (status {e.status})")
        tests = re.findall(r"^test (.+) \.\.\. FAILED", e.output, re.MULTILINE)
        # One that was stopped or has died names none.
        lines = tests or e.output.splitlines()[-20:]
        print("".join(f"    {line}\n" for line in lines), end="")
    # A thread of this script that fails runs nothing more.
    names = {e.binary.executable for e in ended}
    left = [b.name for b in found if b.executable not in names]
    if left:
        print(f"FAILED: not run: {', '.join(left)}")
    slowest = sorted(ended, key=lambda e: -e.took)[:SLOWEST]
    slowest = ", ".join(f"{e.binary.name} {e.took:.0f} s" for e in slowest)
    minutes, seconds = divmod(round(took), 60)
    print(f"All test binaries took {minutes} min {seconds} s. The slowest: {slowest}", flush=True)
    return bool(ended) and not failed and not left


def main():
    messages, runner = sys.argv[1:]
    with open(messages, encoding="utf-8") as lines:
        found = binaries(lines)
    at_a_time = max(1, int(os.environ.get("MILLRACE_TEST_BINARIES") or 2))
    # As if it had been interrupted: what runs ends, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    began = time.monotonic()
    run = Run(runner, found, at_a_time)
    is_well = False
    try:
        run.all()
    finally:
        with run.lock:
            is_well = report(found, list(run.ended), time.monotonic() - began)
    sys.exit(0 if is_well else 1)


main()
