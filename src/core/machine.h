// What this machine is, for `tandem info` and beside every measurement.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

struct Machine {
  std::string cpu;                    ///< model name, "unknown" where the system does not say
  int threads = 1;                    ///< CPUs this process may run on
  uint64_t memory_bytes = 0;          ///< of the host
  std::vector<std::string> features;  ///< those that matter to the kernels: "avx2", "amx_bf16", …
  /// "2x Intel(R) Xeon(R) Processor"
  std::string describe() const;
};

Machine this_machine();

/// Processes that ran or waited for a processor during the last minute, for each of the host's
/// processors: above 1, programs compete. 0 if the system does not say.
double load_per_core();

/// How many of a world's `ranks` share this host: all of them, or what mpirun, torchrun or srun
/// says.
int ranks_here(int ranks);
/// Tasks of a node, counted from 0, by Slurm's list "2(x3),1"; 0 where that says nothing of it.
int slurm_tasks_of(std::string_view tasks_per_node, int node);

/// CPU threads for each of `ranks` ranks: TANDEM_THREADS, or this process's CPUs divided by the
/// ranks that share them (of several processes, those of this host). CPUs that the launcher has
/// bound this process to are its own.
int threads_per_rank(int ranks);

}  // namespace tandem
