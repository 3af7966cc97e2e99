// Description of this machine, for `tandem info` and stored with every measurement.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

struct Machine {
  std::string cpu;                    ///< model name, "unknown" if not reported
  int threads = 1;                    ///< CPUs this process may run on
  uint64_t memory_bytes = 0;          ///< memory of the host
  std::vector<std::string> features;  ///< those relevant to the kernels: "avx2", "amx_bf16", …
  /// "2x Intel(R) Xeon(R) Processor"
  std::string describe() const;
};

Machine this_machine();

/// Memory of the host, or what a container's control group allows if that is less; 0 if unknown.
uint64_t usable_memory_bytes();
/// Name of this host, as gethostname.
std::string host_name();
/// Id of the running kernel: differs between hosts, and between two boots of one; empty if unknown.
std::string boot_id();

/// Processes that ran or waited for a processor in the last minute, per processor of the host:
/// above 1, programs compete. 0 if not reported.
double load_per_core();

/// Number of a world's `ranks` on this host: all of them, or the number given by mpirun, torchrun
/// or srun.
int ranks_here(int ranks);
/// Tasks of a node, counted from 0, in Slurm's list "2(x3),1"; 0 if the list does not give it.
int slurm_tasks_of(std::string_view tasks_per_node, int node);

/// CPU threads per rank for `ranks` ranks: TANDEM_THREADS, or this process's CPUs divided by the
/// ranks that share them (with several processes, those of this host). CPUs that the launcher bound
/// to this process are not shared.
int threads_per_rank(int ranks);

}  // namespace tandem
