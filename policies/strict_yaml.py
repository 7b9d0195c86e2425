"""YAML for configuration and rules: safe, and with two surprises less."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from engine.yaml_text import YamlError, load_yaml


class YamlProblem(Exception):  # noqa: N818  # what is wrong with a text, not with the program
    """The text is not usable YAML; one line that says where, if known, and what."""


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key given twice is refused and only ``true`` and ``false`` are booleans.

    Plain YAML silently keeps the last of two equal keys, and reads ``mode: off`` as false.
    """

    # A copy of its own, so that YAML elsewhere in the process keeps its meaning.
    yaml_implicit_resolvers = {  # noqa: RUF012  # the base class's own declaration
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            if key is not None:
                seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(?:true|false)$"), list("tf"))


def load_strict(text: str) -> Any:
    """The data in a YAML text. Raises YamlProblem."""
    try:
        return load_yaml(text, _Loader)
    except YamlError as error:
        raise YamlProblem(f"not valid YAML{error.where}: {error.what}") from error
