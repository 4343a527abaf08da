"""A checkpoint's directory: it appears whole or not at all, and says itself whether it still is what was written.

It is written under another name beside its place, every file is flushed to the disk, and then it is renamed. Its file
`checksums.json` has the size and the BLAKE2b digest of each of the others.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

CHECKSUMS = "checksums.json"
_PIECE = 1 << 24


def whole(directory: Path) -> list[Path]:
    """The run's own checkpoints, oldest first; a copy that somebody made under another name is not one."""
    return sorted(path for path in directory.glob("step_*") if re.fullmatch(r"step_\d{8}", path.name))


def is_begun(directory: Path) -> bool:
    """Whether the run has a checkpoint, be it one that `recover` would put back."""
    return bool(whole(directory)) or any(directory.glob(".replaced_*"))


def digest(path: Path) -> tuple[int, str]:
    """(bytes, BLAKE2b-128) of a file.

    Raises:
        OSError: it cannot be read.
    """
    total, found = 0, hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            found.update(piece)
            total += len(piece)
    return total, found.hexdigest()


def begin(directory: Path, step: int) -> Path:
    """An empty directory to write into; what an earlier life left half done is removed. By one rank."""
    for left in (*directory.glob(".partial_*"), *directory.glob(".replaced_*")):
        shutil.rmtree(left, ignore_errors=True)
    partial = directory / f".partial_{step:08d}"
    partial.mkdir(parents=True)
    return partial


def commit(partial: Path, final: Path, checksums: dict[str, tuple[int, str]]) -> None:
    """Give a directory that all have written into its name. By one rank.

    Args:
        partial, final: its name so far, and its name.
        checksums: of all files in it: name -> (bytes, digest).
    """
    write_checksums(partial, checksums)
    for path in (*partial.iterdir(), partial):
        flush(path)
    replaced = final.with_name(final.name.replace("step_", ".replaced_"))
    if final.exists():  # of a life that got as far; it stays until the new one can take its name
        os.rename(final, replaced)
    os.rename(partial, final)
    flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def write_checksums(directory: Path, checksums: dict[str, tuple[int, str]]) -> None:
    """Note them."""
    with open(directory / CHECKSUMS, "w", encoding="utf-8") as file:
        json.dump(checksums, file, indent=0, sort_keys=True)


def prune(directory: Path, keep: int, keep_every: int) -> None:
    """Remove all but the newest `keep` checkpoints and those whose step `keep_every` (0: none) divides. By one rank."""
    for old in whole(directory)[:-keep]:
        if not keep_every or int(old.name.removeprefix("step_")) % keep_every:
            doomed = old.with_name(old.name.replace("step_", ".replaced_"))
            os.rename(old, doomed)  # at once: one that is half removed must not be found
            shutil.rmtree(doomed, ignore_errors=True)


def recover(directory: Path) -> None:
    """Put back a checkpoint whose writer was killed between taking its name away and giving it to the new one."""
    for replaced in directory.glob(".replaced_*"):
        final = replaced.with_name(replaced.name.replace(".replaced_", "step_"))
        if not final.exists():
            os.rename(replaced, final)


def set_aside(path: Path) -> None:
    """Take a damaged checkpoint out of the way, under the name `damaged_<its name>`. By one rank."""
    aside = path.with_name(f"damaged_{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)


def expected(path: Path) -> dict[str, tuple[int, str]]:
    """What `checksums.json` says.

    Raises:
        OSError, ValueError: it is not there, or cannot be understood.
    """
    told = json.loads((path / CHECKSUMS).read_text(encoding="utf-8"))
    return {str(name): (int(size), str(value)) for name, (size, value) in told.items()}


def damage(path: Path, names: Iterable[str], told: dict[str, tuple[int, str]]) -> str:
    """What is wrong with the first bad one of the files `names` of a checkpoint; "" if all are as they were written."""
    for name in names:
        try:
            size = (path / name).stat().st_size
            if size != told[name][0]:
                return f"{name} has {size} bytes, {told[name][0]} were written"
            if digest(path / name) != told[name]:
                return f"{name} is not as it was written (its checksum differs)"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return ""


def flush(path: Path) -> None:
    """Have a file, or what names a directory has, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
