# Write the process id first, so that the party can be stopped from now on.
if [[ "$doOnce" == "true" ]]; then
  own="$WORKSPACE/pid.fl"
else
  check_daemon
  own="$WORKSPACE/daemon_pid.fl"
fi
echo $$ > "$own"
"$FEDSTRATA_PYTHON" -m fedstrata.sites.start "$WORKSPACE" $arguments || { code=$?; rm -f "$own"; exit $code; }

