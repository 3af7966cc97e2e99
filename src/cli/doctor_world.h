// `tandem doctor` without a run: checks the hosts and links of a world and prints a verdict for
// each.
#pragma once

#include <string>

#include "bench/machine/diagnosis.h"
#include "cli/devices.h"
#include "cli/result_output.h"

namespace tandem::cli {

struct DoctorRequest {
  int ranks = 0;      ///< to start; 0: one a GPU, 4 on CPUs, or one on each of the hosts
  std::string hosts;  ///< file of hosts; empty: this machine
  std::string remote_shell = "ssh -o BatchMode=yes";
  double start_timeout_s = 60;
  DeviceOptions devices;
  std::string inject;  ///< "RANK:KIND", a fault that is to be named
  ResultOutput output;
  bool rank_side = false;  ///< started by this command: rank 0 prints the results as JSON
  DiagnosisRequest diagnosis;
};

/// In a process of a launcher: checks its world; rank 0 prints. Else starts the ranks as `tandem
/// launch` does. Throws Ended{1} if a host or link is bad; InvalidArgument; Ended after one line
/// that names a rank or host that ended, hung or could not be started.
void run_doctor(const DoctorRequest& request);

}  // namespace tandem::cli
