  kit="$(cd "$DIR/.." && pwd)"
  "$FEDSTRATA_PYTHON" -m fedstrata.sites.start "$kit" --check || exit $?
  "$DIR/sub_start.sh" $arguments --checked &
  # Wait until it has ended or written its process id, so that it can be stopped.
  for _ in {1..50}; do
    kill -0 $! 2> /dev/null || break
    grep -qx $! "${NVFL_WORKSPACE:-$kit}/daemon_pid.fl" 2> /dev/null && break
    sleep 0.1
  done
