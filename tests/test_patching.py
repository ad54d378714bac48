"""One attribute patch: raw lookup, honest undo, whoever else patches the same attribute."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import sys
import types

import pytest

from hepatch.patching import MissingTargetError, Patch, Target

HOST = "hepatch_test_host"


def _double(wrapped, _instance, args, kwargs):
    return ("ours", wrapped(*args, **kwargs))


class Base:
    def inherited(self, value):
        return ("base", value)


class Owner(Base):
    def method(self, value, other=1):
        """The host's own words."""
        return ("own", value)

    @classmethod
    def of_class(cls, value):
        return (cls.__name__, value)

    @staticmethod
    def static(value):
        return ("static", value)

    number = 3


def function(value):
    return ("function", value)


@pytest.fixture
def host(monkeypatch):
    """A loaded module with fresh copies of the classes above."""
    module = types.ModuleType(HOST)
    base = type("Base", (), dict(vars(Base)))
    module.Owner = type("Owner", (base,), {k: v for k, v in vars(Owner).items() if not k.startswith("__")})
    module.Owner.__module__ = HOST
    module.function = function
    monkeypatch.setitem(sys.modules, HOST, module)
    return module


@pytest.fixture
def switch():
    return {"on": True}


@pytest.fixture
def patch_of(switch):
    def build(attribute, owner="Owner", wrapper=_double, parameters=()):
        target = Target(HOST, owner, attribute, wrapper, why="a test", parameters=parameters)
        return Patch(target, lambda: switch["on"])

    return build


def _foreign_closure(owner, attribute):
    original = getattr(owner, attribute)

    def foreign(*args, **kwargs):
        return ("foreign", original(*args, **kwargs))

    setattr(owner, attribute, foreign)
    return foreign


class TestApply:
    def test_instances_that_exist_are_reached(self, host, patch_of):
        """A class attribute serves every instance, whenever it was built."""
        instance = host.Owner()
        patch_of("method").apply()

        assert instance.method(1) == ("ours", ("own", 1))

    def test_unbound_call_gives_the_instance(self, host, patch_of):
        """`generate` fetches the loop from the type and passes the model as the first argument."""
        seen = []

        def wrapper(wrapped, instance, args, kwargs):
            seen.append((instance, args, kwargs))
            return wrapped(*args, **kwargs)

        patch_of("method", wrapper=wrapper).apply()
        instance = host.Owner()

        assert host.Owner.method(instance, 1, other=2) == ("own", 1)
        assert [(instance, (1,), {"other": 2})] == seen

    def test_signature_name_and_doc_are_the_original_ones(self, host, patch_of):
        """Hosts inspect signatures to decide what to pass."""
        before = inspect.signature(host.Owner.method)
        patch_of("method").apply()

        assert before == inspect.signature(host.Owner.method)
        assert before.replace(parameters=list(before.parameters.values())[1:]) == inspect.signature(host.Owner().method)
        assert host.Owner.method.__name__ == "method"
        assert host.Owner.method.__doc__ == "The host's own words."

    @pytest.mark.parametrize(("attribute", "expected"), [("of_class", ("Owner", 1)), ("static", ("static", 1))])
    def test_class_and_static_methods_bind_as_before(self, host, patch_of, attribute, expected):
        patch_of(attribute).apply()

        assert ("ours", expected) == getattr(host.Owner, attribute)(1)
        assert ("ours", expected) == getattr(host.Owner(), attribute)(1)

    def test_attribute_of_a_module(self, host, patch_of):
        patch_of("function", owner="").apply()

        assert host.function(1) == ("ours", ("function", 1))

    def test_class_as_attribute_of_a_module_still_answers_isinstance(self, host, patch_of):
        """The host may test against the name that is patched."""
        original = host.Owner
        patch_of("Owner", owner="").apply()

        assert isinstance(original(), host.Owner)
        assert host.Owner is not original

    def test_twice_is_silent(self, host, patch_of):
        patch = patch_of("method")
        patch.apply()
        installed = vars(host.Owner)["method"]
        patch.apply()

        assert vars(host.Owner)["method"] is installed

    def test_switch_is_asked_on_every_call(self, host, patch_of, switch):
        patch_of("method").apply()
        bound = host.Owner().method
        switch["on"] = False

        assert bound(1) == ("own", 1)

    def test_exceptions_pass(self, host, patch_of):
        """What the original raises is the caller's, unchanged."""
        patch_of("method").apply()

        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            host.Owner().method()

    def test_copies_and_pickles_are_by_reference(self, host, patch_of):
        """As those of a function are."""
        host.function = types.FunctionType(function.__code__, {}, "function")
        host.function.__module__ = HOST
        patch_of("function", owner="").apply()
        ours = host.function

        assert copy.copy(ours) is copy.deepcopy(ours) is ours
        assert pickle.loads(pickle.dumps(ours)) is ours


