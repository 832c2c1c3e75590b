#!/usr/bin/env bash
# Passes the tests on other days, in other time zones and locales, without a user's name, and on a busy machine:
#     benchmarks/another_day.sh [--quick] [PYTEST ARGUMENTS]
# libfaketime moves the clock, but no monotonic one, by which Python waits. file_times.c moves the times of files: libfaketime does so in
# stat(), where Python calls stat64(). Debian 12's libfaketime 0.9.10 does not serve: with a real monotonic clock it breaks nanosleep().
set -euo pipefail
cd "$(dirname "$0")/.."
make venv-dev
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target "$work" libfaketime==3.0.1
cc -shared -fPIC -o "$work/file_times.so" benchmarks/file_times.c -ldl
arguments=("$@")
if [ "${1:-}" = --quick ]; then
  arguments=(-m "not slow" "${@:2}")
fi
locale=$(locale -a | grep -m 1 -i 'tr_TR.utf-\?8' || echo POSIX)

pass() { # DAYS ZONE LOCALE WORKERS
  echo "$1 days from now, TZ=$2, LC_ALL=$3, $4 workers"
  env -u USER -u LOGNAME TZ="$2" LC_ALL="$3" TRILANE_FILE_TIMES="$(($1 * 86400))" \
    FAKETIME="+$1d" DONT_FAKE_MONOTONIC=1 FAKE_UTIME=1 \
    LD_PRELOAD="$work/file_times.so $work/libfaketime/vendor/libfaketime/src/libfaketime.so.1" \
    .venv/bin/python -m pytest -n "$4" --dist loadgroup --no-loadscope-reorder "${arguments[@]}"
}

failed=0
pass 40 Pacific/Kiritimati C.UTF-8 3 || failed=1
pass 400 America/St_Johns "$locale" 5 || failed=1
exit "$failed"
