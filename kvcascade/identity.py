"""The identity of weights, a field of every namespace fingerprint.

Block hashes identify tokens, not the model that computed the bytes. Two engines may exchange blocks
only if everything that shapes the bytes is equal, above all the weights.

A hub model is identified by its resolved commit. Local files are identified by a digest over
configuration, code and samples of the weights (`weight_digest`).
"""

from __future__ import annotations

import json
import os
import re
import stat
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path

from .errors import file_mode, is_folder
from .logs import get_logger
from .weight_digest import digest_files

_log = get_logger(__name__)

_CONFIG_FILES = ("*.json", "*.py")
"""Patterns of configuration and of code that comes with some models; read in full."""
_FOR_PROMPTS = frozenset({"chat_template.json", "generation_config.json", "tokenizer_config.json"})
"""Files that people edit, and that shape prompts and sampling, but no block: its key covers its
tokens. The one option of a generation config that does is a fact of `engine_facts`."""
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_PARTS_OF_MODELS = ("whisper-large-v3",)
"""Subfolders from which vLLM loads weights: the encoder of Kimi-Audio. Other ones, such as saved
states of a training, change while a model is served."""
_GGUF_PART = re.compile(r"(.*-)\d+(-of-\d+\.gguf)")
_OTHER_MODELS = ("text_model_id", "audio_model_id")
"""Keys by which a configuration names another model for a part of its weights: Ultravox takes its
language model and its encoder of sounds from there."""
_HUB_CONFIGS = ("config.json", "params.json")
"""Files of which every model on the hub has one; the second is Mistral's."""
_CODE_CONFIGS = (
    "config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Files that may name code of a model or of its media. Code of a tokenizer shapes tokens only."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


def weights_identity(
    model: str, revision: str | None, is_real: bool, download_dir: str | None = None
) -> str:
    """Return a word that is equal only for equal weights.

    `model`: hub name or local path. `is_real`: False if the weights are not those of `model`; they
    then get an identity that no other process has. So do weights with a file that cannot be read.
    `download_dir`: the directory that the engine downloads weights to; None: the hub's cache.
    """
    found = None
    with _reading(model):
        found = _weights_word(model, revision, download_dir) if is_real else None
    return found or private_identity()


def _weights_word(model: str, revision: str | None, download_dir: str | None) -> str | None:
    """Return a word for the weights; None if they are not found. Raises `OSError`."""
    path = Path(model)
    mode = file_mode(path)
    if stat.S_ISREG(mode):
        return f"files:{digest_files(_parts_of(path), path.parent)}"
    folder = path if stat.S_ISDIR(mode) else _hub_snapshot(model, revision, download_dir)
    if folder is None:
        return None
    commit = _snapshot_commit(folder)
    if commit:
        return f"hub:{commit}"
    files = _files_of(folder)
    return f"files:{digest_files(files, folder)}" if files else None


@contextmanager
def _reading(model: str) -> Iterator[None]:
    """Log an `OSError` and go on: a file that cannot be read leaves the identity unknown.

    An engine must not stop for it, since vLLM may do without the file.
    """
    try:
        yield
    except OSError as error:
        _log.warning("kvcascade: the model %r is not identified by its files: %s", model, error)


def other_models(configuration: Mapping[str, object]) -> dict[str, str]:
    """Return the models that a configuration names for a part of the weights, by its keys."""
    named = {key: configuration.get(key) for key in _OTHER_MODELS}
    return {key: name for key, name in named.items() if isinstance(name, str) and name}


def prefers_mistral_files(model: str, revision: str | None, download_dir: str | None) -> bool:
    """Return True if vLLM prefers files in Mistral's own format for want of a load format.

    Also if the folder cannot be read: the load format is then part of the fingerprint.
    """
    try:
        path = Path(model)
        folder = path if is_folder(path) else _hub_snapshot(model, revision, download_dir)
        return folder is not None and bool(_matching(folder, ["consolidated*.safetensors"]))
    except OSError:
        return True


def code_identity(model: str, revision: str | None, code_revision: str | None) -> str | None:
    """Return a word for the code that a model takes from other repositories; None if from none.

    It is equal only for equal code. `code_revision`: the revision of these repositories. Code of
    which the hub's cache has no copy was not run: vLLM has most models itself. Code that cannot be
    read gets an identity that no other process has.
    """
    with _reading(model):
        found = set()
        for reference in _code_references(model, revision):
            repository, _, place = reference.partition("--")
            commit = revision if repository == model and code_revision is None else code_revision
            found.add(_code_in(repository, f"{place.partition('.')[0]}.py", commit))
        # With this variable of old versions, the code may lie in another cache.
        if None not in found or not os.environ.get("TRANSFORMERS_CACHE"):
            return " ".join(sorted(word for word in found if word is not None)) or None
    return private_identity()


def _code_references(model: str, revision: str | None) -> set[str]:
    """Return the classes in other repositories that a configuration names: `name--file.Class`.

    Raises `OSError`.
    """
    found: set[str] = set()
    for name in _CODE_CONFIGS:
        named = _read_json(model, revision, name).get("auto_map")
        for each in named.values() if isinstance(named, dict) else ():
            found |= {str(part) for part in (each if isinstance(each, list) else [each])}
    return {each for each in found if "--" in each}


def _code_in(repository: str, file: str, revision: str | None) -> str | None:
    """Return a word for the code of a folder or of a repository's local copy, if there is one.

    A new commit with the same code has the same word. Raises `OSError`.
    """
    is_folder = os.path.isdir(repository)
    folder = Path(repository) if is_folder else _cached_snapshot(repository, revision, (file,))
    if folder is None:
        return None
    return f"files:{digest_files(sorted(_matching(folder, ['*.py'])), folder)}"


def private_identity() -> str:
    """Return a word that no other process has."""
    return f"process:{uuid.uuid4().hex}"


def is_shareable(identity: str) -> bool:
    """Return False for a private identity, which only one process has."""
    return not identity.startswith("process:")


_noted: dict[tuple[str, str | None, str | None], list[tuple[str, int, int]]] = {}
"""Weight files of models as they were when the process began, by name, revision and download
directory."""


def note_files(model: str, revision: str | None = None, download_dir: str | None = None) -> None:
    """Note the weight files of a model before they are loaded; the first time counts.

    Also those of other models that its configuration names. Of a model of the hub the commit is
    noted, if there is a local copy: a name may lead to another commit later.
    """
    named: dict[str, str] = {}
    with suppress(OSError):
        named = other_models(_read_json(model, revision, "config.json")) if model else {}
    for about in (
        (model, revision, download_dir),
        *((n, None, download_dir) for n in named.values()),
    ):
        state = _state_of(*about) if model else []
        if state:
            _noted.setdefault(about, state)


def _note_again() -> None:
    """Note all models anew in a process that was forked: it loads weights only from now on.

    vLLM runs plugins once in a process and its forks. So a second engine of one process has no
    other sign of its beginning.
    """
    _noted.update({about: _state_of(*about) for about in _noted})


os.register_at_fork(after_in_child=_note_again)


def have_files_changed(
    model: str, revision: str | None = None, download_dir: str | None = None
) -> bool:
    """Return True if weight files were replaced since they were noted.

    The weights that were loaded may then be older than the files, or a mixture.
    """
    noted = _noted.get((model, revision, download_dir))
    return noted is not None and noted != _state_of(model, revision, download_dir)


def _state_of(
    model: str, revision: str | None, download_dir: str | None
) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of every weight file, or the commit of a hub's copy."""
    path, found = Path(model), []
    with suppress(OSError):  # `weights_identity` logs it
        if not os.path.exists(path):
            snapshot = _hub_snapshot(model, revision, download_dir)
            return [] if snapshot is None else [(snapshot.name, 0, 0)]
        parts = _weights_by_folder(path).values() if os.path.isdir(path) else [_parts_of(path)]
        for file in chain.from_iterable(parts):
            with suppress(OSError):
                about = file.stat()
                found.append((str(file), about.st_size, about.st_mtime_ns))
    return sorted(found)


def _snapshot_commit(path: Path) -> str | None:
    """Return model and commit of a folder in a hub cache, else None.

    The folder is `.../models--<name>/snapshots/<commit>`. Offline, vLLM names it instead of the
    model.
    """
    resolved = Path(os.path.abspath(path))
    model = resolved.parent.parent.name
    is_cached = resolved.parent.name == "snapshots" and model.startswith("models--")
    return f"{model}@{resolved.name}" if is_cached and _COMMIT.fullmatch(resolved.name) else None


def _hub_snapshot(model: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Return the local folder with the weights of a model and revision on the hub."""
    if download_dir is None:
        return _cached_snapshot(model, revision)
    return _downloaded_snapshot(model, revision, Path(os.path.expanduser(download_dir)))


def _downloaded_snapshot(model: str, revision: str | None, download_dir: Path) -> Path | None:
    """Return the folder with the weights of a model and revision in a directory of downloads.

    vLLM downloads weights there, and configuration to the hub's cache. That cache may hold another
    commit, so only a folder with weights counts.
    """
    folder = download_dir / f"models--{model.replace('/', '--')}"
    commit = revision or "main"
    with suppress(OSError, ValueError):  # there is no such reference if it is a commit itself
        commit = (folder / "refs" / commit).read_text("utf-8")
    snapshot = folder / "snapshots" / commit
    return snapshot if _COMMIT.fullmatch(commit) and _weights_in(snapshot) else None


def _read_json(model: str, revision: str | None, name: str) -> dict[str, object]:
    """Return what a file of a model's configuration contains; nothing if there is no such file.

    Also nothing if it is no JSON. Raises `OSError` if it cannot be read.
    """
    folder = Path(model) if os.path.isdir(model) else _cached_snapshot(model, revision)
    try:
        found = json.loads((folder / name).read_text("utf-8")) if folder is not None else {}
    except (FileNotFoundError, IsADirectoryError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _cached_snapshot(
    model: str, revision: str | None, files: Sequence[str] = _HUB_CONFIGS
) -> Path | None:
    """Return the folder of a model and revision in the local hub cache with one of `files`.

    Raises `OSError` if the cache cannot be read.
    """
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = [try_to_load_from_cache(model, name, revision=revision) for name in files]
    except ValueError:  # not a valid repository name
        return None
    return next((Path(each).parent for each in found if isinstance(each, str)), None)


def _files_of(folder: Path) -> list[Path]:
    """Return configuration, code and weights; none if no known weight file is there."""
    weights = _weights_by_folder(folder)
    if not weights[folder]:
        return []
    read = {path for files in weights.values() for path in files}
    for part in (part for part, files in weights.items() if files):
        read |= _matching(part, _CONFIG_FILES)
    return sorted(path for path in read if path.name not in _FOR_PROMPTS)


def _weights_by_folder(folder: Path) -> dict[Path, set[Path]]:
    """Return the weight files of a model, by the folder that has them; its own comes first."""
    parts = (folder, *(folder / name for name in _PARTS_OF_MODELS))
    return {part: _weights_in(part) for part in parts}


def _weights_in(folder: Path) -> set[Path]:
    return _matching(folder, _WEIGHT_FILES)


def _matching(folder: Path, patterns: Sequence[str]) -> set[Path]:
    """Return what a folder has under names of these patterns, except other folders.

    A link that leads nowhere counts: the file may have been there when the weights were loaded.
    Raises `OSError` if the folder exists and cannot be listed; `Path.glob` would find nothing.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return set()
    matching = (name for name in names if any(fnmatchcase(name, each) for each in patterns))
    return {folder / name for name in matching if not os.path.isdir(folder / name)}


def _parts_of(file: Path) -> list[Path]:
    """Return the files that vLLM loads for one: of GGUF all parts, and the encoders of media.

    Raises `OSError` if the folder of a GGUF file cannot be listed.
    """
    if file.suffix != ".gguf":
        return [file]
    found = {file, *_matching(file.parent, ["*mmproj*.gguf"])}
    part = _GGUF_PART.fullmatch(file.name)
    for each in _matching(file.parent, ["*.gguf"]) if part is not None else ():
        other = _GGUF_PART.fullmatch(each.name)
        if part is not None and other is not None and other.groups() == part.groups():
            found.add(each)
    return sorted(found)