class TestRevert:
    @pytest.mark.parametrize("attribute", ["method", "of_class", "static"])
    def test_raw_attribute_is_the_same_object_again(self, host, patch_of, attribute):
        """Restoring a bound copy is the classic bug."""
        before = vars(host.Owner)[attribute]
        patch = patch_of(attribute)
        patch.apply()
        patch.revert()

        assert vars(host.Owner)[attribute] is before

    def test_inherited_attribute_is_deleted(self, host, patch_of):
        """Wrapping an inherited name creates it; leaving it would change the method resolution for good."""
        patch = patch_of("inherited")
        patch.apply()
        assert host.Owner().inherited(1) == ("ours", ("base", 1))
        patch.revert()

        assert "inherited" not in vars(host.Owner)
        assert host.Owner().inherited(1) == ("base", 1)

    def test_module_attribute_is_restored(self, host, patch_of):
        patch = patch_of("function", owner="")
        patch.apply()
        patch.revert()

        assert vars(host)["function"] is function

    def test_twice_is_silent(self, host, patch_of):
        patch = patch_of("method")
        patch.apply()
        patch.revert()
        before = dict(vars(host.Owner))
        patch.revert()

        assert before == dict(vars(host.Owner))

    def test_without_apply_is_silent(self, host, patch_of):
        before = dict(vars(host.Owner))
        patch_of("method").revert()

        assert before == dict(vars(host.Owner))

    def test_host_that_is_gone_is_silent(self, host, patch_of, monkeypatch):
        patch = patch_of("method")
        patch.apply()
        monkeypatch.delitem(sys.modules, HOST)
        patch.revert()

        assert patch.state.startswith("not applied")


