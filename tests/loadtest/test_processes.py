from __future__ import annotations

import os
import subprocess
import sys

from loadtest.processes import Process, descendants, end, parse_ps, snapshot


def test_a_child_is_found_with_its_memory_and_ended_by_its_id() -> None:
    child = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert child.stdout is not None
        child.stdout.readline()  # it runs
        found = next(process for process in descendants(snapshot(), os.getpid()) if process.pid == child.pid)
        assert found.rss_bytes > 1 << 20
        assert "input()" in found.command
        other = Process(found.pid, found.parent, 0, "another program that had this id")
        assert end([other]) == []
        assert child.poll() is None
        assert [process.pid for process in end([found])] == [child.pid]
        assert child.wait(timeout=30) < 0
    finally:
        child.kill()
        child.wait()
        assert child.stdin is not None
        child.stdin.close()
        child.stdout.close()


def test_descendants_are_all_generations_but_not_the_root_or_strangers() -> None:
    tree = {pid: Process(pid, parent, 0, "") for pid, parent in [(1, 0), (2, 1), (3, 2), (4, 1), (9, 0)]}
    assert {process.pid for process in descendants(tree, 1)} == {2, 3, 4}
    assert descendants(tree, 9) == []


def test_the_output_of_ps_is_read() -> None:
    found = parse_ps("    1     0  2048 /sbin/init splash\n  77     1     0 (gone)\n 78 1 16\n")
    assert found[1] == Process(1, 0, 2048 * 1024, "/sbin/init splash")
    assert found[77].command == "(gone)"
    assert found[78] == Process(78, 1, 16 * 1024, "")
