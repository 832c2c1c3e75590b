#!/bin/bash
# In place of a program that launches a training: its name and arguments, each ended by NUL, go to
# a new file next to it, and nothing is started but a shell, in which variables are replaced and
# further stubs called: srun bash -c '$LAUNCHER $CMD'.
for ((n = 1; n <= $#; n++)); do
    case ${!n##*/} in bash | sh) exec "${@:n}" ;; esac
done
folder=${0%/*}
for ((number = 1; number < 10000; number++)); do
    printf -v file '%s/launch-%04d' "$folder" "$number"
    if (set -o noclobber && printf '%s\0' "${0##*/}" "$@" >"$file") 2>/dev/null; then
        exit 0
    fi
done
echo "${0##*/}: no file launch-N can be written in $folder" >&2
exit 1
