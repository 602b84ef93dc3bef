"""What pip-audit's report (JSON) says of known vulnerabilities, a line for each; exit code 1 when there are any. For `make audit`."""

import json
import sys
from pathlib import Path


def main(report: Path) -> int:
    found = [
        " ".join((package["name"], package["version"], flaw["id"], *flaw["fix_versions"]))
        for package in json.loads(report.read_text())["dependencies"]
        for flaw in package.get("vulns", ())
    ]
    print(*found, f"audit: {len(found)} known vulnerabilities of the pins", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
