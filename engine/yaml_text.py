"""YAML from elsewhere: safe, and none too deep or too large for what comes after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import yaml

from engine.json_text import objection
from engine.text import one_line

_MOST_VALUES: Final = 100_000


class YamlError(ValueError):
    """The text is not usable YAML: ``what``, and ``where``, as `` at line 3, column 4``, empty if unknown."""

    def __init__(self, what: object, where: str = "") -> None:
        self.what, self.where = one_line(what), where
        super().__init__(f"{self.what}{where}")


def load_yaml(text: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """The data in a YAML text, as ``loader`` makes it. Raises YamlError.

    References are looked at before they are followed: a few lines of them can stand for more values than there is
    memory for.
    """
    try:
        return _data(loader(text))
    except YamlError:
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise YamlError(getattr(error, "problem", None) or error, where) from error
    except RecursionError as error:
        raise YamlError("nested too deeply") from error
    except Exception as error:  # the library lets its conversions' own errors through, for 2026-13-01 say
        raise YamlError(error) from error


def _data(reader: yaml.SafeLoader) -> Any:
    try:
        node = reader.get_single_node()
        if why := objection(node, _MOST_VALUES, kinds=yaml.CollectionNode, inside=_inside):
            raise YamlError(why)
        return None if node is None else reader.construct_document(node)
    finally:
        reader.dispose()


def _inside(node: Any) -> Sequence[Any]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else ()
