"""Settings as people write them: YAML or JSON files, flags, help, and errors with the nearest right name."""

from __future__ import annotations

import json
import re
import textwrap
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from megazero.config_rules import either
from megazero.errors import ConfigError, near
from megazero.presets import PRESETS
from megazero.small_files import read_small, without_duplicates

_DEEPEST = 50


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars: 1e-4 is a number, 01:30:00 is text, only true and false are booleans; no key twice."""

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        if self.flow_level > _DEEPEST:  # the scanner's time grows with the square of it
            told = f"brackets inside brackets, more than {_DEEPEST}"
            raise yaml.scanner.ScannerError(None, None, told, self.get_mark())
        super().fetch_flow_collection_start(token)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        event = self.peek_event()
        if getattr(event, "tag", None) is not None:
            told = f"{event.tag} is a tag, which settings have no use for; leave it out"
            raise yaml.composer.ComposerError(None, None, told, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            wrong = "is given twice" if key in keys[:index] else "is no field name" if not isinstance(key, str) else ""
            if wrong:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} {wrong}", node.value[index][0].start_mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", "-+.0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def read_file(path: str) -> dict[str, Any]:
    """The tree in a .yaml, .yml or .json file. Raises ConfigError, naming file and line."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".yaml", ".yml", ".json"):
        raise ConfigError.single("--config", f"{path} must end in .yaml, .yml or .json")
    try:
        text = read_small(path).decode("utf-8")
        if suffix == ".json":
            tree = json.loads(text, object_pairs_hook=without_duplicates)
        else:
            tree = yaml.load(text, Loader=_Loader)
    except OSError as error:
        raise ConfigError.single("--config", f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError.single("--config", f"{path}: {' '.join(str(error).split())}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError.single("--config", f"{path} must hold sections with fields, as in  train: {{steps: 100}}")
    return tree


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(dotted path, field) of every field that holds a value, sections opened up."""
    own = model.__annotations__  # a class's own fields before inherited ones: model.preset is what people look for
    for name, field in sorted(model.model_fields.items(), key=lambda item: item[0] not in own):
        inner = _submodel(field.annotation)
        if inner is None:
            yield prefix + name, field
        else:
            yield from fields(inner, f"{prefix}{name}.")


def parse_flags(
    argv: Sequence[str], model: type[BaseModel]
) -> tuple[str | None, dict[str, Any], list[tuple[str, str]]]:
    """(config file or None, tree of flags, problems) from ``--config FILE --section.field value …``.

    The last of a flag given twice counts. Problems are flags that are unknown, lack a value or have too many.
    """
    known = dict(fields(model))
    config_file, tree = None, {}
    problems: list[tuple[str, str]] = []
    for flag, values in _grouped(argv):
        name = flag.removeprefix("--")
        if not flag.startswith("--"):
            problems.append((flag, "is no flag; settings are given as --section.field value"))
        elif name == "config":
            if len(values) == 1:
                config_file = values[0]
            else:
                problems.append((flag, f"takes one file, {len(values)} were given"))
        elif name not in known:
            problems.append((flag, _unknown(name, list(known), "flag", "--")))
        elif not values:
            problems.append((name, f"--{name} needs a value: {describe_type(known[name].annotation)}"))
        elif len(values) > 1 and not _is_list(known[name].annotation):
            problems.append((name, f"takes one value, {len(values)} were given: {' '.join(values)}"))
        else:
            *parents, last = name.split(".")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = _value(values, known[name].annotation)
    return config_file, tree, problems


def help_text(model: type[BaseModel], program: str) -> str:
    """Every field with its values, meaning and default."""
    lines = [
        f"usage: {program} [--config FILE] [--section.field VALUE ...]",
        "",
        "FILE is YAML or JSON with the sections below; flags win over it. A list takes several values,",
        "a boolean true or false; paths start from the working directory.",
    ]
    for section, field in model.model_fields.items():
        inner = _submodel(field.annotation)
        assert inner is not None and inner.__doc__, section
        lines += ["", f"{section}: {' '.join(inner.__doc__.split())}"]
        for path, leaf in fields(inner, f"{section}."):
            default = "" if leaf.is_required() else f" (default: {written(leaf.default).strip(chr(39))})"
            lines.append(f"  --{path}  {describe_type(leaf.annotation)}")
            lines += textwrap.wrap(
                f"{leaf.description}{default}", 110, initial_indent="      ", subsequent_indent="      "
            )
    return "\n".join(lines)


def describe_errors(error: ValidationError, model: type[BaseModel]) -> list[tuple[str, str]]:
    """(field path, message) of each field that pydantic refused, one message per field."""
    known = dict(fields(model))
    problems: dict[str, str] = {}
    for item in error.errors():
        path = _field_path(item["loc"], known)
        field = known.get(path)
        value = item["input"]
        if item["type"] == "extra_forbidden":
            message = _unknown(path, list(known), "field")
        elif item["type"] == "missing" and len(item["loc"]) == path.count(".") + 1:
            message = "is missing" + (f": {field.description}" if field else "")
        elif path == "model.preset" and isinstance(value, str):
            message = f"unknown preset {value!r}{_nearest(value, list(PRESETS))}"
        elif item["type"] == "value_error":
            message = str(item["ctx"]["error"])
        elif item["type"].startswith(("greater_than", "less_than")) and item["ctx"]:
            (bound,) = item["ctx"].values()
            words = {"greater_than_equal": "at least", "greater_than": "above", "less_than_equal": "at most"}
            message = f"{value} must be {words.get(item['type'], 'below')} {written(bound)}"
        elif field is None:
            message = f"{written(value)} is not a section with fields"
        elif _is_list(field.annotation):
            message = f"must be {describe_type(field.annotation)}"
        else:
            message = f"{written(value)} is not {describe_type(field.annotation)}"
            if isinstance(value, str):
                message += _nearest(value, _choices(field.annotation), only_close=True)
        problems.setdefault(path, message)
    return list(problems.items())


def describe_type(annotation: Any) -> str:
    """What a user may write, in words."""
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if origin is Literal:
        return either(arguments)
    if origin in (Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not types.NoneType]
        choices = [choice for argument in inner for choice in get_args(argument) if get_origin(argument) is Literal]
        if choices and bool in inner:
            return either([*choices, "true", "false"])
        return either([describe_type(argument) for argument in inner])
    if origin is tuple:
        inner = describe_type(arguments[0]).removeprefix("a ")
        if get_origin(arguments[0]) is tuple:
            return "a prefix, or weights and prefixes in turn"
        return f"a list of {inner}s" if Ellipsis in arguments else f"{len(arguments)} {inner}s"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[annotation]


def _grouped(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the values that follow it; --flag=value is split."""
    group: tuple[str, list[str]] | None = None
    for word in argv:
        if word.startswith("--"):
            if group is not None:
                yield group
            flag, equals, value = word.partition("=")
            group = (flag, [value] if equals else [])
        elif group is None:
            yield word, []
        else:
            group[1].append(word)
    if group is not None:
        yield group


def _value(values: Sequence[str], annotation: Any) -> Any:
    """A flag's words as a file would give them: null where that is meant, 5e8 as a whole number."""
    kinds = get_args(annotation) or (annotation,)
    if types.NoneType in kinds and list(values) in ([""], ["null"], ["none"]):
        return None
    if _is_list(annotation):
        return list(values)
    return _number(values[0]) if int in kinds else values[0]


def _number(text: str) -> Any:
    """5e8 → 500000000.0, which is accepted where a whole number is meant; other text stays as it is."""
    try:
        return text if text.lstrip("+-").isdigit() else float(text)
    except ValueError:
        return text


def _submodel(annotation: Any) -> type[BaseModel] | None:
    candidates = [annotation, *get_args(annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _is_list(annotation: Any) -> bool:
    return any(get_origin(candidate) is tuple for candidate in (annotation, *get_args(annotation)))


def _choices(annotation: Any) -> list[str]:
    found = [str(a) for a in get_args(annotation)] if get_origin(annotation) is Literal else []
    for argument in get_args(annotation):
        found += _choices(argument)
    return found


def _field_path(location: tuple[int | str, ...], known: dict[str, FieldInfo]) -> str:
    """The dotted path of a field, without what pydantic adds about list items and the branch of a union."""
    for length in range(1, len(location)):
        path = ".".join(map(str, location[:length]))
        if path in known:
            return path
    return ".".join(map(str, location))


def _unknown(name: str, known: Sequence[str], what: str, prefix: str = "") -> str:
    """That ``name`` does not exist, and the likeliest one that does: the same word elsewhere, else the nearest."""
    name = name.replace("-", "_")
    leaf = name.split(".")[-1]
    leaves = {path.split(".")[-1]: path for path in known}
    sections = list(dict.fromkeys(path.split(".")[0] for path in known))
    likely = [
        *([leaves[leaf]] if leaf in leaves else []),
        *([] if "." in name else near(name, sections)),
        *near(name, known, cutoff=0.75),
        *[leaves[match] for match in near(leaf, list(leaves))],
    ]
    return f"unknown {what}; " + (f"did you mean {prefix}{likely[0]}?" if likely else "--help lists all")


def _nearest(value: str, choices: Sequence[str], only_close: bool = False) -> str:
    close = near(value.lower(), choices, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    return "" if only_close else f"; there are {', '.join(choices)}"


def written(value: Any, depth: int = 3) -> str:
    """A value as a user writes it; of lists in lists only the outer ones, which aliases may have made endless."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, list | tuple):
        return " ".join(written(part, depth - 1) for part in value[:20]) if depth else "…"
    if isinstance(value, dict):
        return f"a section with {len(value)} fields"
    return repr(value) if isinstance(value, str) else str(value)
