"$FEDSTRATA_PYTHON" -m fedstrata.sites.stop "$WORKSPACE"
