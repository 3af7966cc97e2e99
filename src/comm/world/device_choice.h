// Device of the ranks of a command that was given none.
#pragma once

#include <string>

#include "comm/world/gpus.h"

namespace tandem {

/// Ranks of a command, and their needs.
struct DeviceRequest {
  int ranks = 1;              ///< on this host
  int ranks_per_gpu = 1;      ///< above 1: all ranks share the first GPU
  bool one_host = true;       ///< no rank is on another host, whose GPUs are not known here
  double rank_bytes = 0;      ///< GPU memory that a rank needs, as far as known
  std::string cpu_only = {};  ///< reason that only CPU ranks run the job, or empty
};

struct DeviceChoice {
  bool on_gpus = false;
  std::string note;  ///< the device and why, in a line; empty if there is no GPU to speak of
};

/// GPUs if each rank gets one of sm_90, which the kernels are made for, and can run there; else the
/// CPU. `cpu_option`: the option that asks for the CPU.
DeviceChoice choose_device(const Gpus& gpus, const DeviceRequest& request,
                           const std::string& cpu_option = "--device cpu");

}  // namespace tandem
