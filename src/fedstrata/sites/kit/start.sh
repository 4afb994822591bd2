  kit="$(cd "$DIR/.." && pwd)"
  "$FEDSTRATA_PYTHON" -m fedstrata.sites.start "$kit" --check || exit $?
  "$DIR/sub_start.sh" $arguments --checked &
  # Wait until sub_start.sh has ended or has written its process id, which is needed to stop it.
  for _ in {1..50}; do
    kill -0 $! 2> /dev/null || break
    grep -qx $! "${NVFL_WORKSPACE:-$kit}/daemon_pid.fl" 2> /dev/null && break
    sleep 0.1
  done
