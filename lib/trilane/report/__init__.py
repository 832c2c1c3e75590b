"""Presentation: executed notebooks, one HTML page of a study, figures (`plots`), widgets."""

import sys

# nbformat imports jsonschema, which builds a grammar for checks of IRIs if it finds this package: a
# second of processor time at each start, for a check that no notebook asks for. None makes its
# import fail, as if it were not installed.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
