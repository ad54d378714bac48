"""The workspace that is built when something really uses it."""

from __future__ import annotations

import copy

import pytest

from hepatch.workspace import LazyWorkspace


class Real:
    def __init__(self):
        self.calls = []

    def retake_workspace(self):
        self.calls.append("retake")
        return False

    def release_workspace(self):
        self.calls.append("release")
        return "released"

    def is_allocated(self):
        return 1

    def allocate_workspace(self, *sizes):
        self.calls.append(sizes)
        return "allocated"


@pytest.fixture
def built():
    return []


@pytest.fixture
def workspace(built):
    def build():
        built.append(Real())
        return built[-1]

    return LazyWorkspace(build)


def test_unbuilt_answers_without_building(workspace, built):
    """Retaking nothing succeeds, or DeepSpeed gives the generate up."""
    assert workspace.retake_workspace() is True
    assert workspace.release_workspace() is None
    assert workspace.is_allocated() is False
    assert built == []


def test_any_other_use_builds_once(workspace, built):
    assert workspace.allocate_workspace(1, 2) == "allocated"
    assert workspace.allocate_workspace(3) == "allocated"
    assert len(built) == 1
    assert built[0].calls == [(1, 2), (3,)]


def test_built_one_answers_for_itself(workspace, built):
    assert workspace.real() is built[0]
    assert workspace.retake_workspace() is False
    assert workspace.release_workspace() == "released"
    assert workspace.is_allocated() is True


def test_failure_to_build_is_the_users(built):
    """Nothing is swallowed where the op is really wanted."""

    def fails():
        raise ValueError("no compiler")

    with pytest.raises(ValueError, match="no compiler"):
        LazyWorkspace(fails).reset_cache()


def test_copies_do_not_build(workspace, built):
    copy.copy(workspace)
    copy.deepcopy(workspace)

    assert built == []


def test_names_that_the_real_one_lacks_are_missing(workspace):
    with pytest.raises(AttributeError):
        workspace.no_such_thing()
