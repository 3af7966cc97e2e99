#!/usr/bin/env bash
# fresh_debian.sh 12|13 [--quick|--image] [--cache DIR]: tests the setup on a new machine. Creates that
# Debian by debootstrap, clones this checkout's HEAD into it and runs the README's two commands
# there, as root, in separate namespaces; everything is removed at the end except
# out/fresh_debian_*.log and the packages in the cache (default: ~/.cache/tandem). --quick builds at
# -O1, and runs the tests of the kernels, the communicators and the operators. --image (with 12) runs
# the RUN lines of the Dockerfile instead, each of its two images in a system of its own.
# Exit: 0 passed, 1 failed, 77 the system could not be created (not root, no debootstrap, no mirror).
set -eu
cd "$(dirname "$0")/.."

usage() { echo "usage: tools/fresh_debian.sh 12|13 [--quick|--image] [--cache DIR]" >&2; exit 2; }
skip() { echo "fresh_debian: $1" >&2; exit 77; }
version="" mode=full cache=${XDG_CACHE_HOME:-$HOME/.cache}/tandem
while [ $# -gt 0 ]; do
  case $1 in
    12 | 13) version=$1 ;;
    --quick) mode=quick ;;
    --image) mode=image ;;
    --cache) [ $# -gt 1 ] || usage; cache=$2; shift ;;
    *) usage ;;
  esac
  shift
done
[ "$mode$version" != image13 ] || usage
case $version in
  12) suite=bookworm ;;
  13) suite=trixie ;;
  *) usage ;;
esac

# Debian mirror used by this machine's apt; debootstrap has a default if there is none.
mirror() {
  cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources \
    2>/dev/null | grep -v '^ *#' | grep -oE 'https?://[^] ]+/debian/?( |$)' | head -n 1 | tr -d ' '
}

# The new apt uses the same proxy and certificates; its pip uses those certificates, too.
configure_apt() {
  apt-config dump 2>/dev/null | grep -E '^Acquire::(https?|Check-)' >"$1/etc/apt/apt.conf.d/90host" || true
  if [ -f /etc/ssl/certs/ca-certificates.crt ]; then
    cp -L /etc/ssl/certs/ca-certificates.crt "$1/etc/apt/host.crt"
    echo 'Acquire::https::CaInfo "/etc/apt/host.crt";' >>"$1/etc/apt/apt.conf.d/90host"
    printf '[global]\ncert = /etc/apt/host.crt\n' >"$1/etc/pip.conf"
  fi
}

inside() {  # COMMAND: runs in the new system, in namespaces that end its mounts and processes with it
  unshare --mount --propagation private --pid --fork --kill-child bash -eu -c '
    mount --bind "$1" "$1"  # a root that can be remounted: the network test does so
    mount -t proc proc "$1/proc"
    mount --rbind /sys "$1/sys"
    mount --rbind /dev "$1/dev"
    mount -t tmpfs tmpfs "$1/dev/shm"
    mount --bind "$2" "$1/var/cache/apt/archives"
    exec chroot "$1" env -i HOME=/tmp LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin \
      bash -euc "cd /srv/tandem; $3"' - "$root" "$cache" "$1" </dev/null >>"$log" 2>&1
}

timed() {  # NAME COMMAND: appends its time to the report
  local start=$SECONDS
  if ! inside "$2"; then
    tail -n 40 "$log"
    echo "Debian $version: $report$1 failed after $((SECONDS - start)) s (whole log: $log)"
    exit 1
  fi
  report="$report$1 $((SECONDS - start)) s, "
}

[ "$(id -u)" = 0 ] || skip "not root: debootstrap and chroot need it"
command -v debootstrap >/dev/null || skip "debootstrap is not installed"
cache=$(realpath -m "$cache")/debian-$version
log=$PWD/out/fresh_debian_$version.log
mkdir -p "$cache" out
root=$(mktemp -d "${TMPDIR:-/var/tmp}/fresh_debian.XXXXXX")
chmod 755 "$root"
whole=$root
trap 'rm -rf --one-file-system "$whole"' EXIT
trap 'exit 1' INT TERM HUP
[ -z "$(git status --porcelain)" ] || echo "fresh_debian: only what is committed is tested" >&2

new_system() {  # ROOT
  # shellcheck disable=SC2046
  unshare --mount --propagation private debootstrap --variant=minbase --include=make,ca-certificates \
    --cache-dir="$cache" "$suite" "$1" $(mirror) >>"$log" 2>&1 ||
    { tail -n 5 "$log"; skip "debootstrap failed (whole log: $log)"; }
  configure_apt "$1"
  cp -L /etc/resolv.conf /etc/hosts "$1/etc/"
}

# Runs the RUN lines of the Dockerfile's image number $1.
run_lines() {
  local line
  while IFS= read -r line; do
    timed "${line%% && *}" "$line"
  done < <(awk -v image="$1" '/^FROM / {++found} found == image && sub(/^RUN /, "")' Dockerfile)
}

start=$SECONDS
: >"$log"
new_system "$root"
git clone --quiet --no-hardlinks . "$root/srv/tandem"
report="system $((SECONDS - start)) s, "

if [ "$mode" = full ]; then
  timed "make run" "make run"
  timed "make test" "make test"
elif [ "$mode" = image ]; then
  run_lines 1
  root=$whole/var/tmp/image
  new_system "$root"
  mkdir -p "$root/srv/tandem"
  cp -r "$whole/opt/tandem/." "$root/usr/local/"
  cp deploy/tandem-ranks.sh "$root/usr/local/bin/tandem-ranks"
  run_lines 2
else
  timed "set-up" "tools/setup.sh build; tools/setup.sh test"
  timed "build" 'make build-only CMAKE_FLAGS="-DTANDEM_TESTS=ON -DTANDEM_BENCH=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O1" \
      TARGETS="tandem_cli sanitized_tests gemm_test kernels_test"'
  timed "quick tests" 'build/bin/tandem --version
    ctest --test-dir build --output-on-failure -j 3 -L sanitized
    ctest --test-dir build --output-on-failure -j 3 -R "^(gemm|kernels)_test"'
fi
# Warnings of a newer compiler do not fail the build; they are shown so that they can be fixed.
warnings=$(grep -E '\[-W[a-z0-9=+-]+\]$' "$log" | sort -u || true)
passed=passed
if [ -n "$warnings" ]; then
  printf '%s\n' "$warnings"
  passed="passed, with $(wc -l <<<"$warnings") compiler warnings"
fi
echo "Debian $version: ${report%, }: $passed"
