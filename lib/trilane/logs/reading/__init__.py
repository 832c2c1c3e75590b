"""From the bytes of a log to its runs, fast and in constant memory: lines of one form are parsed together by array
operations, others that may matter one by one."""
