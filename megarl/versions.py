"""Which versions of the heavy packages megarl runs with; `setup.py` takes its pins from here. Imports none of them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

# known to work together on a CPU
CPU = {"torch": "2.13.0", "megatron-core": "0.16.1", "transformers": "5.24.0"}
# what a cluster's image may bring: torch from where it multiplies bf16 into fp32 (model/head.py), the Megatron-core
# whose errors model/megatron_fixes.py corrects, transformers with the formats of 5
RANGES = {"torch": ">=2.8,<3", "megatron-core": ">=0.16.1,<0.17", "transformers": ">=5.19,<6"}
IF_INSTALLED = {"transformer-engine": ">=2.9,<2.12"}  # what Megatron-core 0.16.1 and megarl were written against


def check(require_apex: bool = False) -> None:
    """Compare the installed versions with RANGES, and with IF_INSTALLED where they are.

    Args:
        require_apex: whether NVIDIA apex must be there too.

    Raises:
        UserMistake: a package is missing or outside its range.
    """
    from packaging.specifiers import SpecifierSet  # setup.py runs this file before anything is installed

    from megarl.errors import UserMistake

    for package, wanted in (RANGES | IF_INSTALLED).items():
        remedy = f"run bash launch/setup.sh, or: pip install '{package}{wanted}'"
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            if package in IF_INSTALLED:
                continue
            raise UserMistake(f"the package {package} is not installed", "environment", remedy) from None
        if not SpecifierSet(wanted).contains(version, prereleases=True):
            raise UserMistake(f"{package} {version} is not {wanted}", "environment", remedy)
    if require_apex and apex() != "nvidia":
        what = {"none": "NVIDIA apex is not installed", "unrelated": "the package apex here is not NVIDIA's"}[apex()]
        raise UserMistake(what, "run.require_apex", "build github.com/NVIDIA/apex (pip install apex brings another "
                                                    "package), or set it to false")


def apex() -> str:
    """`nvidia`, `unrelated` (the package that `pip install apex` brings) or `none`."""
    found = importlib.util.find_spec("apex")
    if found is None:
        return "none"
    places = found.submodule_search_locations or ()
    return "nvidia" if any((Path(place) / "multi_tensor_apply").is_dir() for place in places) else "unrelated"
