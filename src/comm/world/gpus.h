// GPUs that this process can use and the libraries it uses them with, for `tandem info` and the
// header of every measurement.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tandem/communicator.h"

namespace tandem {

struct Gpus {
  int count = 0;
  std::string missing;  ///< reason there is no GPU: what the build or the machine lacks
  std::string name;     ///< name of the first GPU
  double memory_gib = 0;
  std::string architecture;                ///< "sm_90"
  std::vector<std::string> architectures;  ///< of each GPU
  std::map<std::string, int> versions;     ///< cuda, driver, nccl, cublaslt
  /// Description such as "4x NVIDIA H200".
  std::string describe(int ranks) const { return std::to_string(ranks) + "x " + name; }
};

Gpus this_machines_gpus();

/// GPUs of the ranks of `comm`, which have one each or share one.
inline int count_gpus(const Communicator& comm) {
  return comm.link().ends_with("same-gpu") ? 1 : comm.size();
}

/// Whether an error of this thread's GPU is final: all later calls of this process return it.
bool has_lost_gpu();

}  // namespace tandem
