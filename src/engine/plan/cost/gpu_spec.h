// Data-sheet rates of GPUs and the links of the hosts that published runs used.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tandem::plan {

constexpr double kGiB = 1024.0 * 1024 * 1024;

struct GpuSpec {
  std::string_view name;    ///< beginning of the names it serves
  std::string_view family;  ///< GPUs whose kernels have one efficiency
  double bf16_flops = 0, fp8_flops = 0;
  double memory_bytes = 0, memory_rate = 0;  ///< bytes, bytes/s
  double nvlink_rate = 0;                    ///< bytes/s of a GPU in one direction
  double nic_rate = 0;                       ///< bytes/s of a GPU's share of its host's adapters
  double host_gpus = 8;
  double learner_rate = nic_rate;  ///< bytes/s of a GPU to other learners
  bool has_run_tandem = false;     ///< bench/results has runs of Tandem on it
};

/// Spec of the longest known beginning of `name`; nothing if there is none.
std::optional<GpuSpec> find_gpu(std::string_view name);

/// Spec of "h100", "a100-40gb", …: a known name in lower or upper case.
std::optional<GpuSpec> find_gpu_preset(std::string_view name);
/// Their names, in lower case.
std::vector<std::string> gpu_presets();

}  // namespace tandem::plan
