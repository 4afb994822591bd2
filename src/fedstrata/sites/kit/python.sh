umask 077
arguments="${*}"
# Find the Python that has fedstrata: FEDSTRATA_PYTHON, that of the fedstrata command, or python3. The first line of
# the command names its Python, or a shell if the path is too long; then Python lies beside the command.
if [[ -z "${FEDSTRATA_PYTHON:-}" ]]; then
  FEDSTRATA_PYTHON=python3
  command="$(command -v fedstrata || true)"
  if [[ -n "$command" ]]; then
    named="$(head -n 1 "$command" | cut -c 3-)"
    beside="$(dirname "$(readlink -f "$command")")/python"
    if [[ -x "$named" && "$named" != */sh ]]; then
      FEDSTRATA_PYTHON="$named"
    elif [[ -x "$beside" ]]; then
      FEDSTRATA_PYTHON="$beside"
    fi
  fi
fi
export FEDSTRATA_PYTHON
# Messages arrive in many threads. With an arena per thread, the C library keeps ever more freed memory.
export MALLOC_ARENA_MAX="${MALLOC_ARENA_MAX:-2}"
# Each thread caches freed blocks: 240 KB for blocks up to 1 KiB, after hours. With a limit of 256 bytes it caches 15 KB
# and training is as fast as before; without a cache training is slower.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.tcache_max=256}"
