"""Contents of the API reference: public classes, functions, and members of the classes."""

import doctest
import inspect
import re
import types

import fedstat
import fedstat.datasets
import fedstat.errors
import fedstat.results

ATTRIBUTE = re.compile(r"^(\w+(?:, \w+)*)(?: : .*)?$|`(\w+)`", re.M)
"""Names in a list of attributes, or in a table or a sentence of a docstring."""
SECTION = re.compile(r"^Examples\n-{8}\n(.*?)(?=^\w[\w ]*\n-{3,}\n|\Z)", re.M | re.S)


def entries():
    """Public classes and functions by the name under which a reader has them."""
    reported = [name for name in vars(fedstat.errors) if name.endswith(("Error", "Warning"))]
    spaces = {
        "": (fedstat, [name for name in fedstat.__all__ if callable(getattr(fedstat, name))]),
        "datasets.": (fedstat.datasets, fedstat.datasets.__all__),
        "curves.": (fedstat.curves, fedstat.curves.__all__),
        "errors.": (fedstat.errors, reported),
        "results.": (fedstat.results, fedstat.results.__all__),
    }
    return {
        f"{start}{name}": getattr(space, name) for start, (space, names) in spaces.items() for name in names
    }


def members(cls):
    """Public methods and properties of a class that the package defines, with who defines them."""
    for name in dir(cls):
        owner = next((base for base in cls.__mro__ if name in vars(base)), None)
        if name.startswith("_") or owner is None or owner.__module__.partition(".")[0] != "fedstat":
            continue
        raw = vars(owner)[name]
        if isinstance(function_of(raw), types.FunctionType):
            yield name, owner, raw


def function_of(raw):
    """The function behind a method or property as a class holds it."""
    for behind in ("fget", "func", "__func__"):
        raw = getattr(raw, behind, raw)
    return raw


def text_of(value):
    """The docstring that is written at a class, function or property; none that is inherited."""
    return inspect.cleandoc((vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__) or "")


def examples(value):
    """The section Examples of a docstring, or nothing."""
    found = SECTION.search(text_of(value))
    return found[1] if found else ""


def statements(value):
    """Code of the examples, without their output."""
    return "".join(one.source for one in doctest.DocTestParser().get_examples(examples(value)))


def is_called(name, cls):
    """Whether an example of a class, or of one that it inherits from, reads or calls something of it."""
    return any(re.search(rf"\.{name}\b", statements(base)) for base in cls.__mro__[:-1])


def undocumented(value):
    """Attributes of an object without an underscore of which its class says nothing."""
    cls = type(value)
    reported = "\n".join(text_of(base) for base in cls.__mro__[:-1])
    known = {name for name, _, raw in members(cls) if raw.__doc__}
    known |= set(re.findall(r"\w+", " ".join(map(" ".join, ATTRIBUTE.findall(reported)))))
    foreign = [base for base in cls.__mro__ if base.__module__.partition(".")[0] != "fedstat"]
    known |= {name for base in foreign for name in vars(base)}
    return sorted(name for name in dir(value) if not name.startswith("_") and name not in known)
