"""The files of a Hugging Face model folder, before any tensor is read. No torch: a bad folder is refused at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.json_text import load_json
from engine.models.registry import parse_config

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LONGEST_NAME = 200


def check_folder(folder: Path) -> None:
    """Raises EngineError unless there is a supported config.json and every weight file exists."""
    parse_config(read_config(folder))
    weight_files(folder)


def read_config(folder: Path) -> Mapping[str, Any]:
    """The raw ``config.json`` of a model folder; EngineError when folder or file are missing or broken."""
    if not folder.is_dir():
        raise EngineError(f"model folder {folder} does not exist; give a folder with config.json and {SINGLE_FILE}")
    path = folder / "config.json"
    if not path.is_file():
        raise EngineError(f"{folder} holds no config.json; give the folder of a Hugging Face model")
    return read_json(path)


def read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object; EngineError when the file is missing, broken or something else."""
    try:
        data = load_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(data, dict):
        raise EngineError(f"{path} must hold a JSON object; download it again")
    return data


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, one or sharded; EngineError when any is missing."""
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise EngineError(f"{index} has no weight_map; download it again")
        names = sorted({str(name) for name in weight_map.values()})
        outside = [name for name in names if Path(name).name != name or len(name) > _LONGEST_NAME]
        if outside:
            raise EngineError(f"{index} names {outside[0][:80]!r}, which is no file beside it; download it again")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise EngineError(
                f"{folder} lacks {len(missing)} of {len(names)} weight files, first {missing[0]}; download them"
            )
        return [folder / name for name in names]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise EngineError(f"{folder} holds no {SINGLE_FILE}, only pickled weights; convert them to safetensors")
    raise EngineError(f"{folder} holds no {SINGLE_FILE} and no {INDEX_FILE}; download the weights")
