"""Claims about judging a model's name: what it finds is tested with the loader, in test_models.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_a_name_is_judged_without_the_libraries_that_load_models():
    """A plan of jobs must be refused at once; importing transformers would take longer than all the rest."""
    code = """
import sys
from mapl_core.model_names import check_model_name
for name in ("pocket:tldr:4x", "smollm2-135m-instruct", "org/name", "mapl_core/pocket/weights/tldr-1x"):
    check_model_name(name)
print(sorted({"torch", "transformers", "peft"} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout == "[]\n"
