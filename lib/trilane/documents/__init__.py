"""Tables of measured runs that people typed, in Markdown or CSV: read into rows, and checked for contradictions."""
