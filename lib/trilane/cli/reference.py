"""`python docs/reference/make.py`, by the name that it had."""

import runpy

from trilane.workspace.installation import checkout

if __name__ == "__main__":
    runpy.run_path(f"{checkout()}/docs/reference/make.py", run_name="__main__")
