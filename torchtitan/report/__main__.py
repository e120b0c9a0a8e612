"""Write one HTML page about a run, finished or not. The page needs no network and no server.

    torchtitan report outputs                # writes outputs/report.html
    torchtitan report outputs -o page.html

Exit code 2: there is no run in the folder, or the page cannot be written.
"""

import argparse
from pathlib import Path

from torchtitan.report.page import page_of
from torchtitan.report.read import NoRunError, read_run
from torchtitan.tools.errors import ConfigError
from torchtitan.tools.files import whole_file
from torchtitan.tools.storage import require_disk


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="torchtitan report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run_folder",
        nargs="?",
        default="outputs",
        help="the job.dump_folder of a run (default: outputs)",
    )
    parser.add_argument(
        "-o", "--output", help="the page to write (default: RUN_FOLDER/report.html)"
    )
    args = parser.parse_args()
    try:
        folder = Path(require_disk("RUN_FOLDER", args.run_folder))
        output = Path(require_disk("--output", args.output or str(folder / "report.html")))
        text = page_of(read_run(folder))
        with whole_file(output) as file:
            file.write(text.encode())
    except (NoRunError, ConfigError) as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename or output}: {error.strerror or error}")
    print(f"{output}: {len(text.encode()) / 1e3:,.0f} kB")


if __name__ == "__main__":
    main()
