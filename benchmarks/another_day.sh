#!/usr/bin/env bash
# Passes the tests on other days, in other time zones and locales, without a user's name, and on a busy machine:
#     benchmarks/another_day.sh [--quick] [PYTEST ARGUMENTS]
# another_day.c moves the clock of the day and the times of files. libfaketime does not serve: where monotonic clocks stay as they are, by
# which Python waits, its pthread_cond_timedwait() ends some processes, and it moves what stat() tells, where Python calls stat64().
set -euo pipefail
cd "$(dirname "$0")/.."
make venv-dev
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cc -shared -fPIC -o "$work/another_day.so" benchmarks/another_day.c -ldl
arguments=("$@")
if [ "${1:-}" = --quick ]; then
  arguments=(-m "not slow" "${@:2}")
fi
locale=$(locale -a | grep -i 'tr_TR.utf-\?8' || echo POSIX)
locale=${locale%%$'\n'*}

pass() { # DAYS ZONE LOCALE WORKERS
  echo "$1 days from now, TZ=$2, LC_ALL=$3, $4 workers"
  env -u USER -u LOGNAME TZ="$2" LC_ALL="$3" ANOTHER_DAY="$(($1 * 86400))" LD_PRELOAD="$work/another_day.so" \
    .venv/bin/python -m pytest -n "$4" --dist loadgroup --no-loadscope-reorder "${arguments[@]}"
}

failed=0
pass 40 Pacific/Kiritimati C.UTF-8 3 || failed=1
pass 400 America/St_Johns "$locale" 5 || failed=1
exit "$failed"
