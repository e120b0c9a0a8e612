"""Write one HTML page about a run, finished or not. The page needs no network and no server.

    torchtitan report outputs                # writes outputs/report.html
    torchtitan report outputs -o page.html

Exit code 2: there is no run in the folder, or the page cannot be written.
"""

import argparse
from pathlib import Path

from torchtitan.report.page import page_of
from torchtitan.report.read import NoRunError, read_run
from torchtitan.tools.files import whole_file


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="torchtitan report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run_folder",
        type=Path,
        nargs="?",
        default=Path("outputs"),
        help="the job.dump_folder of a run (default: outputs)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="the page to write (default: RUN_FOLDER/report.html)"
    )
    args = parser.parse_args()
    output = args.output or args.run_folder / "report.html"
    try:
        text = page_of(read_run(args.run_folder))
        with whole_file(output) as file:
            file.write(text.encode())
    except NoRunError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{error.filename or output}: {error.strerror or error}")
    print(f"{output}: {len(text.encode()) / 1e3:,.0f} kB")


if __name__ == "__main__":
    main()
