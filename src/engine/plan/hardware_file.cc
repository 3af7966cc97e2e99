#include "engine/plan/hardware_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#define TOML_HEADER_ONLY 1
#include <toml++/toml.h>

#include "core/system/files.h"
#include "core/system/printable.h"
#include "tandem/error.h"

namespace tandem::plan {
namespace {

double positive(const toml::table& table, std::string_view key, std::string_view unit,
                const std::string& file) {
  const auto node = table.at_path(key);
  if (!node) throw ConfigError(fmt::format("{}: no key {}: expected {}", file, key, unit));
  const auto value = node.value<double>();
  if (!value || !(*value > 0 && *value < 1e9)) {
    throw ConfigError(fmt::format("{}: {}: expected a positive number of {}", file, key, unit));
  }
  return *value;
}

}  // namespace

GpuSpec read_hardware(const std::string& name_or_path) {
  if (const auto preset = find_gpu_preset(name_or_path)) return *preset;
  const std::string file = single_line(name_or_path);
  if (!path_exists(name_or_path) && name_or_path.find_first_of("./") == std::string::npos) {
    throw InvalidArgument(fmt::format("--hardware {}: expected a TOML file, or one of {}", file,
                                      fmt::join(gpu_presets(), ", ")));
  }
  toml::table table;
  try {
    table = toml::parse(read_small_file(name_or_path), file);
  } catch (const toml::parse_error& error) {
    throw ConfigError(fmt::format("{}:{}: {}", file, error.source().begin.line,
                                  std::string_view(error.description())));
  }
  const std::string name = table["gpu"].value_or(std::string());
  const auto preset = find_gpu_preset(name), known = preset ? preset : find_gpu(name);
  if (!known) {
    throw ConfigError(fmt::format("{}: gpu {}: expected one of {}", file,
                                  name.empty() ? "is missing" : printable(name),
                                  fmt::join(gpu_presets(), ", ")));
  }
  GpuSpec gpu = *known;
  constexpr double kGiga = 1e9;
  gpu.host_gpus = positive(table, "gpus_per_host", "GPUs", file);
  gpu.nvlink_rate = kGiga * positive(table, "link.host", "GB/s of a GPU in one direction", file);
  gpu.nic_rate = kGiga * positive(table, "link.network", "GB/s of a GPU in one direction", file);
  gpu.learner_rate = gpu.nic_rate;
  if (table.at_path("link.learners"))
    gpu.learner_rate =
        kGiga * positive(table, "link.learners", "GB/s of a GPU in one direction", file);
  if (table.contains("memory_gib"))
    gpu.memory_bytes = kGiB * positive(table, "memory_gib", "GiB", file);
  return gpu;
}

}  // namespace tandem::plan
