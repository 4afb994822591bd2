umask 077
arguments="${*}"
# Find the Python that has fedstrata: FEDSTRATA_PYTHON, the Python of the fedstrata command, or python3. The first line
# of the command names its Python. If that path is too long, it names a shell, and Python is in the command's folder.
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
# Messages arrive in many threads. With a memory arena per thread, the C library would keep more and more freed memory.
export MALLOC_ARENA_MAX="${MALLOC_ARENA_MAX:-2}"
# Each thread caches freed blocks of up to 1 KiB, which is 240 KB after hours. With blocks of up to 256 bytes, it caches
# only 15 KB, and training is as fast as before. Without a cache, training would be slower.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.tcache_max=256}"
