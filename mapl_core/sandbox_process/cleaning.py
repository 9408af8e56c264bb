"""Emptying a folder that a program could write to."""

from __future__ import annotations

import itertools
import os
import stat


def clear(folder: str) -> None:
    """Empty a folder, whatever a program left in it: deep trees, long paths and missing permissions included."""
    numbers = itertools.count()
    names = os.listdir(folder)
    while names:
        path = os.path.join(folder, names.pop())
        if not _is_folder(path):
            os.unlink(path)
            continue
        os.chmod(path, 0o700)
        for name in os.listdir(path):  # moved up instead of followed down
            inner, new_name = os.path.join(path, name), f"clear-{next(numbers)}"
            while os.path.lexists(os.path.join(folder, new_name)):
                new_name = f"clear-{next(numbers)}"
            if _is_folder(inner):
                os.chmod(inner, 0o700)
            os.rename(inner, os.path.join(folder, new_name))
            names.append(new_name)
        os.rmdir(path)


def _is_folder(path: str) -> bool:
    return stat.S_ISDIR(os.lstat(path).st_mode)
