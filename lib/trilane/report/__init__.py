"""Presentation: executed notebooks, one HTML page of a study, figures (`plots`), widgets."""
