"""What people see: executed notebooks, one HTML page of a study, figures (`plots`), widgets."""

from trilane.report import plots as plots
