"""What people see: executed notebooks, one HTML page of a study, figures (`plots`), widgets."""