class TestSomebodyElse:
    def test_wrapper_below_ours_stays(self, host, patch_of):
        foreign = _foreign_closure(host.Owner, "method")
        patch = patch_of("method")
        patch.apply()
        assert host.Owner().method(1) == ("ours", ("foreign", ("own", 1)))
        patch.revert()

        assert vars(host.Owner)["method"] is foreign

    def test_wrapper_above_ours_stays_and_ours_turns_inert(self, host, patch_of, switch):
        patch = patch_of("method")
        patch.apply()
        foreign = _foreign_closure(host.Owner, "method")
        assert "applied under" in patch.state
        switch["on"] = False
        patch.revert()

        assert vars(host.Owner)["method"] is foreign
        assert host.Owner().method(1) == ("foreign", ("own", 1))
        assert patch.state.startswith("buried under")
        assert "foreign" in patch.state

    def test_buried_wrapper_acts_again_after_apply(self, host, patch_of, switch):
        """And once, not twice."""
        patch = patch_of("method")
        patch.apply()
        foreign = _foreign_closure(host.Owner, "method")
        switch["on"] = False
        patch.revert()
        switch["on"] = True
        patch.apply()

        assert vars(host.Owner)["method"] is foreign
        assert host.Owner().method(1) == ("foreign", ("ours", ("own", 1)))

    def test_buried_wrapper_that_comes_back_is_removed_by_the_next_revert(self, host, patch_of, switch):
        """The other library undoes its patch after ours was undone, and puts back what it found: ours."""
        before = vars(host.Owner)["method"]
        patch = patch_of("method")
        patch.apply()
        installed = vars(host.Owner)["method"]
        _foreign_closure(host.Owner, "method")
        switch["on"] = False
        patch.revert()
        host.Owner.method = installed
        assert host.Owner().method(1) == ("own", 1)
        patch.revert()

        assert vars(host.Owner)["method"] is before

    @pytest.mark.parametrize("wrap", ["closure", "wraps", "partial", "default", "hidden"])
    def test_apply_after_another_library_wrapped_acts_once(self, host, patch_of, wrap):
        """However the other one keeps the original, also where it cannot be seen."""
        patch = patch_of("method")
        patch.apply()
        original = host.Owner.method
        if wrap == "closure":
            _foreign_closure(host.Owner, "method")
        elif wrap == "wraps":
            host.Owner.method = functools.wraps(original)(lambda *args: ("foreign", original(*args)))
        elif wrap == "partial":
            call = functools.partial(original)
            host.Owner.method = lambda self, *args: ("foreign", call(self, *args))
        elif wrap == "default":
            host.Owner.method = lambda self, *args, _call=original: ("foreign", _call(self, *args))
        else:
            store = {"original": original}
            host.Owner.method = lambda self, *args: ("foreign", store["original"](self, *args))
        wrapped = vars(host.Owner)["method"]
        patch.apply()
        patch.apply()
        seen = str(host.Owner().method(1))

        if wrap != "hidden":
            assert vars(host.Owner)["method"] is wrapped

        assert seen.count("ours") == 1
        assert seen.count("foreign") == 1

    def test_apply_after_another_library_put_the_original_back(self, host, patch_of):
        """Ours is gone without a call to revert; apply brings it back and revert still restores the original."""
        before = vars(host.Owner)["method"]
        patch = patch_of("method")
        patch.apply()
        host.Owner.method = before
        assert patch.state == "not applied"
        patch.apply()
        assert host.Owner().method(1) == ("ours", ("own", 1))
        patch.revert()

        assert vars(host.Owner)["method"] is before

    def test_wrapper_of_an_earlier_apply_never_acts_again(self, host, patch_of):
        """Somebody kept it and calls it beneath the newer one."""
        before = vars(host.Owner)["method"]
        patch = patch_of("method")
        patch.apply()
        kept = vars(host.Owner)["method"]
        host.Owner.method = before
        patch.apply()
        host.Owner.other = kept

        assert host.Owner().other(1) == ("own", 1)
        assert host.Owner().method(1) == ("ours", ("own", 1))

    def test_class_that_was_replaced_is_patched_anew(self, host, patch_of):
        """A reload defines the class again."""
        patch = patch_of("method")
        patch.apply()
        host.Owner = type("Owner", (), {"method": lambda self, value: ("new", value)})
        patch.apply()

        assert host.Owner().method(1) == ("ours", ("new", 1))


class TestVerify:
    def test_what_is_there_passes_and_nothing_is_touched(self, host, patch_of):
        before = dict(vars(host.Owner))
        patch_of("method", parameters=("value", "other")).verify()

        assert before == dict(vars(host.Owner))

    def test_missing_attribute_is_named(self, host, patch_of):
        with pytest.raises(MissingTargetError, match=rf"{HOST}\.Owner\.gone is missing"):
            patch_of("gone").verify()

    def test_missing_owner_is_named(self, host, patch_of):
        with pytest.raises(MissingTargetError, match=rf"{HOST}\.Lost\.method is missing"):
            patch_of("method", owner="Lost").verify()

    def test_module_that_is_not_loaded_is_named_and_not_imported(self, patch_of):
        with pytest.raises(MissingTargetError, match=f"{HOST} is not loaded"):
            patch_of("method").verify()

        assert HOST not in sys.modules

    def test_missing_parameter_is_named(self, host, patch_of):
        with pytest.raises(MissingTargetError, match=r"Owner\.method has no parameter third"):
            patch_of("method", parameters=("value", "third")).verify()

    def test_what_cannot_be_called_is_named(self, host, patch_of):
        with pytest.raises(MissingTargetError, match=r"Owner\.number is no function"):
            patch_of("number").verify()

    def test_foreign_wrapper_that_hides_the_signature_passes(self, host, patch_of):
        """It passes everything on, so what it hides cannot be said to be missing."""
        _foreign_closure(host.Owner, "method")

        patch_of("method", parameters=("value",)).verify()

    def test_own_wrapper_passes(self, host, patch_of):
        patch = patch_of("method", parameters=("value",))
        patch.apply()

        patch.verify()
