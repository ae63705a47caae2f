"""tests/mutate.py, whose mutations take hours: that its list can be relied on."""

import ast
import collections
import pathlib

import mutate
import pytest


def names_bound_at_the_top(source: str) -> list[str]:
    """Of a Python file, one for each time that a statement outside functions and classes binds it."""
    targets = [
        target
        for statement in ast.parse(source).body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
    ]
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


def test_no_test_has_the_name_of_another():
    """Of two tests that share a name, only the second would run, for the mutations of both."""
    counts = collections.Counter(names_bound_at_the_top(pathlib.Path(mutate.__file__).read_text()))
    assert [name for name, count in counts.items() if count > 1] == []
    assert {"ROOT", "GGUF", "TERMINATED", "MUTATIONS"} <= counts.keys()  # alone, in a tuple, unpacked


def test_every_mutation_can_be_made_and_has_its_test():
    assert mutate.out_of_date(mutate.MUTATIONS) == []


@pytest.mark.deep
def test_what_is_out_of_date_is_found():
    old, new = mutate.MUTATIONS[0][1:3]
    lines = mutate.out_of_date(
        [
            ("model.py", "no such line", "", "tests/test_rooms.py"),
            ("serving/no_such_file.py", old, new, "tests/test_rooms.py::test_no_circle"),
            (mutate.MUTATIONS[0][0], old, new, "tests/test_rooms.py::test_no_such_test"),
        ]
    )
    assert lines == [
        "model.py has 0 of 'no such line'",
        f"serving/no_such_file.py has 0 of {old!r}",
        "there is no tests/test_rooms.py::test_no_such_test",
    ]
