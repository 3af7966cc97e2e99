#include "core/system/env.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string_view>
#include <type_traits>

#include "core/system/nearest.h"
#include "core/system/printable.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr int kMaxThreads = 4096;

template <typename Number>
Number number(const char* name, Number fallback, Number minimum, Number maximum) {
  const char* text = std::getenv(name);
  if (!text || !*text) return fallback;
  Number value{};
  const char* end = text + std::strlen(text);
  const auto [stop, code] = std::from_chars(text, end, value);
  if (code != std::errc() || stop != end || !(value >= minimum && value <= maximum)) {
    throw InvalidArgument(fmt::format("{}={}: expected {} from {} to {}", name, printable(text),
                                      std::is_integral_v<Number> ? "a whole number" : "a number",
                                      minimum, maximum));
  }
  return value;
}

std::string text(const char* name, const std::string& fallback) {
  const char* value = std::getenv(name);
  return value && *value ? value : fallback;
}

/// The first value is the default.
std::string one_of(const char* name, std::initializer_list<const char*> values) {
  const std::string value = text(name, *values.begin());
  std::string expected;
  for (const char* allowed : values) {
    if (value == allowed) return value;
    expected += (expected.empty() ? "" : ", ") + std::string(allowed);
  }
  throw InvalidArgument(std::string(name) + "=" + printable(value) + ": expected one of " +
                        expected);
}

constexpr const char* kFormerTransport = "TANDEM_MPI_WIRE";  // read if the current one is not set

std::string mpi_transport() {
  constexpr const char* kName = "TANDEM_MPI_TRANSPORT";
  const bool former = text(kName, "").empty() && !text(kFormerTransport, "").empty();
  return one_of(former ? kFormerTransport : kName, {"auto", "tcp", "mpi"});
}

std::string default_cache_dir() {
  const std::string xdg = text("XDG_CACHE_HOME", "");
  return xdg.empty() ? text("HOME", "/tmp") + "/.cache/tandem" : xdg + "/tandem";
}

const std::vector<std::string>& known_variables() {
  static const std::vector<std::string> names{
      "TANDEM_DEADLINE_S",
      "TANDEM_CACHE_DIR",
      "TANDEM_TUNE",
      "TANDEM_LOG",
      "TANDEM_THREADS",
      "TANDEM_MPI_SHM",
      "TANDEM_MPI_TRANSPORT",
      kFormerTransport,
      "TANDEM_DEVICE",
      "TANDEM_GPU_PORTABLE",
      "TANDEM_GRAPHS",
      "TANDEM_SNAPSHOT_MEMORY",
      "TANDEM_SNAPSHOT_TO_DISK",  // set by tandem launch
      "TANDEM_LINK",
      "TANDEM_API_KEY",
      "TANDEM_SECRET",
      "TANDEM_SECRET_FILE",
      "TANDEM_ALLOW_MIXED_BUILDS",
      "TANDEM_MEMBERSHIP",  // set by tandem launch
      "TANDEM_CHECK_MESSAGES",
      "TANDEM_STRICT",
      "TANDEM_COMMIT",  // read by builds of sources that are no clone, and by bench/
      "TANDEM_ISA"};    // read only by the Python package: python/tandem/_isa.py
  return names;
}

}  // namespace

std::vector<std::string> unknown_variables() {
  const auto& known = known_variables();
  std::vector<std::string> lines;
  for (char** entry = environ; entry && *entry; ++entry) {
    const std::string_view set(*entry);
    const std::string name(set.substr(0, set.find('=')));
    // Variables of tools/demo.sh and of the tests.
    if (!name.starts_with("TANDEM_") || name.starts_with("TANDEM_DEMO_") ||
        name.starts_with("TANDEM_TEST_")) {
      continue;
    }
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    const std::string close = nearest(name, known);
    lines.push_back(
        printable(name) + " is no variable of Tandem's" +
        (close.empty() ? " (tandem info lists them)" : ": did you mean " + close + "?"));
  }
  return lines;
}

const Env& env() {
  static const Env value{number("TANDEM_DEADLINE_S", 60.0, kMinDeadline, kMaxDeadline),
                         text("TANDEM_CACHE_DIR", default_cache_dir()),
                         one_of("TANDEM_TUNE", {"1", "0"}) == "1",
                         text("TANDEM_LOG", "info"),
                         number("TANDEM_THREADS", 0, 0, kMaxThreads),
                         one_of("TANDEM_MPI_SHM", {"1", "0"}) == "1",
                         mpi_transport(),
                         one_of("TANDEM_DEVICE", {"auto", "cpu", "gpu"}),
                         one_of("TANDEM_GPU_PORTABLE", {"0", "1"}) == "1",
                         one_of("TANDEM_GRAPHS", {"1", "0"}) == "1",
                         text("TANDEM_SECRET", ""),
                         text("TANDEM_SECRET_FILE", ""),
                         one_of("TANDEM_ALLOW_MIXED_BUILDS", {"0", "1"}) == "1",
                         one_of("TANDEM_CHECK_MESSAGES", {"0", "1"}) == "1",
                         one_of("TANDEM_STRICT", {"0", "1"}) == "1",
                         text("TANDEM_LINK", ""),
                         number("TANDEM_SNAPSHOT_MEMORY", -1, -1, 1 << 20),
                         one_of("TANDEM_SNAPSHOT_TO_DISK", {"0", "1"}) == "1",
                         text("TANDEM_API_KEY", "")};

  return value;
}

std::string shared_settings() {
  return fmt::format(
      "TANDEM_MPI_TRANSPORT={} TANDEM_MPI_SHM={:d} TANDEM_TUNE={:d}"
      " TANDEM_CHECK_MESSAGES={:d} TANDEM_STRICT={:d}",
      env().mpi_transport, env().mpi_shm, env().tune, env().check_messages, env().strict);
}

double checked_deadline(double seconds, std::string_view what) {
  if (seconds >= kMinDeadline && seconds <= kMaxDeadline) return seconds;
  throw InvalidArgument(fmt::format("{}: {} s: expected a number from {} to {}", what, seconds,
                                    kMinDeadline, kMaxDeadline));
}

double world_deadline(double seconds) {
  return seconds == 0 ? env().deadline_s : checked_deadline(seconds, "world options: deadline_s");
}

}  // namespace tandem
