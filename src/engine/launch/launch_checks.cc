#include "engine/launch/launch_checks.h"

#include <fmt/format.h>

#include <cstring>
#include <filesystem>

#include "core/system/printable.h"
#include "engine/launch/processes/local_processes.h"
#include "engine/serve/http/listen_address.h"
#include "tandem/error.h"

namespace tandem {

bool restarts_all(const LaunchRequest& request) {
  return runs_tandem(request.command, "serve") && request.restarts > 0;
}

void check_replaceable(const LaunchRequest& request) {
  if (!request.replaces() && !request.inject.empty()) {
    throw InvalidArgument(
        "launch --inject: expected --spares, --restarts or --min-dp, so that lost ranks are "
        "noticed");
  }
  if (!request.replaces()) return;
  if (runs_tandem(request.command, "train")) return;
  const bool only_restarts = request.spares == 0 && request.min_dp == 0 && request.inject.empty();
  if (restarts_all(request) && only_restarts) return;
  throw InvalidArgument(fmt::format(
      "launch --{}: command {}: expected tandem train, whose ranks can be replaced{}",
      request.spares > 0     ? "spares"
      : request.min_dp > 0   ? "min-dp"
      : request.restarts > 0 ? "restarts"
                             : "inject",
      printable(request.command.front()),
      runs_tandem(request.command, "serve") ? "; tandem serve has --restarts only" : ""));
}

std::string live_folder(const LaunchRequest& request) {
  parse_listen_address("--live", request.live);
  const std::string out = training_output(request);
  if (out.empty()) {
    throw InvalidArgument(
        fmt::format("launch --live: command {}: expected tandem train … --out OUT",
                    printable(request.command.front())));
  }
  const auto absolute = [](const std::string& path) {
    const auto normal = std::filesystem::absolute(path).lexically_normal();
    return normal.has_filename() ? normal : normal.parent_path();
  };
  if (request.out.empty() || absolute(request.out) == absolute(out)) return out;
  throw InvalidArgument(
      fmt::format("launch --live: --out {}: expected none, or that of tandem train, {}",
                  printable(request.out), printable(out)));
}

std::string training_output(const LaunchRequest& request) {
  const auto& command = request.command;
  std::string out;
  for (size_t i = 0; i < command.size(); ++i) {
    if (command[i] == "--out" && i + 1 < command.size()) out = command[i + 1];
    if (command[i].starts_with("--out=")) out = command[i].substr(std::strlen("--out="));
  }
  return out;
}

}  // namespace tandem
