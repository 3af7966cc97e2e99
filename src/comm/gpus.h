// The GPUs that this process can use and the libraries it uses them with, for `tandem info` and
// beside every measurement.
#pragma once

#include <map>
#include <string>

namespace tandem {

struct Gpus {
  int count = 0;
  std::string missing;  ///< why there is none: what the build or the machine lacks
  std::string name;     ///< of the first
  double memory_gib = 0;
  std::string architecture;             ///< "sm_90"
  std::map<std::string, int> versions;  ///< cuda, driver, nccl, cublaslt
  /// "4x NVIDIA H200"
  std::string describe(int ranks) const { return std::to_string(ranks) + "x " + name; }
};

Gpus this_machines_gpus();

}  // namespace tandem
