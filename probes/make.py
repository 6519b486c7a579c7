"""Write the probe sets beside this script: ``python probes/make.py`` after a change of ``make_everyday`` and the like.

With ``--check`` it only tells which files are not up to date.
"""

import argparse
import sys
from pathlib import Path

import make_everyday
import make_hard_five

SETS = (make_everyday, make_hard_five)


def main() -> int:
    """Write the files, or with ``--check`` compare them; exit code 1 where one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only tell which files are not up to date")
    arguments = parser.parse_args()
    code = 0
    for module in SETS:
        probe_set = module.build()
        file = Path(__file__).with_name(f"{probe_set.name}.yaml")
        if not arguments.check:
            probe_set.save(file)
        elif not file.exists() or file.read_text(encoding="utf-8") != probe_set.to_yaml():
            print(f"{file.name} is not what {module.__name__}.py makes")
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
