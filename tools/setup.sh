#!/usr/bin/env bash
# setup.sh build|test|cuda: installs missing packages on a Debian machine, and prints what and why.
# Installs nothing, and so needs no network, if nothing is missing.
set -eu

goal=${1:-build}
boost=libboost-dev  # Debian 12's has no usable Beast for C++20
grep -qs 'VERSION_ID="12"' /etc/os-release && boost=libboost1.81-dev
# package|why
packages="
g++|the compiler
cmake|configures the build
ninja-build|runs the build
git|stamps the build with its commit
libdnnl-dev|oneDNN: matrix products on the CPU
libopenmpi-dev|Open MPI: ranks as processes
openmpi-bin|mpirun
libcli11-dev|command line
libtomlplusplus-dev|configuration files
nlohmann-json3-dev|JSON
libfmt-dev|text formatting
libspdlog-dev|logging
libxxhash-dev|checkpoint content hashes
zlib1g-dev|reads gzip data
libzstd-dev|reads zstd data
libjs-chart.js|charts of the report
$boost|Beast: the live page
xz-utils|compressor to compare the model with
"
if [ "$goal" = test ]; then
  packages="$packages
libgtest-dev|unit tests
libgmock-dev|unit tests
libbenchmark-dev|micro-benchmarks
clang-format|format check
python3|lint
pkgconf|builds against the installed library
python3-dev|the Python package
python3-pip|fetches nanobind, which Debian 12 has not
python3-yaml|checks the files under deploy
python3-numpy|tests of the Python package
python3-torch|tests of the Python package with PyTorch (CPU)
mypy|checks the Python package's types
iproute2|hosts and rate-limited links for the network test
chromium|opens the report and checks its charts
"
fi

missing=""
while IFS='|' read -r package why; do
  [ -n "$package" ] || continue
  if ! dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed'; then
    missing="$missing $package"
    printf 'setup: will install %-22s %s\n' "$package" "$why"
  fi
done <<<"$packages"

if [ -n "$missing" ]; then
  command -v apt-get >/dev/null || {
    echo "setup: this is not a Debian machine: install these yourself:$missing" >&2
    exit 1
  }
  sudo=""
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || {
      echo "setup: not root and no sudo: as root, run: apt-get install$missing" >&2
      exit 1
    }
    sudo=sudo
  fi
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  for step in "update -qq" "install -y -qq --no-install-recommends$missing"; do
    # shellcheck disable=SC2086
    if ! $sudo env DEBIAN_FRONTEND=noninteractive apt-get $step >"$log" 2>&1; then
      tail -n 20 "$log" >&2
      echo "setup: apt-get $step failed" >&2
      exit 1
    fi
  done
  echo "setup: installed$missing"
fi
