#!/usr/bin/env bash
# Runs a job of two commits in turns and compares them. Wants: COMMAND, BASE, and optionally RUNS, ALLOWED, UNCERTAIN.
#
# It works outside of GitHub too:   BASE=main COMMAND="--nproc-per-node 2 train.py" bash compare.sh
set -uo pipefail
: "${COMMAND:?what comes after dsprof run}" "${BASE:?the commit to compare with}"
RUNS=${RUNS:-5} ALLOWED=${ALLOWED:-3%} UNCERTAIN=${UNCERTAIN:-pass}
out=$(mktemp -d)
trap 'git worktree remove --force "$out/tree" 2>/dev/null; rm -rf "$out"' EXIT
git worktree add --quiet --detach "$out/tree" "$BASE" || exit 2
read -r -a words <<<"$COMMAND"

for ((i = 1; i <= RUNS; i++)); do
  (cd "$out/tree" && dsprof run -q --no-report -o "$out/base/$i" "${words[@]}") || { echo "the base failed: $COMMAND" >&2; exit 2; }
  dsprof run -q --no-report -o "$out/head/$i" "${words[@]}" || { echo "the head failed: $COMMAND" >&2; exit 1; }
done

dsprof compare "$out/base" "$out/head" --fail-on-regression "$ALLOWED" --markdown >"$out/said.md"
status=$?
cat "$out/said.md"
[[ -n "${GITHUB_STEP_SUMMARY:-}" ]] && cat "$out/said.md" >>"$GITHUB_STEP_SUMMARY"
outcome=$(sed -n 's/^### dsprof: //p' "$out/said.md")
[[ -n "${GITHUB_OUTPUT:-}" ]] && echo "outcome=$outcome" >>"$GITHUB_OUTPUT"
[[ $status == 4 && $UNCERTAIN == pass ]] && exit 0
exit "$status"
