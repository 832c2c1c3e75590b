"""How each trainer prints its iterations: the dialects that are tables (JSON files), those that need code of their own,
and a draft of a table for a log that none of them reads."""
